"""The sentence and the numbers that a report opens with, on the page and in the terminal."""

import io

import pytest
from rich.console import Console

from lab.report.findings import findings
from lab.report.terminal import print_answer
from lab.report.verdict import verdict
from lab.report.view import blocks
from tests.helpers.report_samples import cell
from tests.helpers.report_samples import results as whole


def results(*cells, **more):
    return whole(predict=False) | {"cells": list(cells), "timelines": {}} | more


def answer(*cells, **more):
    (block,) = blocks(results(*cells, **more))
    return verdict(block, findings(block))


def without_losses(entry):
    for repeat in entry["repeats"]:
        repeat["losses"] = []
    return entry


def wrong(sync, nodes):
    return cell(sync, nodes, loss_shift=0.02)


ONE = cell("none", 1)

# 4 nodes: gather_scatter 0.494 s, ring 0.419 s, overlapped 0.314 s, ddp 0.284 s, ddp_fp16 0.272 s,
# each ± 2 %; 2 nodes: all_reduce 0.554 s, overlapped 0.524 s, ddp 0.514 s
SENTENCES = {
    "fastest": (
        (ONE, cell("gather_scatter", 4), cell("ring", 4), cell("ddp", 4)),
        "On 4 nodes ddp is fastest: 0.284 s a step, 1.74 times as fast as gather_scatter; all 3 "
        "strategies compute the same.",
    ),
    "the largest number of nodes answers": (
        (ONE, cell("ring", 2), cell("ddp", 2), cell("ring", 4), cell("ddp", 4)),
        "On 4 nodes ddp is fastest: 0.284 s a step, 1.48 times as fast as ring; ring and ddp "
        "compute the same.",
    ),
    "a tie": (
        (ONE, cell("all_reduce", 2), cell("overlapped", 2), cell("ddp", 2)),
        "On 2 nodes ddp and overlapped are fastest, and cannot be told apart (0.514 to 0.524 s; "
        "their 95 % intervals overlap), 1.08 times as fast as all_reduce; all 3 strategies compute "
        "the same.",
    ),
    "all are tied": (
        (ONE, cell("overlapped", 2), cell("ddp", 2)),
        "On 2 nodes ddp and overlapped cannot be told apart (0.514 to 0.524 s; their 95 % "
        "intervals overlap); overlapped and ddp compute the same.",
    ),
    "not exact": (
        (ONE, cell("gather_scatter", 4), cell("ring", 4), cell("ddp", 4), cell("ddp_fp16", 4)),
        "On 4 nodes ddp_fp16 (not exact) is fastest: 0.272 s a step, 1.82 times as fast as "
        "gather_scatter; of the exact strategies ddp is fastest: 0.284 s a step, 1.74 times as "
        "fast as gather_scatter; the 3 exact strategies compute the same.",
    ),
    "one repeat": (
        (ONE, cell("ring", 4, repeats=1), cell("ddp", 4, repeats=1)),
        "On 4 nodes ddp has the shortest step, 0.284 s, 1.48 times as fast as ring; each strategy "
        "ran once, so the order is not certain; ring and ddp compute the same.",
    ),
    "alone": (
        (ONE, cell("ring", 2)),
        "On 2 nodes ring takes 0.559 s a step, 1.79 times as fast as one node.",
    ),
    "slower than one node": (
        (ONE, cell("ring", 2, scale=3.0), cell("gather_scatter", 2, scale=4.0)),
        "On 2 nodes ring is fastest: 1.669 s a step, 1.39 times as fast as gather_scatter; one "
        "node alone is faster (1.000 s [0.980, 1.020]); gather_scatter and ring compute the same.",
    ),
    "one node": (
        (ONE,),
        "On one node a step takes 1.000 s [0.980, 1.020]; no strategy on several nodes has been "
        "measured.",
    ),
    "nothing": ((cell("ring", 2, status="pending"),), "Nothing has been measured yet."),
    "untested": (
        (ONE, without_losses(cell("ring", 4)), without_losses(cell("ddp", 4))),
        "On 4 nodes ddp is fastest: 0.284 s a step, 1.48 times as fast as ring; whether they "
        "compute the same was not tested (the losses of the first steps were not recorded).",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_answer_is_one_sentence(name):
    cells, sentence = SENTENCES[name]
    found = answer(*cells)
    assert found.text == sentence
    assert not found.wrong


def test_intervals_that_are_too_wide_make_no_tie():
    noisy = cell("overlapped", 2)
    noisy["interval"]["step"] = [0.0, 1.0]
    assert answer(ONE, noisy, cell("ddp", 2)).text == (
        "On 2 nodes ddp and overlapped cannot be told apart (0.514 to 0.524 s): their repeats "
        "differ too much; overlapped and ddp compute the same."
    )


def test_a_wrong_strategy_is_the_answer():
    ring = wrong("ring", 2) | {"median": cell("ddp", 2, scale=0.5)["median"]}  # the shortest step
    found = answer(ONE, ring, cell("tree", 2), cell("ddp", 2))
    assert found.wrong
    assert found.text.startswith("On 2 nodes ring is not equal to the others from step 2 on: ")
    assert "On 2 nodes ddp is fastest: 0.514 s a step" in found.text
    assert found.numbers[0][2] == "ddp on 2 nodes"
    two = answer(ONE, wrong("ring", 2), wrong("overlapped", 2), *(cell("ddp", 4), cell("ddp", 2)))
    assert two.wrong, "also where it has fewer nodes than the largest number"


def test_links_and_emulation_are_part_of_the_answer():
    entries = [cell("ring", 4, rate="1gbit"), cell("ddp", 4, rate="1gbit")]
    found = answer(ONE, *entries, emulated=True)
    assert found.text.startswith("On 4 emulated nodes at 1 Gbit/s ddp is fastest: 0.284 s a step")


def test_the_numbers_have_units():
    numbers = answer(ONE, cell("ring", 4), cell("ddp", 4)).numbers
    assert numbers == [
        ("shortest step", "0.284 s [0.278, 0.290]", "ddp on 4 nodes"),
        ("exposed communication", "0.034 s (12 %)", "in a step of ddp on 4 nodes"),
        ("slowest over fastest", "1.48 times", "ring over ddp"),
    ]
    alone = answer(ONE, cell("ring", 2)).numbers
    assert alone[2][:2] == ("speed-up", "1.79 times")
    assert [one[0] for one in answer(ONE).numbers] == ["shortest step"]


def shown(data, **terminal):
    console = Console(file=io.StringIO(), highlight=False, **terminal)
    print_answer(console, data)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_terminal_shows_answer_table_and_three_findings():
    cells = [ONE, *(cell(sync, 4) for sync in ("gather_scatter_flat", "halving_doubling", "ddp"))]
    narrow = shown(results(*cells), force_terminal=True, color_system=None, width=80)
    table = [line for line in narrow.split("\n") if "[" in line and "On" not in line]
    assert len(table) >= 5
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in table)
    lines = shown(results(*cells)).splitlines()
    assert lines[1].startswith("On 4 nodes ddp is fastest: 0.284 s a step")
    assert sum(line.startswith("- ") for line in lines) == 3
    [row] = [line.split() for line in lines if line.startswith(" ddp")]
    assert row == ["ddp", "4", "0.284", "[0.278,", "0.290]", "0.034", "(12", "%)", "3.52", "yes"]
    heading = next(line for line in lines if "strategy" in line)
    assert heading.split() == ["strategy", "nodes", "[95", "%]", "comm.,", "s", "up", "exact"]


def test_what_is_wrong_is_red_and_comes_first():
    cells = [ONE, wrong("ring", 2), wrong("overlapped", 2), cell("tree", 2), cell("ddp", 2)]
    cells[2]["repeats"][0]["losses"][1][1] = 9.0
    text = shown(results(*cells), force_terminal=True, width=200)
    [first, second] = [line for line in text.splitlines() if "is not equal to the others" in line]
    assert first.startswith("\x1b[1;31mOn 2 nodes ")
    assert second.startswith("\x1b[1;31mWRONG: On 2 nodes ")
    assert text.count("yes: WRONG") == 2
    assert "\x1b" not in shown(results(*cells)), "plain without a terminal"
