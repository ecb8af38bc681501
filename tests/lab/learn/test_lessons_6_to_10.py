"""Lessons 6 to 10 and the gallery: right solutions, wrong ones, the numbers on the pages."""

import re
from pkgutil import resolve_name

import gallery
import numpy as np
import pytest

from common.errors import UserError
from lab.audit.cases import read_scripts
from lab.learn import script_runs
from lab.learn.course import LESSONS
from lab.learn.lessons import break_it, nodes
from lab.learn.lessons.find_the_bug import BLIND, write_scripts
from lab.learn.student_file import Mistake, StudentFile
from tests.helpers import ROOT
from tests.helpers.audited import read_cases
from tests.helpers.cluster import needs_namespaces
from tests.lab.learn.solutions import solve

LESSON = {lesson.number: lesson for lesson in LESSONS}
RIGHTS = {right for _, right, _ in gallery.WAYS.values()}


def check(number, folder, changes=()):
    """Check a solution; return what the lesson measured, and what was said to be right."""
    said = []
    student = StudentFile(solve(number, folder, changes))
    return resolve_name(LESSON[number].check)(student, said.append), "\n".join(said)


def numbers_of_page(wrong):
    """Return the numbers of a way's two scripts, as the page shows them, without those in words."""
    text = "".join(page.read_text() for page in (ROOT / "docs/learn").glob("gallery*.md"))
    [row] = re.findall(rf"\| wrong: `{wrong}` \|\n.*\n.*\n\| (.*) \|\n", text)
    return [list(map(float, re.findall(r"\d+(?:\.\d+)?", cell)))[-3:] for cell in row.split(" | ")]


# --- the gallery ---


@pytest.mark.slow
def test_the_gallery_shows_what_each_wrong_script_computes():
    traces = script_runs.train([*sorted(RIGHTS), *gallery.WAYS], steps=2)
    for wrong, (_, right, name) in gallery.WAYS.items():
        shown = numbers_of_page(wrong)
        for script, (number, _, _) in zip((right, wrong), shown, strict=True):
            if name != "order":  # of two epochs
                found = 100 * gallery.measure(name, traces[script], traces[right])
                assert found == pytest.approx(number, rel=0.02, abs=0.05), script
        assert shown[0][0] != shown[1][0]


@pytest.mark.slow
def test_the_gallery_shows_what_becomes_of_loss_and_accuracy():
    pairs = ("literal_4", "samples_no_sampler", "samples_order_without_set_epoch")
    traces = script_runs.train([gallery.RIGHT, *pairs], steps=gallery.STEPS)
    for wrong in pairs:
        shown = numbers_of_page(wrong)
        for script, (_, loss, accuracy) in zip((gallery.RIGHT, wrong), shown, strict=True):
            end = traces[script][0].tests[-1]
            assert end.loss == pytest.approx(loss, rel=0.1, abs=0.006), script
            assert 100 * end.accuracy == pytest.approx(accuracy, abs=1.0), script
    repeated = [gallery.measure("order", traces[script], []) for script in (gallery.RIGHT, wrong)]
    assert repeated[0] < 0.02
    assert repeated[1] == 1


def test_a_difference_within_that_of_the_seeds_is_not_seen_in_the_loss():
    def trace(loss, accuracy, gradient):
        return script_runs.Trace(
            drawn=list(range(1440)),
            until=[8],
            gradients=[gradient],
            weights=[gradient],
            tests=[script_runs.TestResult(120, loss, accuracy)],
        )

    own = np.ones(4)
    right = [trace(0.10, 0.97, own)] * 3
    traces = dict.fromkeys([*RIGHTS, *gallery.WAYS], right)
    traces |= {"literal_4": [trace(0.11, 0.90, 0.75 * own)] * 3}
    told = gallery.describe(traces, [right[0], trace(0.13, 0.95, own)])
    assert told["literal_4"] == [
        "gradient off by 0.0 %; test loss 0.10, accuracy 97 %",
        "gradient off by 25.0 %; test loss 0.11, accuracy 90 %. Seen in: **accuracy**",
    ]
    assert told["sum_all_reduce"][1].endswith("Seen in: **only the first number**")


# --- lesson 9 ---


def test_the_blind_scripts_are_the_audits_and_do_not_tell(tmp_path):
    write_scripts(tmp_path / "blind")
    found = {case.name: case.finds for case in read_cases() if case.name in BLIND}
    assert found == {name: {finding} for name, finding in BLIND.items()}
    for number, (name, finding) in enumerate(BLIND.items(), 1):
        text = (tmp_path / f"blind/{number:02}.py").read_text()
        assert read_scripts()[name].what not in text
        assert LESSON[9].exercises[f"{number:02}"].accepts(finding)
    assert "def read_flags" in (tmp_path / "blind/student.py").read_text()


