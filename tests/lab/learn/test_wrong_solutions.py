"""No wrong solution passes, and each is told its own cause."""

import re
from pkgutil import resolve_name

import pytest

from lab.learn.course import LESSONS
from lab.learn.student_file import Mistake, StudentFile
from tests.lab.learn.solutions import solve
from tests.lab.learn.wrong_solutions import DDP, LATER, LESSON_3, OTHERS

LESSON = {lesson.number: lesson for lesson in LESSONS}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [*LESSON_3, *OTHERS, *LATER, *DDP], ids=str)
def test_a_wrong_solution_is_told_its_cause(wrong, tmp_path):
    solve(3, tmp_path)  # lessons 4 and 5 load it
    path = solve(wrong.lesson, tmp_path, wrong.blanks, wrong.edit)
    if wrong.lesson == 3:  # two epochs tell as much; the right solution trains all three
        path.write_text(path.read_text().replace("epochs=3", "epochs=2"))
    student = StudentFile(path)
    with pytest.raises(Mistake) as raised:
        resolve_name(LESSON[wrong.lesson].check)(student, lambda _text: None)
    told = str(raised.value)
    for pattern in wrong.told:
        assert re.search(pattern, told, re.DOTALL), told
    assert "Traceback" not in told
