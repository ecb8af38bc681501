"""What is kept of a student: ``learn/progress.json``."""

import msgspec

from common.utils.typed_json import Finite, read_json, write_json
from lab.learn.course import FOLDER, Lesson

_FILE = FOLDER / "progress.json"


class LessonProgress(msgspec.Struct, omit_defaults=True):
    """What is kept of a lesson; None: nothing yet."""

    prediction: Finite | None = None
    done: bool | None = None


Progress = dict[str, LessonProgress]  # by the lesson's name


def read_progress() -> Progress:
    """Return what is kept in the current folder; nothing if there is no such file."""
    if not _FILE.exists():
        return {}
    return read_json(_FILE, Progress)


def progress_of(lesson: Lesson) -> LessonProgress:
    """Return what is kept of a lesson."""
    return read_progress().get(lesson.name, LessonProgress())


def keep(lesson: Lesson, **values: float | bool) -> None:
    """Keep ``prediction``, what the student expects, or ``done``, whether the last check was right.

    Raises UserError if a prediction is not finite.
    """
    everything = read_progress()
    everything[lesson.name] = msgspec.structs.replace(progress_of(lesson), **values)
    FOLDER.mkdir(exist_ok=True)
    write_json(_FILE, msgspec.to_builtins(everything), Progress)