def test_the_package_holds_the_scripts_that_lesson_9_trains_with_alone():
    scripts = read_scripts()
    wanted = {*BLIND, *gallery.WAYS, *RIGHTS}
    bases = {script.base for script in scripts.values()} - {""}
    assert wanted <= scripts.keys()
    assert scripts.keys() == wanted | bases


@pytest.mark.slow
def test_all_blind_scripts_learn(tmp_path):
    assert check(9, tmp_path) == (12, "")


# --- lessons 6, 7, 8 and 10 ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait",
    ["work.get_future().wait()", "[time.sleep(0.001) for _ in iter(work.is_completed, True)]"],
)
def test_other_ways_to_wait_for_a_bucket_are_right(wait, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "run_on_nodes", lambda *_, **__: ["100 MB: 0.500 s exposed"])
    assert check(6, tmp_path, {2: wait})[0] == 0.5


@pytest.mark.slow
@pytest.mark.alone
@needs_namespaces
def test_buckets_hide_a_part_of_the_messages(tmp_path):
    measured, said = check(6, tmp_path)
    assert measured >= LESSON[6].question.answer
    seconds = [float(one) for one in re.findall(r"(\S+) s exposed", said)]
    assert len(seconds) == 4
    assert seconds[3] == measured


@pytest.mark.slow
def test_four_ranks_equal_four_shards(tmp_path, monkeypatch):
    """And VGG-11 with the student's sums equals one process."""
    monkeypatch.chdir(tmp_path)  # without CIFAR-10
    measured, said = check(7, tmp_path)
    assert measured == pytest.approx(1, abs=1e-4)
    assert "1 message in forward and 1 message in backward" in said
    without, with_norm = (float(one) for one in re.findall(r"batch by (\S+)", said))
    assert without < 1e-12
    assert with_norm > 0.1
    in_vgg11 = re.findall(r"VGG-11 on .* by (\d\S*\d), with BatchNorm by (\d\S*\d)", said)
    assert len(in_vgg11) == 2
    for own, local in in_vgg11:
        assert float(own) < 1e-12
        assert 0.1 < float(local) < 1


def test_a_right_measurement(tmp_path):
    assert "true median" in check(8, tmp_path)[1]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.alone
@needs_namespaces
def test_who_was_killed_or_stopped_is_found(tmp_path):
    _, said = check(10, tmp_path, {4: "3"})
    assert "kill of node 1, find_culprit returns 1" in said
    assert "slow of node 1, find_culprit returns None" in said
    slowed = re.findall(r"(\d\S+) s", said.partition("mean of each rank")[2])
    assert len(slowed) == 3
    assert min(map(float, slowed)) > 0.45  # 4/3 of 2 MB at 40 Mbit/s are 0.53 s


@pytest.mark.parametrize(
    ("silent", "changes", "words"),
    [
        ((1, 2), {}, None),
        ((2, 1), {}, "kill of node 1: find_culprit returns 2, and must 1"),
        ((1, 1), {}, "pause of node 2: .* returns 1, and must 2"),
        ((None, None), {}, "returns None, and must 1"),
    ],
)
def test_without_emulated_nodes_ranks_break_on_loopback(
    silent, changes, words, tmp_path, monkeypatch
):
    def refuse(*_, **options):
        raise UserError("no namespaces")

    def run_on_nodes(_program, nodes, _steps, *, disturb, loopback):
        assert (nodes, loopback) == (3, True)
        dead = next(quiet)
        return [f"rank {r} {'step 5' if dead in (r, None) else 'gives up: x'}" for r in range(3)]

    quiet = iter(silent)
    monkeypatch.setattr(break_it, "Cluster", refuse)
    monkeypatch.setattr(break_it, "run_on_nodes", run_on_nodes)
    if words is None:
        measured, said = check(10, tmp_path)
        assert measured == break_it.RECORDED_RATIO
        assert "no link can be slowed down here (no namespaces)" in said
    else:
        with pytest.raises(Mistake, match=words):
            check(10, tmp_path, changes)


@pytest.mark.slow
def test_less_exposed_than_the_link_needs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "run_on_nodes", lambda *_, **__: ["100 MB: 0.008 s exposed"])
    with pytest.raises(Mistake, match=r"0.442 s on these links, and 0.008 s were measured"):
        check(6, tmp_path)
