"""What is kept of a student: ``learn/progress.json``."""

import msgspec

from common.utils.typed_json import Finite, read_json, write_json
from lab.learn.course import FOLDER, Lesson

_FILE = FOLDER / "progress.json"


class LessonProgress(msgspec.Struct, omit_defaults=True):
    """What is kept of a lesson; None: nothing yet.

    prediction : what the student expects.
    done : whether all was right when it was last checked.
    hints : the number of the last hint shown.
    """

    prediction: Finite | None = None
    done: bool | None = None
    hints: int = 0


Progress = dict[str, LessonProgress]  # by the lesson's name


def _read() -> Progress:
    """Return what is kept in the current folder; nothing if there is no such file."""
    if not _FILE.exists():
        return {}
    return read_json(_FILE, Progress)


def progress_of(lesson: Lesson) -> LessonProgress:
    """Return what is kept of a lesson."""
    return _read().get(lesson.name, LessonProgress())


def keep(lesson: Lesson, **values: float) -> None:
    """Keep values of ``LessonProgress`` by their names. Raises UserError if one is not finite."""
    everything = _read()
    everything[lesson.name] = msgspec.structs.replace(progress_of(lesson), **values)
    FOLDER.mkdir(exist_ok=True)
    write_json(_FILE, msgspec.to_builtins(everything), Progress)
