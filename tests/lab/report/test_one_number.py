"""A number that stands in several places is the one of the file that it comes from."""

import re
import tomllib
from pathlib import Path

import pytest

from lab.comparison.record import read_comparison
from lab.learn.course import LESSONS
from lab.report.timeline import hidden_seconds
from lab.report.view import blocks

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "reports" / "samples" / "compare-digits-1gbit"
LINK_SECONDS = 36_924_456 * 8 / 1e9  # of all gradients at 1 Gbit/s


@pytest.fixture(scope="module")
def rows():
    (block,) = blocks(read_comparison(SAMPLE / "results.json"))
    return {row.sync: row for row in block.rows}


def page(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_readme_shows_the_sample_s_table(rows):
    text = page("README.md")
    for row in rows.values():
        low, high = row.interval("seconds")
        line = f"{row.sync} {row.nodes} {row.seconds:.3f} [{low:.3f}, {high:.3f}]"
        assert line in text
        assert f"{line} {row.medians.sync:.3f}" in text or row.nodes == 1
    for sync, name in (("gather_scatter", "gather_scatter"), ("all_reduce", "all_reduce")):
        assert f"{name} {rows[sync].step:.2f} s" in text, "the picture's description"
    ratio = rows["gather_scatter"].seconds / rows["overlapped"].seconds
    assert f"{ratio:.2f} times as fast as gather_scatter" in text


def test_lesson_8_asks_about_the_sample_s_step(rows):
    row = rows["all_reduce"]
    lesson = next(lesson for lesson in LESSONS if lesson.number == 8)
    sentence = f"A step takes {row.step:.3f} s, of which {row.medians.sync:.3f} s are exposed"
    assert sentence in lesson.question.text
    assert sentence in page("docs/learn/08_measuring.md")
    answer = row.step - row.medians.sync + row.medians.sync / 10
    assert lesson.question.answer == pytest.approx(answer, abs=0.001)


def test_strategies_page_says_what_overlap_leaves(rows):
    """The sample's backward hides messages; what is left is never near zero on this network."""
    text = page("docs/strategies.md")
    exposed = rows["ddp"].medians.sync
    assert f"`ddp` exposes {exposed:.3f} s" in text
    hidden = hidden_seconds(rows["ddp"].timeline.ranks)
    forward = rows["ddp"].medians.forward
    assert f"backward hides {hidden:.2f} s and forward {forward:.2f} s" in text
    for label, left in (
        ("overlapped by hand", 1.5 * LINK_SECONDS - hidden),
        ("DistributedDataParallel", 1.5 * LINK_SECONDS - hidden),
        ("sharded by hand", 1.5 * LINK_SECONDS - hidden - forward),
        ("DDP in half precision", 0.75 * LINK_SECONDS - hidden),
    ):
        [found] = re.findall(rf"\| {label} \|[^\n]*?\| (\d\.\d\d) s \|", text)
        assert float(found) == pytest.approx(left, abs=0.006), label
    assert exposed == pytest.approx(1.5 * LINK_SECONDS - hidden, abs=0.03)


def test_comparing_page_shows_the_sample_s_steps(rows):
    text = page("docs/comparing.md")
    for first, last in (("gather_scatter", "all_reduce"), ("all_reduce", "overlapped")):
        difference = rows[first].seconds - rows[last].seconds
        assert f"{first} to {last} | {difference:.3f}" in text


def test_accuracy_after_forty_steps_is_one_number():
    [measured] = re.findall(r"that of guessing \(([\d.]+ %);", page("docs/assignment.md"))
    lesson = page("docs/learn/08_measuring.md")
    assert f"right program reaches {measured} of 10,000 images" in lesson
    share = float(measured.removesuffix(" %")) / 100
    apart = 100 * 1.96 * (2 * share * (1 - share) / 10_000) ** 0.5
    answers = next(lesson for lesson in LESSONS if lesson.number == 8).exercises
    assert answers["b"].answer == pytest.approx(apart, abs=0.001)


def test_no_question_gives_a_gpu_a_cpu_s_time():
    """benchmarks/gpu.md measured a step at 1,024 samples in milliseconds."""
    [measured] = re.findall(
        r"batch 1024, compiled \|[^|]*\| ([\d.]+) ms", page("benchmarks/gpu.md")
    )
    questions = tomllib.loads((ROOT / "lab/whatif/questions.toml").read_text("utf-8"))["question"]
    for question in questions:
        changes = question["changes"]
        if "VGG-11" in question["text"] and changes.get("step_ms", 0) > 10 * float(measured):
            assert "A GPU" not in question["text"], question["id"]
            assert changes.get("backend", "gloo") == "gloo", question["id"]


def test_measured_and_typical_speed_ups_are_told_apart(rows):
    questions = tomllib.loads((ROOT / "lab/whatif/questions.toml").read_text("utf-8"))["question"]
    [root] = [question for question in questions if question["id"] == "root-link"]
    assert "a little faster than one in the comparison that was measured" in root["explanation"]
    assert 1 < rows["ddp"].speedup < 1.2
