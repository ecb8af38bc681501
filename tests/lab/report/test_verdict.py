"""The sentence and the numbers that a report opens with, on the page and in the terminal."""

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from lab.report.findings import findings
from lab.report.terminal import print_answer
from lab.report.verdict import verdict
from lab.report.view import blocks
from tests.helpers.report_samples import cell, on
from tests.helpers.report_samples import results as whole


def results(*cells, **more):
    more = {"cells": [cell("none", 1), *cells], "timelines": {}} | more
    return replace(whole(predict=False), **more)


def answer(*cells, **more):
    (block,) = blocks(results(*cells, **more))
    return verdict(block, findings(block))


def unchecked(*cells):
    """Return the cells as versions recorded them that did not look at gradients."""
    for run in (run for entry in cells for run in entry.repeats):
        run.claim = None
    return list(cells)


FAST = "On 4 nodes ddp is fastest: 0.284 s a step"

# 4 nodes: gather_scatter 0.494 s, ring 0.419 s, ddp 0.284 s, ddp_fp16 0.272 s, each ± 2 %
SENTENCES = [
    (
        on(4, "gather_scatter", "ring", "ddp"),
        f"{FAST}, 1.74 times as fast as gather_scatter; with all 3 exact strategies every "
        "rank got the mean gradient in the first step.",
    ),
    (  # the largest number of nodes answers
        on(2, "ring", "ddp") + on(4, "ring", "ddp"),
        f"{FAST}, 1.48 times as fast as ring; with ring and ddp every rank got the mean "
        "gradient in the first step.",
    ),
    (
        on(4, "gather_scatter", "ring", "ddp", "ddp_fp16"),
        "On 4 nodes ddp_fp16 (not exact) is fastest: 0.272 s a step, 1.82 times as fast as "
        "gather_scatter; of the exact strategies ddp is fastest: 0.284 s a step, 1.74 times as "
        "fast as gather_scatter; with all 3 exact strategies every rank got the mean "
        "gradient in the first step.",
    ),
    (
        on(2, "ring"),
        "On 2 nodes ring takes 0.559 s a step, 1.79 times as fast as one node; with ring every "
        "rank got the mean gradient in the first step.",
    ),
    (
        [cell("ring", 2, scale=3.0), cell("gather_scatter", 2, scale=4.0)],
        "On 2 nodes ring is fastest: 1.669 s a step, against 2.324 s of gather_scatter; one "
        "node alone is faster (1.000 s [0.980, 1.020]); with gather_scatter and ring "
        "every rank got the mean gradient in the first step.",
    ),
    (
        [],
        "On one rank a step takes 1.000 s [0.980, 1.020]; no strategy on several ranks has been "
        "measured.",
    ),
    (
        unchecked(*on(4, "ring", "ddp")),
        f"{FAST}, 1.48 times as fast as ring; whether every rank got the mean gradient was not "
        "checked (the runs are of an earlier version, which did not record it).",
    ),
]


@pytest.mark.parametrize(("cells", "sentence"), SENTENCES)
def test_the_answer_is_one_sentence(cells, sentence):
    found = answer(*cells)
    assert found.text == sentence
    assert not found.wrong


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (
            on(4, "gather_scatter", "ring", "ddp"),
            "Why: the messages of ring leave after backward (0.169 s of a step are exposed) and "
            "those of gather_scatter put 222 MB a step through rank 0's link (0.244 s of a step",
        ),
        (
            [cell("ddp", 2, scale=1.07), *on(2, "ring")],
            "The difference lies within the noise. The messages of ddp leave during",
        ),
        (on(2, "gather_scatter"), "The messages of gather_scatter leave after backward (0.084 s"),
        (on(4, "ring", oversubscribed=True, load=4), "the ranks share cores, so separate machines"),
        (
            on(4, "ring", load=1.6),
            "first step; the machine was busy (load 1.6 per core during ring on 4 nodes).",
        ),
        (on(4, "ring", load=1.4), "first step. The"),
    ],
)
def test_the_answer_says_why_and_whether_the_machine_was_quiet(cells, reason):
    found = answer(*cells)
    assert reason in f"{found.text} {found.why}"


def test_a_wrong_strategy_is_the_answer():
    ring = cell("ring", 2, scale=0.5, loss_shift=0.02)  # the shortest step
    found = answer(ring, *on(2, "tree", "ddp"))
    assert found.wrong
    assert found.text.startswith("On 2 nodes ring claims to be exact, but does not give every rank")
    assert "On 2 nodes ddp is fastest: 0.514 s a step" in found.text
    assert found.numbers[0][2] == "ddp on 2 nodes"
    two = answer(ring, *on(2, "tree", "ddp"), *on(4, "ddp"))
    assert two.wrong, "also where it has fewer nodes than the largest number"


def test_the_answer_has_units_and_says_on_what():
    found = answer(*on(4, "ring", "ddp", rate="1gbit"), emulated=True)
    assert found.text.startswith("On 4 emulated nodes at 1 Gbit/s ddp is fastest: 0.284 s a step")
    assert answer(*on(4, "ring", "ddp")).numbers == [
        ("shortest step", "0.284 s [0.278, 0.290]", "ddp on 4 nodes"),
        (
            "exposed communication",
            "0.034 s (12 %)",
            "mean over the ranks of ddp on 4 nodes",
        ),
        ("slowest over fastest", "1.48 times", "ring over ddp"),
    ]
    assert answer(*on(2, "ring")).numbers[2][:2] == ("speed-up", "1.79 times")
    assert [one[0] for one in answer().numbers] == ["shortest step"]
    pending = on(2, "ring", status="pending")
    assert answer(cells=pending) == ("Nothing has been measured yet.", (), False, "")


def shown(data, **terminal):
    file = io.StringIO()
    print_answer(Console(file=file, highlight=False, **terminal), data)
    return file.getvalue()


def test_a_terminal_shows_answer_table_and_four_findings():
    data = results(*on(4, "gather_scatter_flat", "halving_doubling", "ddp"))
    narrow = shown(data, force_terminal=True, color_system=None, width=80)
    table = [line for line in narrow.split("\n") if "[" in line and "On" not in line]
    assert len(table) >= 5
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in table)
    lines = shown(data).splitlines()
    assert lines[1].startswith(FAST)
    assert sum(line.startswith("- ") for line in lines) == 4
    words = {line.split()[0]: " ".join(line.split()) for line in lines[2:] if line.strip()}
    assert words["strategy"] == "strategy nodes [95 %] comm., s up exact"
    assert words["none"] == "none 1 1.000 [0.980, 1.020] – 1.00 –"
    assert words["ddp"] == "ddp 4 0.284 [0.278, 0.290] 0.034 (12 %) 3.52 yes"


def test_what_is_wrong_is_red_and_comes_first():
    cells = on(2, "ring", "overlapped", loss_shift=0.02) + on(2, "tree", "ddp")
    text = shown(results(*cells), force_terminal=True, width=200)
    [first, second] = [line for line in text.splitlines() if "claims to be exact, but" in line]
    assert first.startswith("\x1b[1;31mOn 2 nodes ")
    assert second.startswith("\x1b[1;31mWRONG: On 2 nodes ")
    assert text.count("\x1b[1;31myes: WRONG") == 2
    assert "\x1b" not in shown(results(*cells)), "plain without a terminal"
