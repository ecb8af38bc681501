"""The page opens with the answer, marks what is wrong and best, and draws only what differs."""

import re

import pytest
from msgspec.structs import replace

from lab.plot_style import NothingToShowError, plt
from lab.report import html, tables
from lab.report.drawings import figures
from lab.report.drawings.curves import draw_iterations, draw_loss, draw_ranks
from lab.report.findings import findings
from lab.report.losses import loss_table
from lab.report.view import blocks
from tests.helpers.report_samples import BYTES, cell, on, results, set_times


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def page(data):
    """Return the page of ``data`` without figures, with normal spaces."""
    text = html.render(data, [(block, []) for block in blocks(data)], [])
    return re.sub(r"\s+", " ", text.replace("\u00a0", " "))


def group(*cells, **settings):
    (found,) = blocks(compared(*cells, settings=settings))
    return found


def compared(*cells, **more):
    """Return a comparison of these cells and one node's."""
    return replace(results(predict=False), cells=[cell("none", 1), *cells], **more)


def best(block, name):
    return [line.row.sync for line in tables.lines(block) if name in line.best]


def positions(text, *marks):
    """Return where each mark stands first within the page's main part."""
    main = text[text.index("<main>") :]
    return [main.index(mark) for mark in marks]


def test_the_answer_comes_first_and_limits_are_folded():
    data = results(("gather_scatter", "ddp"), (1, 4))
    set_times(data.cells[1], 0.6, 0.1, 1.1)
    text = page(data)
    places = positions(text, 'class="verdict"', 'class="cards"', 'id="findings"')
    assert places == sorted(places)
    cautions = [finding for finding in findings(blocks(data)[0]) if finding.caution]
    folded = re.search(r'<details class="limits" id="limits">(.*?)</ul> </details>', text)
    assert f"<summary>Limits ({len(cautions) + len(data.warnings)})</summary>" in folded[1]
    assert all(warning in folded[1] for warning in data.warnings)
    assert cautions
    assert "✗" not in text


def test_the_page_says_which_ranks_shared_a_node_once_for_each_layout():
    data = results(("ring", "ddp"), (1, 4))
    assert "shared a node" not in page(data), "each had one of its own"
    for run in (run for entry in data.cells for run in entry.repeats):
        for rank in run.ranks:
            rank.host, rank.node = "box", rank.rank // 2
    text = page(data)
    assert text.count("ranks 0-1 on node 0 (box); ranks 2-3 on node 1 (box)") == 1
    assert "1 node" not in text


def test_what_is_wrong_stands_in_red_before_everything():
    data = results(("ring", "ddp"), (1, 2), predict=False)
    data.cells[1] = cell("ring", 2, loss_shift=0.1)
    wrong = "ring claims to be exact, but"
    places = positions(page(data), '<div class="note bad">', "✗", wrong, 'class="cards"')
    assert places == sorted(places)
    # with several groups, before all of them, and with the group's name
    data.cells += [cell("none", 1, group=1), cell("ring", 2, group=1)]
    data.warnings = ["Cores are shared."]
    data.differences = ["seed: 1 in A, 2 in B"]
    text = page(data)
    marks = ("✗", f">group 0</a>: On 2 nodes {wrong}", "cannot be compared", "Warnings (")
    assert positions(text, *marks) == sorted(positions(text, *marks))
    assert text.index('href="#warnings"') < text.index("<main>")


def test_a_wrong_strategy_is_marked_in_tables_and_figures():
    cells = [*on(2, "tree"), *on(2, "ring", loss_shift=0.2), *on(2, "ddp")]
    found = group(*cells)
    text = page(compared(*cells))
    rows = re.findall(r'<tr class="([^"]*)"><th scope="row">(\w+)</th>.*?</tr>', text)
    assert {name for status, name in rows if "wrong" in status} == {"ring"}
    assert text.count("yes: WRONG") == 1
    assert tables.markdown([found]).count("| ring | 2 | yes: WRONG |") == 1
    times = figures.draw_step_time(found, narrow=False).axes[0]
    labels = [label.get_text() for label in times.get_yticklabels()]
    assert labels == ["none (1 node)", "tree", "✗ ring", "ddp"]
    assert [note.get_text() for note in times.texts][1:] == ["0.569 s", "0.559 s", "0.514 s"]
    legend = draw_loss(found, narrow=False).legends[0]
    lines = [text.get_text() for text in legend.get_texts()]
    assert lines[-2:] == ["the 2 other strategies that claim to be exact", "✗ ring"]


