"""The report's table and figure of a rank's tensors."""

import csv

import pytest

from common.profiling.records import KINDS
from lab.plot_style import NothingToShowError
from lab.report import tables
from lab.report.drawings.cost_figures import draw_tensors
from lab.report.view import blocks
from tests.helpers.report_samples import BYTES, results


def block_of(change=None):
    """Return a block whose rank 1 holds 8 MB of other buckets more; ``change`` is for all ranks."""
    data = results(("all_reduce", "topk"), nodes=(1, 2))
    for cell in data["cells"]:
        for repeat in cell["repeats"]:
            for row in repeat["ranks"]:
                row["memory"]["buckets"] += 8_000_000 * row["rank"]
                row |= change or {}
    [block] = blocks(data)
    return block


def shown(block, sync):
    row = block.find(sync, 2)
    by_key = {column.key: column for column in tables.COLUMNS}
    assert row is not None
    return [by_key[key].text(row) for key in tables.MEMORY[2:]]


def test_table_has_the_rank_that_holds_most_and_the_prediction():
    block = block_of()
    kinds = ["36.92", "36.92", "73.85", "8.00", "0.03"]
    assert shown(block, "all_reduce") == [*kinds, "155.73", "147.73"]
    rows = list(csv.DictReader(tables.csv_text([block]).splitlines()))
    assert [row["optimizer_state_bytes"] for row in rows] == [str(2 * BYTES)] * 3
    assert rows[2]["predicted_tensor_bytes"] == str(5 * BYTES + 30_000)
    assert "| optimiser state, MB | all tensors, MB |" in tables.markdown([block])


def test_kinds_are_predicted_where_compute_was_emulated():
    kinds = ["36.92", "36.92", "73.85", "36.92", "0.03"]
    assert shown(block_of({"memory": None}), "topk") == [*kinds, "–", "184.65"]


def test_results_of_earlier_versions_have_no_tensors():
    block = block_of({"memory": None, "predicted_memory": None})
    assert shown(block, "topk") == ["–"] * (len(KINDS) + 2)
    with pytest.raises(NothingToShowError, match="No cell has recorded its tensors yet"):
        draw_tensors(block, narrow=False)


def test_bars_end_at_the_sum_and_diamonds_at_the_prediction():
    block = block_of()
    [axis] = draw_tensors(block, narrow=False).axes
    ends: dict[float, float] = {}
    for bar in axis.patches:
        ends[round(bar.get_y(), 1)] = bar.get_x() + bar.get_width()
    assert list(ends.values()) == pytest.approx([147.73, 155.73, 192.65], abs=0.01)
    diamonds = [line.get_xdata()[0] for line in axis.lines if line.get_marker() == "D"]
    assert diamonds == pytest.approx([147.73, 147.73, 184.65], abs=0.01)


def test_no_figure_where_all_strategies_hold_the_same():
    data = results(("all_reduce", "ddp"), nodes=(1, 2))
    [block] = blocks(data)
    with pytest.raises(NothingToShowError, match=r"147\.7 MB on 1 node; 147\.7 MB on 2 nodes"):
        draw_tensors(block, narrow=False)
