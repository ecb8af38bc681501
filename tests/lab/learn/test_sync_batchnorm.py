"""Lesson 7's second step: the student's sums on known values, and in VGG-11."""

import re

import pytest

from lab.learn.checking import NOT_YET, check
from lab.learn.course import LESSONS
from lab.learn.lessons import sync_batchnorm
from lab.learn.student_file import Mistake, StudentFile
from tests.helpers import run_ranks
from tests.lab.learn.solutions import learn, solve
from tests.lab.learn.wrong_solutions import BATCHNORM, WrongSolution

LESSON = LESSONS[6]
OTHER_WAYS = [  # as right as the solution
    WrongSolution(
        "own means",
        7,
        (),
        {
            4: "torch.stack([torch.ones_like(x).sum(0), x.double().sum(0), "
            "((x - x.mean(0)) ** 2).sum(0) + len(x) * x.double().mean(0) ** 2])"
        },
    ),
    WrongSolution(
        "two messages",
        7,
        (),
        {
            4: "torch.stack([torch.ones_like(x).double(), x.double()]).sum(1)",
            8: "(x.double() - mean).square().sum(0); dist.all_reduce(variance); variance /= count",
        },
    ),
    WrongSolution(
        "a number for count",
        7,
        (),
        {6: "int(sums[0, 0])", 15: "weight / std * (g - (sums[0] + z * sums[1]) / count)"},
    ),
]


def problems_on_rank(_rank, paths, shares):
    """Return what each file is told about known values, by path; None: nothing."""
    told = {}
    for path in paths:
        try:
            found = sync_batchnorm._on_known_values(StudentFile(path).load(), shares)
            told[path] = found.problem
        except Mistake as mistake:
            told[path] = str(mistake)
        except Exception as error:
            told[path] = f"fails in line: {type(error).__name__}"
    return told


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """What the first rank that finds anything says, by the name of the solution."""
    files = {}
    for number, wrong in enumerate([*BATCHNORM, *OTHER_WAYS]):
        folder = tmp_path_factory.mktemp(f"solution{number}")
        files[str(wrong)] = solve(7, folder, wrong.blanks, wrong.edit)
    by_rank = run_ranks(3, problems_on_rank, list(files.values()), sync_batchnorm.VALUES[0])
    return {
        name: next((told[path] for told in by_rank if told[path]), None)
        for name, path in files.items()
    }


@pytest.mark.parametrize("wrong", BATCHNORM, ids=str)
def test_wrong_sums_are_told_their_cause(wrong, problems):
    told = problems[str(wrong)]
    for pattern in wrong.told:
        assert re.search(pattern, told, re.DOTALL), told


@pytest.mark.parametrize("other", OTHER_WAYS, ids=str)
def test_other_right_sums_pass(other, problems):
    assert problems[str(other)] is None


@pytest.mark.slow
def test_sums_that_are_wrong_with_many_channels_alone_are_seen_in_vgg11(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sync_batchnorm, "SHARDS", ((1, 2),))
    wrong = StudentFile(solve(7, tmp_path, {14: "len(x.T) > 2 or dist.all_reduce(sums)"}))
    with pytest.raises(Mistake, match="known values are right, and yet VGG-11 on 2 ranks"):
        sync_batchnorm.check_vgg11(wrong, print)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_first_step_is_checked_while_the_second_has_blanks(tmp_path):
    student = StudentFile(solve(7, tmp_path, {15: "..."}))
    ended = learn(7, "--check", "--without-prediction", cwd=tmp_path)
    told = ended.out
    assert ended.status == NOT_YET
    assert "with BatchNorm 4 ranks differ" in told
    assert "VGG-11" not in told
    [line] = student.blanks()
    assert f"not yet: replace each ... of {LESSON.file}, in lines {line}" in told
    assert "measured 1." in told
    assert student.blanks(outside=LESSON.later) == []


def test_a_blank_of_the_first_step_comes_first(tmp_path, capsys):
    student = StudentFile(solve(7, tmp_path, {3: "...", 15: "..."}))
    assert check(LESSON, student) == NOT_YET
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    assert told.endswith(f" {student.blanks()[0]}\n")
