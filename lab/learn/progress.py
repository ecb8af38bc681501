"""What is kept of a student: ``learn/progress.json``."""

from typing import TypedDict

from common.utils.typed_json import Finite, read_json, write_json
from lab.learn.course import FOLDER, Lesson

_FILE = FOLDER / "progress.json"


class LessonProgress(TypedDict, total=False):
    """What is kept of a lesson."""

    prediction: Finite
    done: bool


Progress = dict[str, LessonProgress]  # by the lesson's name


def read_progress() -> Progress:
    """Return what is kept in the current folder; nothing if there is no such file."""
    return read_json(_FILE, Progress) if _FILE.exists() else {}


def keep(lesson: Lesson, entry: LessonProgress) -> None:
    """Add to what is kept of a lesson."""
    progress = read_progress()
    progress[lesson.name] = {**progress.get(lesson.name, {}), **entry}
    FOLDER.mkdir(exist_ok=True)
    write_json(_FILE, progress, Progress)
