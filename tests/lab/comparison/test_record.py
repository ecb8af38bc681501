"""What ``results.json`` may hold: the largest file, and ranks that share nodes."""

import json
import time
from contextlib import contextmanager

import pytest

from common.errors import UserError
from common.utils.typed_json import MOST_BYTES, encode
from lab.comparison.cell import CellRun, gather, new_cell
from lab.comparison.record import Comparison, Repeat, read_comparison, write_comparison
from tests.helpers import report_samples

MANY = 100_000


@contextmanager
def within(seconds):
    """Fail if the block takes more than ``seconds`` of the processor."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


def comparison_of(cells):
    return Comparison(
        kind="compare",
        created="2026-01-01T00:00:00",
        finished=False,
        settings={},
        environment={},
        warnings=[],
        cells=cells,
        timelines={},
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_file_of_the_most_cells_is_written_and_read_in_seconds(tmp_path):
    """``list.count`` for each of the ids alone would take some ten minutes."""
    cells = [new_cell("ring", 2, batch_size=64) for _ in range(MANY)]
    for number, cell in enumerate(cells):
        cell.id = f"ring-{number}"
    comparison = comparison_of(cells)
    path = tmp_path / "results.json"
    with within(60):
        write_comparison(path, comparison)
        path.write_bytes(encode(comparison))  # without spaces it is small enough to be read
        assert path.stat().st_size < MOST_BYTES
        assert read_comparison(path) == comparison


@pytest.mark.timeout(200)
def test_as_many_groups_as_runs_are_gathered_in_seconds(tmp_path):
    facts = [{"seed": number, "gpus": []} for number in range(MANY)]
    cell = new_cell("ring", 2, batch_size=64)
    repeat = Repeat(folder="runs", seed=0, status="failed", message="why", ranks=[])
    with within(60):
        cells, _ = gather(tmp_path, [CellRun(cell, repeat, own) for own in facts], facts)
    assert len({cell.id for cell in cells}) == MANY
    assert cells[-1].group == MANY - 1


def test_a_file_from_before_several_ranks_on_a_node_has_one_on_each(tmp_path):
    file = tmp_path / "results.json"
    write_comparison(file, comparison_of([new_cell("ring", 4, batch_size=8)]))
    entries = json.loads(file.read_text())
    assert entries["cells"][0].pop("ranks_per_node") == 1
    file.write_text(json.dumps(entries))
    [cell] = read_comparison(file).cells
    assert (cell.nodes, cell.ranks_per_node, cell.ranks) == (4, 1, 4)


def test_a_cell_has_a_row_for_each_rank_of_each_node(tmp_path):
    cell = new_cell("ring", 4, batch_size=8, rate="1gbit", ranks_per_node=2)
    assert (cell.id, cell.ranks) == ("ring-n4x2-1gbit", 8)
    cell.repeats = report_samples.cell("ring", 4).repeats  # of one rank on each node
    with pytest.raises(UserError, match="ring-n4x2-1gbit has 4 ranks, expected 8"):
        write_comparison(tmp_path / "results.json", comparison_of([cell]))