def test_the_prediction_and_its_calibration():
    data = results(("ring",), (1, 2))
    data.prediction.calibration |= {
        "compute": "profile of a CPU, 2026-11-22T23:14:50",
        "least time of an all_reduce": {"4 nodes, 1gbit": "7.9 ms", "2 nodes": "3 ms"},
    }
    repeats = [repeat for entry in data.cells for repeat in entry.repeats]
    assert "When the first run started was not recorded." in page(data)
    for second, repeat in enumerate(reversed(repeats), start=3):
        repeat.started = f"2026-11-21T15:00:{second:02}"
    text = page(data)
    for part in (
        "<dt>shortest all-reduce</dt> <dd>4 nodes, 1gbit 7.9 ms; 2 nodes 3 ms</dd>",
        "a CPU, 2026-11-22 23:14:50",
        "predicted at 2026-11-21 14:59:58",
        "The first run started at 2026-11-21 15:00:03.",
        *("120 µs", "1.11 GB/s"),  # alpha 1.2e-4 s, beta 9e-10 s a byte
    ):
        assert part in text
    repeats[2].started = "2026-11-21T14:00:03"
    assert "<strong>before the prediction</strong>" in page(data)


def test_the_method_counts_steps_as_they_were():
    data = results(("ring",), (1, 2))
    for warmup, steps, words in (
        (5, 30, "The first 5 steps are a warm-up and not measured; then 30 steps are"),
        (1, 1, "The first 1 step is a warm-up and not measured; then 1 step is"),
        (None, None, "The warm-up steps are not measured. A rank's number"),
    ):
        data.settings |= {"warmup": warmup, "steps": steps}
        assert words in page(data)


def test_the_best_value_of_each_number_of_nodes_is_marked():
    unfinished = [*on(2, "ddp", status="failed"), *on(8, "ring", status="pending")]
    block = group(*on(4, "gather_scatter", "ddp"), *on(2, "ring"), *unfinished)
    assert best(block, "step_seconds") == best(block, "speedup_ratio") == ["ddp"]
    assert best(block, "nodes") == []
    # 36.92 MB each on 2 nodes: none is best
    assert best(group(*on(2, "ring", "ddp", "gather_scatter")), "root_sent_bytes") == []
    unequal = group(*on(4, "ring", "ddp", "gather_scatter"))
    assert best(unequal, "root_sent_bytes") == ["ring", "ddp"]
    wrong = group(*on(4, "ring", "all_reduce"), *on(4, "ddp", loss_shift=0.3))
    assert best(wrong, "step_seconds") == ["all_reduce"]  # ddp is fast and wrong
    text = page(results(("gather_scatter", "ddp"), (1, 4)))
    assert '<strong>0.284 [0.278, 0.290]</strong><span class="unseen"> (best)</span>' in text


def test_tensors_are_those_of_the_rank_that_holds_most():
    kinds = ["36.92", "36.92", "73.85"]
    for change, texts in (
        # rank 1 has 8 MB more in buckets than was predicted
        ({}, [*kinds, "8.00", "0.03", "155.73", "147.73"]),
        # emulated compute has no measured tensors: the kinds are the predicted ones
        ({"memory": None}, [*kinds, "0.00", "0.03", "–", "147.73"]),
        ({"memory": None, "predicted_memory": None}, ["–"] * 7),
    ):
        data = results(("all_reduce",), (1, 2))
        repeats = [repeat for entry in data.cells for repeat in entry.repeats]
        for rank in (rank for repeat in repeats for rank in repeat.ranks):
            rank.memory["buckets"] += 8_000_000 * rank.rank
            for name, value in change.items():
                setattr(rank, name, value)
        line = tables.lines(*blocks(data))[1]
        assert [line.texts[name] for name in tables.MEMORY[2:]] == texts
        assert line.values["optimizer_state_bytes"] == (None if change else 2 * BYTES)
        assert ("Tensors of the rank that holds most" in page(data)) == (texts[0] != "–")


def test_a_bar_adds_up_to_its_own_median():
    entry = cell("ring", 2)

    def spans(step):
        set_times(entry, step)
        return figures.section_spans(group(entry).rows[1])

    names = ["data", "forward", "backward", "wait", "wire", "update"]
    assert [name for name, _, _ in spans(0.7)] == [*names, "rest"]
    assert spans(0.7)[-1] == ("rest", pytest.approx(0.559), 0.7)
    # sections of 0.559 s in a step of 0.5 s: no rest; what exceeds the median is pale
    assert [name for name, _, _ in spans(0.5)] == [*names[:4], "wire", "wire", "update"]
    bars = figures.draw_step_time(group(entry), narrow=False).axes[0].patches
    pale = [bar for bar in bars if bar.get_alpha()]
    assert min(bar.get_x() for bar in pale) == pytest.approx(0.5)
    assert sum(bar.get_width() for bar in pale) == pytest.approx(0.059)


