"""What is kept of a student: ``learn/progress.json``."""

import msgspec

from common.utils.typed_json import Finite, read_json, write_json
from lab.learn.course import FOLDER, Lesson

_FILE = FOLDER / "progress.json"


class LessonProgress(msgspec.Struct, omit_defaults=True):
    """What is kept of a lesson; None: nothing yet. hints : the number of the last hint shown."""

    prediction: Finite | None = None
    done: bool | None = None
    hints: int = 0


Progress = dict[str, LessonProgress]  # by the lesson's name


def read_progress() -> Progress:
    """Return what is kept in the current folder; nothing if there is no such file."""
    if not _FILE.exists():
        return {}
    return read_json(_FILE, Progress)


def progress_of(lesson: Lesson) -> LessonProgress:
    """Return what is kept of a lesson."""
    return read_progress().get(lesson.name, LessonProgress())


def keep_prediction(lesson: Lesson, prediction: float) -> None:
    """Keep what the student expects. Raises UserError if it is not finite."""
    progress = progress_of(lesson)
    progress.prediction = prediction
    _keep(lesson, progress)


def keep_done(lesson: Lesson, done: bool) -> None:
    """Keep whether all of a lesson was right when it was last checked."""
    progress = progress_of(lesson)
    progress.done = done
    _keep(lesson, progress)


def keep_hints(lesson: Lesson, number: int) -> None:
    """Keep which hint was shown last."""
    progress = progress_of(lesson)
    progress.hints = number
    _keep(lesson, progress)


def _keep(lesson: Lesson, progress: LessonProgress) -> None:
    everything = read_progress()
    everything[lesson.name] = progress
    FOLDER.mkdir(exist_ok=True)
    write_json(_FILE, msgspec.to_builtins(everything), Progress)
