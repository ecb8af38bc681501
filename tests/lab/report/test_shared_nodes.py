"""The report of a comparison in which several ranks share the link of their node."""

import csv
import io

import pytest
from msgspec.structs import replace

from lab.comparison.record import PredictedCell, Prediction
from lab.report.causes import messages
from lab.report.drawings.figures import draw_bytes, draw_scaling
from lab.report.findings import links_as_planned
from lab.report.tables import csv_text, heading, lines, markdown
from lab.report.verdict import verdict
from lab.report.view import blocks
from tests.helpers.report_samples import cell, results

MB = 1e6
FLAT, GROUPED = 64.0 * MB, 55.0 * MB
HEADERS = 1.003


def shared(sync, planned, *, counted=HEADERS, root=1.0):
    """Return a cell of 4 nodes with 2 ranks each; node 0's link carries ``root`` times as much."""
    found = cell("ring", 8, rate="200mbit", scale=planned / FLAT)
    for run in found.repeats:
        for row in run.ranks:
            row.host = "machine"
            row.node = row.rank // 2
            share = root if row.node == 0 else 1.0
            row.link_sent_bytes = planned * counted * share
            row.link_received_bytes = planned * counted * share
    name = f"{sync}-n4x2-200mbit"
    return replace(found, id=name, sync=sync, nodes=4, ranks_per_node=2)


def block_of(*cells, planned):
    predicted = {
        entry.id: PredictedCell(step_seconds=entry.medians.step, link_bytes=[(nbytes, nbytes)] * 4)
        for entry, nbytes in zip(cells, planned, strict=True)
    }
    prediction = Prediction(made="2026-01-01T00:00:00", cells=predicted)
    whole = results(predict=False, emulated=True)
    settings = whole.settings | {"rates": ["200mbit"], "ranks_per_node": 2}
    (block,) = blocks(
        replace(
            whole,
            cells=[cell("none", 1), *cells],
            timelines={},
            prediction=prediction,
            settings=settings,
        )
    )
    return block


@pytest.fixture
def block():
    return block_of(shared("ring", FLAT), shared("hierarchical", GROUPED), planned=[FLAT, GROUPED])


def test_ranks_and_nodes_are_counted_apart(block):
    alone, ring, _ = sorted(block.rows, key=lambda row: (row.nodes, row.sync != "ring"))
    assert (ring.nodes, ring.ranks, alone.ranks) == (4, 8, 1)
    assert ring.efficiency == pytest.approx(ring.speedup / 8)
    assert (block.size_text(4), block.size_text(1)) == ("4 nodes with 2 ranks each", "1 rank")
    text = verdict(block, []).text
    assert text.startswith("On 4 emulated nodes with 2 ranks each at 200 Mbit/s ")
    assert "rank 0" not in text


def test_tables_have_the_ranks_and_what_the_busiest_link_carried(block):
    rows = {row["strategy"]: row for row in csv.DictReader(io.StringIO(csv_text([block])))}
    assert (rows["ring"]["nodes"], rows["ring"]["ranks"]) == ("4", "8")
    assert float(rows["ring"]["busiest_link_bytes"]) == pytest.approx(FLAT * HEADERS)
    assert float(rows["hierarchical"]["planned_busiest_link_bytes"]) == GROUPED
    assert rows["none"]["busiest_link_bytes"] == ""
    headings, *_ = (line for line in markdown([block]).splitlines() if line.startswith("|"))
    assert {" ranks ", " busiest link, MB ", " by the plan, MB "} <= set(headings.split("|"))
    assert heading("nodes", block.place) == "nodes"
    best = [line.row.sync for line in lines(block) if "busiest_link_bytes" in line.best]
    assert best == ["hierarchical"]


def test_without_shared_nodes_tables_and_their_headings_stay():
    (plain,) = blocks(results(("ring",), (1, 2), predict=False))
    table = markdown([plain])
    assert " ranks |" not in table.splitlines()[0].replace("| nodes |", "")
    assert "link" not in table
    assert plain.size_text(2) == "2 nodes"


def test_the_finding_compares_links_with_plans():
    """3 per thousand are headers; 20 % more, or 5 % less, are something else."""
    for counted, doubtful in ((HEADERS, False), (1.2, True), (0.95, True)):
        block = block_of(
            shared("ring", FLAT),
            shared("hierarchical", GROUPED, counted=counted),
            planned=[FLAT, GROUPED],
        )
        [found] = links_as_planned(block, block.measured)
        assert found.caution == doubtful, counted
        assert ("hierarchical on 4 nodes" in found.text) == doubtful
        assert "ring on 4 nodes +0.30 %" in found.evidence


def test_a_reason_names_the_link_that_is_busy():
    block = block_of(
        shared("gather_scatter_flat", FLAT, root=3.0), shared("ring", FLAT), planned=[FLAT, FLAT]
    )
    rows = {row.sync: messages(row) for row in block.rows if row.nodes > 1}
    assert "put 193 MB a step through node 0's link each way" in rows["gather_scatter_flat"]
    assert "put 64 MB a step through each node's link each way" in rows["ring"]


def test_figures_show_links_and_the_ideal_of_ranks(block):
    [axis] = draw_bytes(block, narrow=False).axes
    assert axis.get_title() == "4 nodes with 2 ranks each"
    drawn = sorted(line.get_xdata()[0] for line in axis.lines if line.get_marker() in ("s", "o"))
    expected = sorted(value / MB for value in (FLAT * HEADERS, FLAT, GROUPED * HEADERS, GROUPED))
    assert drawn == pytest.approx(expected)
    [axis] = draw_scaling(block, narrow=False).axes
    verticals = {line.get_xdata()[0] for line in axis.lines if line.get_ydata()[0] == 0}
    assert {1, 1 / 8} <= verticals
