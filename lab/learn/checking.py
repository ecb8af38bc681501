"""Check a student's file of a lesson: its blanks, its code, its answers, the prediction.

A lesson's check is a function ``check(student, say)`` that course.py names. It calls ``say`` with
each thing that is right, raises ``Wrong`` with the first that is not, and returns what the lesson's
question asked for, as measured, or None.
"""

import multiprocessing
import sys
import time
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from common.errors import INTERRUPTED
from common.utils.processes import adopt_orphans
from lab.learn.course import Exercise, Lesson
from lab.learn.progress import file_of, keep, read_progress
from lab.learn.student_file import Namespace, StudentFile, Wrong
from lab.processes.prefixed_output import say
from lab.processes.supervision import kill_descendants
from lab.proofs import ranks

RIGHT, WRONG, NOT_YET = 0, 1, 3
"""Exit statuses of a check."""
_LOOK_SECONDS = 0.3


def watch(lesson: Lesson) -> int:
    """Check the file now and at each save, until it is right or Ctrl-C; return the exit status."""
    _import_for_ranks()  # once, for all checks that fork from here
    seen = 0
    while True:
        changed = file_of(lesson).stat().st_mtime_ns
        if changed != seen:
            seen = changed
            say(f"\n{file_of(lesson)}, {time.strftime('%H:%M:%S')}")
            if check_apart(lesson) == RIGHT:
                return RIGHT
            say("The next save checks again; Ctrl-C ends.")
        time.sleep(_LOOK_SECONDS)


def check_apart(lesson: Lesson) -> int:
    """Check the file in a process that ends all that it has started; return the exit status."""
    # elsewhere forks of a process with torch may hang
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process = context.Process(target=_check_here, args=(lesson,))
    process.start()
    process.join()
    return process.exitcode if process.exitcode in (RIGHT, WRONG, NOT_YET) else INTERRUPTED


def _import_for_ranks() -> None:
    """Import torch, and what else ranks need, before they are forked."""
    for module in ranks.PRELOADED:
        import_module(module)


def _check_here(lesson: Lesson) -> None:
    if sys.platform == "linux":
        _import_for_ranks()
        ranks.fork_from_this_process()
    adopt_orphans()
    try:
        sys.exit(check(lesson, StudentFile(file_of(lesson))))
    finally:
        kill_descendants()


def check(lesson: Lesson, student: StudentFile) -> int:
    """Say what is right and what is not, and return the exit status."""
    try:
        if blanks := student.blanks():
            lines = f"line{'s' * (len(blanks) > 1)} {', '.join(map(str, blanks))}"
            say(f"not yet: replace the ... on {lines} of {student.path}")
            return NOT_YET
        measured = resolve_name(lesson.check)(student, lambda text: say(f"right: {text}"))
        [answers] = student.on_ranks(1, _answers)
    except Wrong as wrong:
        say(f"wrong: {wrong}")
        return WRONG
    statuses = {
        _check_answer(name, exercise, answers.get(name, ...))
        for name, exercise in lesson.exercises.items()
    }
    prediction = read_progress().get(str(lesson.number), {}).get("prediction")
    say(lesson.question.compare(prediction, measured))
    keep(lesson.number, {"done": statuses == {RIGHT}})
    return WRONG if WRONG in statuses else max(statuses)


def _answers(student: Namespace) -> dict[str, object]:
    return student["ANSWERS"]


def _check_answer(name: str, exercise: Exercise, given: object) -> int:
    if given is ...:
        say(f"not yet: exercise {name}")
        return NOT_YET
    try:
        right = exercise.accepts(given)
    except (TypeError, ValueError):
        right = False
    verdict, reason = ("right", exercise.why) if right else ("wrong", exercise.hint)
    say(f"{verdict}: exercise {name}, {given}{f': {reason}' if reason else ''}")
    return RIGHT if right else WRONG
