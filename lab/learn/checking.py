"""Check a student's file of a lesson: its blanks, its code, its answers, the prediction.

A lesson's check is a function ``check(student, say)`` that course.py names. It calls ``say`` with
each thing that is right, raises ``Mistake`` with the first that is not, and returns what the
lesson's question asked for, as measured, or None.
"""

import gc
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from common.errors import INTERRUPTED
from common.utils.processes import adopt_orphans
from lab.fleet.supervision import kill_descendants
from lab.learn.course import LESSONS, Lesson
from lab.learn.progress import keep, progress_of
from lab.learn.student_file import Mistake, NotMeasured, StudentFile
from lab.terminal import say

# Exit statuses of a check.
RIGHT = 0
WRONG = 1
NOT_YET = 3
_LOOK_SECONDS = 0.3


def watch(lesson: Lesson) -> int:
    """Check the file now and at each save, until all is right or Ctrl-C; return the status."""
    _prepare_ranks()  # once, for all checks
    while True:
        saved = lesson.file.stat().st_mtime_ns
        if check_apart(lesson) == RIGHT:
            return RIGHT
        say("Waiting for the next save; Ctrl-C ends.\n")
        while lesson.file.stat().st_mtime_ns == saved:
            time.sleep(_LOOK_SECONDS)


def check_apart(lesson: Lesson) -> int:
    """Check the file in a process of its own, which ends all that it has started.

    Returns the exit status: RIGHT, WRONG or NOT_YET; INTERRUPTED if the process ended otherwise.
    """
    # Outside Linux the fork of a process with torch may hang.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process = context.Process(target=_check_here, args=(lesson,))
    process.start()
    process.join()
    if process.exitcode in (RIGHT, WRONG, NOT_YET):
        return process.exitcode
    return INTERRUPTED


def _prepare_ranks() -> None:
    """Import what ranks need, so that they can be forked from here."""
    from lab.proofs import ranks

    if sys.platform == "linux":
        for module in (*ranks.PRELOADED, "sklearn.datasets"):
            import_module(module)
        gc.freeze()  # a rank's garbage collector would write to, and so copy, the shared memory
        ranks.fork_from_this_process()


def _check_here(lesson: Lesson) -> None:
    """Check the file, end what it has started, and exit with the status."""
    adopt_orphans()
    try:
        sys.exit(check(lesson, StudentFile(lesson.file)))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        kill_descendants()


def check(lesson: Lesson, student: StudentFile) -> int:
    """Say what is right and what is not, keep whether all is, and return the exit status."""
    try:
        first = comes_first(lesson)
        if first is not None:
            say(f"not yet: {first}")
            return NOT_YET
        first_step = student.blanks(outside=lesson.later)
        if first_step:
            _say_blanks(student, first_step)
            return NOT_YET
        blanks = student.blanks()
        _prepare_ranks()
        check_code = resolve_name(lesson.check)
        measured = check_code(student, lambda text: say(f"right: {text}"))
        [answers] = student.on_ranks(1, lambda names: names["ANSWERS"])
    except Mistake as wrong:
        say(f"wrong: {wrong}")
        return WRONG
    except NotMeasured as unknown:
        say(f"not yet: {unknown}")
        return NOT_YET
    status = _check_answers(lesson, answers)
    if blanks:
        _say_blanks(student, blanks)
        if status == RIGHT:
            status = NOT_YET
    say(lesson.question.compare(progress_of(lesson).prediction, measured))
    keep(lesson, done=status == RIGHT)
    return status


def _say_blanks(student: StudentFile, lines: Sequence[int]) -> None:
    say(f"not yet: replace each ... of {student.path}, in lines {', '.join(map(str, lines))}")


def comes_first(lesson: Lesson) -> str | None:
    """Say which lesson comes first, if this one loads its file and that is not written."""
    if lesson.uses is None:
        return None
    earlier = LESSONS[lesson.uses - 1]
    state = "is missing"
    if earlier.file.exists():
        try:
            blanks = StudentFile(earlier.file).blanks()
        except Mistake as wrong:
            state = f"cannot be loaded ({wrong})"
        else:
            if not blanks:
                return None
            state = f"has blanks in lines {', '.join(map(str, blanks))}"
    return (
        f"do lesson {earlier.number} first. This lesson loads {earlier.file}, which {state}: "
        f"lab learn {earlier.number}"
    )


def _check_answers(lesson: Lesson, answers: Mapping[str, Any]) -> int:
    """Say which exercises are right, and return the status of the worst."""
    status = RIGHT
    for name, exercise in lesson.exercises.items():
        given = answers.get(name, ...)
        if given is ...:
            say(f"not yet: exercise {name}")
            status = status or NOT_YET
        elif exercise.accepts(given):
            say(f"right: exercise {name}: {exercise.why}")
        else:
            say(f"wrong: exercise {name}, {given}: {exercise.hint}")
            status = WRONG
    return status
