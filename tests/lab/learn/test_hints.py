"""``lab learn N --hint`` and ``--solution``, and the lesson that comes first."""

import pytest

from common.errors import UserError
from lab.cli import main
from lab.learn.checking import NOT_YET, check, comes_first
from lab.learn.course import LESSONS
from lab.learn.progress import keep
from lab.learn.solutions import SOLUTIONS, solution_of
from lab.learn.student_file import StudentFile
from tests.lab.learn.solutions import solve

LESSON = {lesson.number: lesson for lesson in LESSONS}
BY_NUMBER = pytest.mark.parametrize("number", LESSON)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def learn(capsys, *arguments):
    """Return the status of ``lab learn`` and what it prints."""
    status = main(["learn", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@BY_NUMBER
def test_three_hints_of_each_step_lead_to_the_line(number):
    hints = LESSON[number].hints()
    assert len(set(hints)) == 3 * (2 if LESSON[number].later else 1)
    for step in range(0, len(hints), 3):
        first, second, _ = hints[step : step + 3]
        assert "?" in first
        code = [text for text in SOLUTIONS[number] if "(" in text and "." in text]
        for text in code[:1]:
            assert text not in first + second


def test_the_last_hint_of_lesson_7_holds_the_sums(capsys):
    hints = LESSON[7].hints()
    for text in SOLUTIONS[7][4:6] + SOLUTIONS[7][7:13]:
        assert text in hints[5]
        assert text not in "".join(hints[:3])
    assert learn(capsys, 7, "--hint", 6)[1].startswith("Hint 6 of 6: ")
    status, told = learn(capsys, 7, "--hint", 7)
    assert status == 2
    assert "hints 1 to 6" in told
    assert learn(capsys, 3, "--hint", 4)[0] == 2


def test_each_call_shows_the_next_hint_and_a_number_shows_that_one(capsys):
    for number in (1, 2, 3, 3):
        status, told = learn(capsys, 3, "--hint")
        assert status == 0
        assert told.startswith(f"Hint {number} of 3: {LESSON[3].hints()[number - 1]}")
    assert "--give-up" in told
    assert LESSON[3].hints()[0] in learn(capsys, 3, "--hint", 1)[1]
    assert "Hint 2 of 3" in learn(capsys, 3, "--hint")[1]
    assert "Hint 1 of 3" in learn(capsys, 4, "--hint")[1]


def test_a_solution_is_shown_once_the_lesson_is_done_or_given_up(capsys, tmp_path):
    solve(3, tmp_path, {1: "[torch.stack(arriving).mean(0)] * size"})
    status, told = learn(capsys, 3, "--solution")
    assert status == 2
    assert "lesson 3 is not done yet" in told
    right = "[sum(arriving) / size] * size"
    assert right not in told

    for arguments in (["--solution", "--give-up"], ["--give-up"]):
        status, told = learn(capsys, 3, *arguments)
        assert status == 0
        assert "-        means = [torch.stack(arriving).mean(0)] * size if" in told
        assert f"+        means = {right} if" in told
        assert "dist.scatter" not in told or "-        dist.scatter" not in told
    keep(LESSON[3], done=True)
    assert right in learn(capsys, 3, "--solution")[1]
    solve(3, tmp_path)
    assert "is this solution" in learn(capsys, 3, "--solution")[1]


@BY_NUMBER
def test_a_solution_has_no_blank_and_right_answers(number, tmp_path):
    student = StudentFile(tmp_path / "file.py")
    student.path.write_text(solution_of(LESSON[number]))
    assert student.blanks() == []
    source = student.path.read_text()
    begin = source.index("ANSWERS = {")
    names: dict = {}
    exec(source[begin : source.index("\n}\n", begin) + 3], names)
    assert names["ANSWERS"].keys() == LESSON[number].exercises.keys()
    for name, exercise in LESSON[number].exercises.items():
        assert exercise.accepts(names["ANSWERS"][name]), name


@pytest.mark.parametrize("number", [4, 5])
def test_lesson_3_comes_first(number, tmp_path, capsys):
    student = StudentFile(solve(number, tmp_path))
    assert "which is missing: lab learn 3" in learn(capsys, number)[1]
    assert check(LESSON[number], student) == NOT_YET
    told = capsys.readouterr().out
    assert "do lesson 3 first" in told
    assert "learn/03_gather_scatter.py" in told
    LESSON[3].file.write_text(LESSON[3].skeleton.read_text())
    assert check(LESSON[number], student) == NOT_YET
    assert "do lesson 3 first" in capsys.readouterr().out
    LESSON[3].file.write_text("def\n")
    assert "cannot be loaded (line 1 is not valid Python" in learn(capsys, number)[1]
    solve(3, tmp_path)
    assert comes_first(LESSON[number]) is None


@BY_NUMBER
def test_a_prediction_is_a_number_in_place_of_the_word(number):
    question = LESSON[number].question
    with pytest.raises(UserError, match="got 'ANSWER'") as raised:
        question.parse("ANSWER")
    digits = [word for word in str(raised.value).split() if word[:1].isdigit()]
    assert digits == []  # no example that gives the answer away
    assert question.parse(f"3 {question.unit}") == question.parse(f"3{question.unit}") == 3
