"""The largest ``results.json`` that may be: nothing compares each cell with all others."""

import time
from contextlib import contextmanager

import pytest

from common.utils.typed_json import MOST_BYTES, encode
from lab.comparison.cell import CellRun, gather, new_cell
from lab.comparison.record import Comparison, Repeat, read_comparison, write_comparison

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
