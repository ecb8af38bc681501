"""No wrong solution passes, and each is told its own cause."""

import re
from pkgutil import resolve_name

import pytest

from lab.learn.course import LESSONS
from lab.learn.student_file import Mistake, StudentFile
from tests.lab.learn.solutions import solve
from tests.lab.learn.wrong_solutions import LESSON_3, OTHERS, WrongSolution

LESSON = {lesson.number: lesson for lesson in LESSONS}


def mistake_of(wrong: WrongSolution, folder):
    """Return what the lesson's check says to a wrong solution."""
    solve(3, folder)  # lessons 4 and 5 load it
    student = StudentFile(solve(wrong.lesson, folder, wrong.blanks, wrong.edit))
    with pytest.raises(Mistake) as raised:
        resolve_name(LESSON[wrong.lesson].check)(student, lambda _text: None)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [*LESSON_3, *OTHERS], ids=str)
def test_a_wrong_solution_is_told_its_cause(wrong, tmp_path):
    told = mistake_of(wrong, tmp_path)
    for pattern in wrong.told:
        assert re.search(pattern, told, re.DOTALL), told
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_six_wrong_solutions_of_lesson_3_are_told_six_causes(tmp_path):
    causes = {mistake_of(wrong, tmp_path).partition(":")[0] for wrong in LESSON_3[:6]}
    assert len(causes) == 6
