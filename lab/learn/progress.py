"""The student's folder ``learn/``: a file a lesson, and ``progress.json``, all that is stored."""

from pathlib import Path
from typing import TypedDict

from common.utils.typed_json import Finite, read_json, write_json
from lab.learn.course import Lesson

FOLDER = Path("learn")
_FILE = FOLDER / "progress.json"


class LessonProgress(TypedDict, total=False):
    """What is kept of a lesson."""

    prediction: Finite
    done: bool


Progress = dict[str, LessonProgress]  # by the lesson's number


def file_of(lesson: Lesson) -> Path:
    """Return the student's file of a lesson."""
    return FOLDER / f"{lesson.name}.py"


def read_progress() -> Progress:
    """Return what is kept in ``learn/`` of the current folder; nothing if there is no such file."""
    try:
        return read_json(_FILE, Progress)
    except FileNotFoundError:
        return {}


def keep(number: int, entry: LessonProgress) -> None:
    """Add to what is kept of a lesson."""
    progress = read_progress()
    progress[str(number)] = {**progress.get(str(number), {}), **entry}
    FOLDER.mkdir(exist_ok=True)
    write_json(_FILE, progress, Progress)