def test_equal_values_become_a_sentence():
    equal = group(*on(2, "ring", "ddp"))
    with pytest.raises(NothingToShowError, match=r"sends the same: 36\.9 MB a step on 2 nodes"):
        figures.draw_bytes(equal, narrow=False)
    [one_node, exact] = draw_loss(equal, narrow=False).axes[0].lines
    assert list(zip(*exact.get_data(), strict=True)) == equal.rows[1].runs[0].losses
    assert exact.get_label() == "the 2 strategies that claim to be exact"
    assert one_node.get_label() == "none (1 node)"
    # one number of nodes on which they differ is enough for a figure
    both = group(*on(2, "ring", "ddp"), *on(4, "ring", "gather_scatter"))
    assert len(figures.draw_bytes(both, narrow=False).axes) == 2
    wrong = group(*on(2, "ring"), *on(2, "ddp", loss_shift=0.3))
    assert len(draw_loss(wrong, narrow=False).axes[0].lines) == 3  # with one node's


@pytest.mark.parametrize("narrow", [False, True])
def test_numbers_stand_beside_the_panels_not_on_lines(narrow):
    block = group(*on(2, "ring", "ddp"), *on(4, "ring", "ddp"))
    for draw, first in (
        (figures.draw_step_time, ["1.000 s", "0.559 s", "0.514 s"]),
        (figures.draw_scaling, ["1.79 times", "1.95 times"]),
    ):
        axes = draw(block, narrow=narrow).axes
        assert [text.get_text() for text in axes[0].texts] == first
        assert all(text.xy[0] > 1 for axis in axes for text in axis.texts)


def test_iterations_are_drawn_without_the_first():
    block = group(*on(2, "ring"), *on(4, "ring"))
    figure = draw_iterations(block, narrow=False)
    assert len(figure.axes) == 2
    for axis, rows in zip(figure.axes, (block.at(2), block.at(4)), strict=True):
        for line, row in zip(axis.lines, [block.baseline, *rows], strict=True):
            assert list(zip(*line.get_data(), strict=True)) == row.runs[0].step_seconds[1:]


def test_a_curve_over_several_numbers_of_ranks():
    block = group(*on(2, "ring", "ddp"), *on(4, "ring", "ddp"))
    times, speedups = draw_ranks(block, narrow=False).axes
    ring = [block.baseline, block.find("ring", 2), block.find("ring", 4)]
    assert list(times.lines[0].get_xdata()) == [1, 2, 4]
    assert list(times.lines[0].get_ydata()) == [row.step for row in ring]
    assert list(speedups.lines[0].get_ydata()) == [row.speedup for row in ring]
    assert list(speedups.lines[-1].get_ydata()) == [1, 2, 4]
    alone = replace(compared(), cells=on(2, "ring", "ddp"))
    with pytest.raises(NothingToShowError, match="2 nodes"):
        draw_ranks(blocks(alone)[0], narrow=False)


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (41, [20, 40, 41]),
        (40, [20, 40]),
        (8, [1, 8]),
        (1000, list(range(100, 1001, 100))),
    ],
)
def test_losses_stand_at_every_twentieth_step(steps, shown):
    losses = [2 + 1 / step for step in range(1, steps + 1)]
    cells = [*on(2, "ring", losses=losses), *on(2, "ddp", losses=losses[:-1])]
    (block,) = blocks(replace(compared(), cells=cells))
    table = loss_table(block)
    assert [int(row[0]) for row in table.rows] == shown
    ring = table.headings.index("ring on 2 nodes")
    assert [row[ring] for row in table.rows] == [f"{2 + 1 / step:.4f}" for step in shown]
    assert table.rows[-1][table.headings.index("ddp on 2 nodes")] == "–"
    assert f"| {shown[-1]} |" in tables.markdown([block])


def test_results_have_the_accuracy_and_no_empty_column():
    def names(block):
        return tables.with_values(tables.RESULTS, tables.lines(block))

    block = group(*on(2, "ring", accuracy=0.43))
    line = tables.lines(block)[1]
    assert line.texts["test_accuracy_ratio"] == "43.00 %"
    assert line.values["test_loss"] == 1.5
    assert "test_accuracy_ratio" in names(block)
    assert "test_accuracy_ratio" not in names(group(*on(2, "ring")))
