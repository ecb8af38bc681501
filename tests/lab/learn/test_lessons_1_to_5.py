"""``lab learn``, and lessons 1 to 5: right solutions pass, wrong ones are told what they do."""

import ast
import json
import re
from pkgutil import resolve_name

import pytest
import torch

from common.errors import UserError
from lab.learn import pictures
from lab.learn.course import LESSONS
from lab.learn.lessons import nodes, root_link
from lab.learn.lessons.averaging import diagnose
from lab.learn.solutions import SOLUTIONS
from lab.learn.student_file import Mistake, StudentFile
from tests.helpers import ROOT, start_lab
from tests.helpers.cluster import needs_namespaces
from tests.helpers.processes import running_in
from tests.lab.learn.solutions import solve

LESSON = {lesson.number: lesson for lesson in LESSONS}
BY_NUMBER = pytest.mark.parametrize("number", SOLUTIONS)


def learn(*arguments, cwd):
    return start_lab("learn", *arguments, cwd=cwd, env={"PYTHONPATH": str(ROOT)}).end()


# --- the command ---


def test_a_lesson_from_its_skeleton_to_done(tmp_path):
    assert "  1  One process              20 min  next\n" in learn(cwd=tmp_path).out
    assert learn(1, "--check", cwd=tmp_path).status == 2  # no file yet
    begun = learn(1, cwd=tmp_path)
    assert LESSON[1].question.text in begun.out
    file = tmp_path / "learn/01_one_process.py"
    assert file.read_text() == LESSON[1].skeleton.read_text()

    unchanged = learn(1, "--check", cwd=tmp_path)
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
        ([1, "--predict", "long"], "--predict: got 'long', give a number in times, e.g. 4times"),
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
    watching = start_lab("learn", 1, "--watch", cwd=tmp_path)
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
        ("1 / rank\n", "rank 0 of 2: line 6, in act: 1 / rank: ZeroDivisionError"),
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
    assert learn(1, "--check", cwd=tmp_path).status == 1
    assert running_in(tmp_path) == []


# --- the lessons ---


@BY_NUMBER
def test_skeletons_are_short_and_have_pages_and_pictures(number):
    lesson = LESSON[number]
    nodes = ast.walk(ast.parse(lesson.skeleton.read_text()))
    statements = [one for one in nodes if isinstance(one, ast.stmt)]
    assert sum(not isinstance(one, ast.Import | ast.ImportFrom) for one in statements) <= 44
    page = (ROOT / f"docs/learn/{lesson.name}.md").read_text()
    assert len(page.splitlines()) <= 130  # of 100 columns
    for words in (f"lab learn {number} --predict", f"images/{lesson.name}.svg", "**a**", "**c**"):
        assert words in page
    assert list(lesson.exercises)[-3:] == ["a", "b", "c"]


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


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([1 / 3, 1 / 3, 1 / 3], None),
        ([1, 1, 1], "the sum, 3.000 times the mean on 3 ranks, in b: divide"),
        ([1 / 2, 1 / 2, 1 / 2], "1.500 times the mean on 3 ranks, in b"),
        ([1 / 9, 1 / 9, 1 / 9], "0.333 times the mean"),
        ([0, 1, 0], "0.000 g0 + 1.000 g1 + 0.000 g2 in b"),
        ([1 / 3, 1 / 3, 0], "0.333 g0 + 0.333 g1 + 0.000 g2"),
    ],
)
def test_a_wrong_gradient_is_described(shares, words):
    before = torch.randn(3, 20, dtype=torch.float64)
    after = torch.cat([before[:, :8].mean(0), torch.tensor(shares).double() @ before[:, 8:]])
    told = diagnose(after, before, {"a": 8, "b": 12})
    assert told == words or words in told


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number", [2, 3, pytest.param(4, marks=[needs_namespaces, pytest.mark.alone]), 5]
)
def test_a_solution_is_right(number, tmp_path):
    solve(number, tmp_path)
    solve(3, tmp_path)
    ended = learn(number, "--check", cwd=tmp_path)
    assert ended.status == 0, ended
    found = re.search(r"formula (\S+) .*, measured (\S+) ", ended.out)
    formula, measured = map(float, found.groups())
    assert measured >= 0.95 * formula if number == 4 else measured == pytest.approx(formula, 0.01)


