"""``lab learn``, and lessons 1 to 5: right solutions pass, wrong ones are told what they do."""

import ast
import json
import re
from pkgutil import resolve_name

import pictures
import pytest

from common.errors import UserError
from lab.learn.course import LESSONS
from lab.learn.lessons import nodes, root_link
from lab.learn.solutions import SOLUTIONS
from lab.learn.student_file import Mistake, NotMeasured, StudentFile
from tests.helpers import ROOT, start_lab
from tests.helpers.cluster import needs_namespaces
from tests.helpers.processes import running_in
from tests.lab.learn.solutions import learn, solve

LESSON = {lesson.number: lesson for lesson in LESSONS}
BY_NUMBER = pytest.mark.parametrize("number", SOLUTIONS)


# --- the command ---


def test_a_lesson_from_its_skeleton_to_done(tmp_path):
    assert "  1  One process              20 min  next\n" in learn(cwd=tmp_path).out
    assert learn(1, "--check", cwd=tmp_path).status == 2  # no file yet
    begun = learn(1, cwd=tmp_path)
    assert LESSON[1].question.text in begun.out
    file = tmp_path / "learn/01_one_process.py"
    assert file.read_text() == LESSON[1].skeleton.read_text()

    asked = learn(1, "--check", cwd=tmp_path)
    assert (asked.status, asked.err) == (3, "")
    assert "lab learn 1 --predict ANSWER" in asked.out
    assert LESSON[1].question.text in asked.out
    unchanged = learn(1, "--check", "--without-prediction", cwd=tmp_path)
    assert (unchanged.status, unchanged.err) == (3, "")
    lines = [n for n, line in enumerate(file.read_text().splitlines(), 1) if " ...  #" in line]
    assert f"in lines {', '.join(map(str, lines))}\n" in unchanged.out

    solve(1, tmp_path, {4: "...", 5: "30"})
    assert learn(1, "--predict", "2.5 times", cwd=tmp_path).status == 0
    solved = learn(1, cwd=tmp_path)
    assert "stays as it is" in solved.out
    assert "= 29" not in solved.out
    half = learn(1, "--check", cwd=tmp_path)
    assert half.status == 1
    assert "not yet: exercise a\nwrong: exercise b, 30: " in half.out
    assert "you 2.5 times, formula 2 times, measured " in half.out

    solve(1, tmp_path)
    assert learn(1, "--check", cwd=tmp_path).status == 0
    assert "20 min  done\n  2  Two silent ranks         25 min  next\n" in learn(cwd=tmp_path).out
    assert {path.name for path in tmp_path.rglob("*.*")} == {file.name, "progress.json"}
    kept = json.loads((tmp_path / "learn/progress.json").read_text())
    assert kept == {"01_one_process": {"prediction": 2.5, "done": True}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check"], "which lesson?"),
        ([99], "lesson 99: there are lessons 1 to"),
        (
            [1, "--predict", "long"],
            "--predict: got 'long', give a number (times) in place of ANSWER",
        ),
        ([1, "--predict", "2", "--check"], "not allowed with"),
    ],
)
def test_wrong_usage(arguments, words, tmp_path):
    ended = learn(*arguments, cwd=tmp_path)
    assert ended.status == 2
    assert words in ended.err
    assert not (tmp_path / "learn").exists() or not list((tmp_path / "learn").iterdir())


@pytest.mark.slow
def test_watch_checks_each_save_and_ends_when_all_is_right(tmp_path):
    learn(1, cwd=tmp_path)
    watching = start_lab("learn", 1, "--watch", "--without-prediction", cwd=tmp_path)
    watching.wait_for("Waiting for the next save")
    solve(1, tmp_path, {6: "2"})
    watching.wait_for("wrong: exercise c")
    solve(1, tmp_path)
    assert watching.end().status == 0


# --- running a student's file ---


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x = ...\nANSWERS = {'a': ...}\n", [1]),
        ("x[..., 0] = y[...]\nf(1, ...)\n...\n", [2, 3]),
        ("'...'  # ...\n", []),
    ],
)
def test_blanks(text, lines, tmp_path):
    (tmp_path / "file.py").write_text(text)
    assert StudentFile(tmp_path / "file.py").blanks() == lines


def call_act(student):
    return student["act"]()


HEAD = "import time\nimport torch.distributed as dist\n\ndef act():\n    rank = dist.get_rank()\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if rank:\n        dist.barrier()\n", "0: is done\n.*1: line 7, in act: dist.barrier()"),
        ("while rank:\n        pass\n", "0: is done\n.*1: line [67], in act: "),
        (
            "1 / rank\n",
            r"rank 0 of 2: act\(\) fails in line 6 of file.py \(1 / rank\): ZeroDivision",
        ),
        ("exit(rank)\n", "line 6, in act: exit.rank.: SystemExit"),
        ("import os\n    os._exit(3)\n", "ended with status 3"),
        ("pass\ndel act\n", "there is no act in the file"),
    ],
)
def test_what_stops_a_file_is_told_with_its_line(body, words, tmp_path):
    (tmp_path / "file.py").write_text(f"{HEAD}    {body}")
    with pytest.raises(Mistake, match=words):
        StudentFile(tmp_path / "file.py").on_ranks(2, call_act, limit_seconds=4)