def test_without_emulated_nodes_lesson_4_uses_a_recorded_time(tmp_path, monkeypatch, capsys):
    def refused(*_, **__):
        raise UserError("this machine cannot emulate a cluster: it is a container")

    monkeypatch.setattr(nodes, "Cluster", refused)
    student = StudentFile(solve(4, tmp_path))
    assert root_link.check(student, print) == root_link.RECORDED_SECONDS > 1.77
    assert "not measured here, but on another machine: this machine" in capsys.readouterr().out


WRONG = [
    (1, {1: "pass"}, "begins with forward, backward, step, forward, "),
    (1, {3: "pass"}, "begins with forward, zero_grad, backward, forward, "),
    (1, {0: "time.perf_counter()"}, "section forward takes "),
    (1, {2: "loss.backward(), optimizer.step()", 3: "pass"}, "section backward takes 1110 s"),
    (2, {2: "0"}, r"take 1797 samples in an epoch, 599 different ones of 1797"),
    (2, {1: "1", 2: "0"}, "take 5391 samples in an epoch, 1797 different"),
    (2, {0: "dist.get_rank()"}, "the ranks' weights begin with the sums"),
    (2, {3: "GLOBAL_BATCH"}, "3 epochs take 30 steps, but 87 with a global batch of 64"),
    (2, {4: "pass"}, "call set_epoch"),
    (3, {1: "[sum(arriving)] * size"}, "rank 0 ends with the sum, 2.000 times the mean on 2"),
    (3, {1: "[sum(arriving) / 2] * size"}, "rank 0 ends with 1.500 times the mean on 3 ranks"),
    (3, {1: "arriving[::-1]"}, r"0.000 g0 \+ 1.000 g1 in 0.weight"),
    (3, {2: "pass"}, r"rank 0 ends with 1.000 g0 \+ 0.000 g1 in 0.weight"),
    (4, {0: "2 * (nodes - 1) * gradient_mb / 1000 / rate_gbit"}, "0.125 times what rank 0's link"),
    (4, {0: "(nodes - 1) * gradient_mb * 8 / 1000 / rate_gbit"}, "gives 0.8861 s, 0.5 times"),
    (5, {0: "rank"}, "in chunk 0 of 3 that are no sum of the ranks' gradients there"),
    (5, {1: "rank - step"}, r"0.000 g0 \+ 0.500 g1 in chunk 0 of 2"),
    (5, {2: "rank - step", 3: "rank - step - 1"}, r"0.500 g0 \+ 0.000 g1 in chunk 0 of 2"),
]
EDITED = [
    (3, ("model.parameters()", "list(model.parameters())[:-1]"), "1.000 g0 .* in 1.bias"),
    (3, ("if parameter.grad is None", "if parameter.grad is None or parameter.dim() < 2"), "bias"),
    (5, ("flat /= size", "pass"), "the sum, 2.000 times the mean on 2 ranks, in chunk 0 of 2"),
    (5, ("gradient.copy_(mean.view_as(gradient))", "pass"), "1.000 g0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "changes", "edit", "words"),
    [(n, changes, ("", ""), words) for n, changes, words in WRONG]
    + [(n, {}, edit, words) for n, edit, words in EDITED],
)
def test_a_wrong_solution_is_told_what_it_does(number, changes, edit, words, tmp_path):
    student = StudentFile(solve(number, tmp_path, changes, edit))
    with pytest.raises(Mistake, match=words):
        resolve_name(LESSON[number].check)(student, print)


@pytest.mark.slow
def test_a_mean_of_the_stack_is_right(tmp_path):
    """A stack is contiguous, whatever the strides of the gradients that arrive."""
    student = StudentFile(solve(3, tmp_path, {1: "[torch.stack(arriving).mean(0)] * size"}))
    assert resolve_name(LESSON[3].check)(student, print) == 8


@pytest.mark.slow
def test_a_ring_must_be_one(tmp_path):
    student = StudentFile(solve(3, tmp_path))
    with pytest.raises(Mistake, match=r"the ranks send 4.00, 1.00, 1.00, 1.00, 1.00 times"):
        resolve_name(LESSON[5].check)(student, print)