def test_a_check_leaves_no_process(tmp_path):
    solve(1, tmp_path, {3: "__import__('subprocess').Popen(['sleep', '600'])"})
    assert learn(1, "--check", "--without-prediction", cwd=tmp_path).status == 1
    assert running_in(tmp_path) == []


# --- the lessons ---


@BY_NUMBER
def test_skeletons_are_short_and_have_pages_and_pictures(number):
    lesson = LESSON[number]
    nodes = ast.walk(ast.parse(lesson.skeleton.read_text()))
    statements = [one for one in nodes if isinstance(one, ast.stmt)]
    most = 44 + 10 * len(lesson.later)
    assert sum(not isinstance(one, ast.Import | ast.ImportFrom) for one in statements) <= most
    page = (ROOT / f"docs/learn/{lesson.name}.md").read_text()
    assert len(page.splitlines()) <= 135  # of 100 columns
    for words in (f"lab learn {number} --predict", f"images/{lesson.name}.svg"):
        assert words in page
    exercises = [name for name in lesson.exercises if name.isalpha()]  # not scripts to look into
    assert exercises[:3] == ["a", "b", "c"]
    assert re.findall(r"\*\*([a-z])\*\*", page) == exercises


def test_the_pictures_are_drawn_again_alike(tmp_path):
    """The same texts, and as many shapes: their coordinates depend on matplotlib's version."""
    pictures.main(tmp_path)
    for name in pictures.PICTURES:
        drawn, kept = (
            (re.findall(r"<text[^>]*>([^<]+)", text), text.count("<path"))
            for folder in (tmp_path, ROOT / "docs/learn/images")
            for text in [(folder / f"{name}.svg").read_text()]
        )
        assert drawn == kept, name


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number", [2, 3, pytest.param(4, marks=[needs_namespaces, pytest.mark.alone]), 5, 11]
)
def test_a_solution_is_right(number, tmp_path):
    solve(number, tmp_path)
    solve(3, tmp_path)
    ended = learn(number, "--check", "--without-prediction", cwd=tmp_path)
    assert ended.status == 0, ended
    found = re.search(r"formula (\S+) .*, measured (\S+) ", ended.out)
    formula, measured = map(float, found.groups())
    assert measured >= 0.95 * formula if number == 4 else measured == pytest.approx(formula, 0.01)


@pytest.mark.slow
def test_without_emulated_nodes_lesson_4_uses_a_recorded_time(tmp_path, monkeypatch, capsys):
    def refused(*_, **__):
        raise UserError("this machine cannot emulate a cluster: it is a container")

    monkeypatch.setattr(nodes, "Cluster", refused)
    solve(3, tmp_path)
    student = StudentFile(solve(4, tmp_path))
    assert root_link.check(student, print) == root_link.RECORDED_SECONDS > 1.77
    assert "not measured here, but on another machine: this machine" in capsys.readouterr().out


@pytest.mark.slow
def test_a_mean_of_the_stack_is_right(tmp_path):
    """A stack is contiguous, whatever the strides of the gradients that arrive."""
    student = StudentFile(solve(3, tmp_path, {1: "[torch.stack(arriving).mean(0)] * size"}))
    assert resolve_name(LESSON[3].check)(student, print) == 8


@pytest.mark.slow
def test_a_ring_must_be_one(tmp_path):
    student = StudentFile(solve(3, tmp_path))
    with pytest.raises(Mistake, match=r"on 3 ranks, rank 0 calls gather 4 times, scatter 4 times"):
        resolve_name(LESSON[5].check)(student, print)


@pytest.mark.slow
def test_lesson_4_does_not_measure_an_exchange_of_nothing(tmp_path):
    head = '    """Leave the mean over all ranks in every gradient. New in lesson 3."""\n'
    solve(3, tmp_path, edit=(head, f"{head}    return\n"))
    student = StudentFile(solve(4, tmp_path))
    with pytest.raises(Mistake, match=r"03_gather_scatter.py: .* group-unused"):
        root_link.check(student, print)


@pytest.mark.parametrize(("seconds", "raised"), [(0.124, Mistake), (4.0, NotMeasured)])
def test_what_no_link_can_do_is_not_measured(seconds, raised):
    with pytest.raises(raised, match=f"takes 1.77 s on these links, and {seconds:.3f} s were"):
        nodes.check_limits("", seconds, link_seconds=1.772, what="an exchange")
    nodes.check_limits("", 2.386, link_seconds=1.772, what="an exchange")


@pytest.mark.parametrize(
    ("number", "measured", "explained"),
    [(4, 2.386, True), (4, 1.7, False), (1, 1.6, True), (1, 2.2, False), (3, 8, False)],
)
def test_only_a_difference_on_its_side_is_explained(number, measured, explained):
    told = LESSON[number].question.compare(None, measured)
    assert ("Why the measurement differs" in told) == explained
    assert "measured 0 s" in LESSON[4].question.compare(2, 0.0)
