"""``lab learn``: list the lessons, write a lesson's skeleton, keep a prediction, check the file."""

import argparse
import shutil

from common.errors import UserError
from lab.flags import add_command, refuse
from lab.learn.course import LESSONS, Lesson
from lab.learn.progress import FOLDER, file_of, keep, read_progress
from lab.processes.prefixed_output import say


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab learn``."""
    parser = add_command(
        commands,
        "learn",
        run=main_learn,
        help="learn data-parallel training in ten lessons that check themselves; without a number "
        "it lists the lessons, with one it writes the lesson's skeleton into learn/. Exit status "
        "of --check: 0 right, 1 wrong, 3 not yet done",
    )
    parser.add_argument("lesson", type=int, nargs="?", help="number of a lesson")
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--predict",
        metavar="ANSWER",
        help="keep your answer to the lesson's question, e.g. 1.8s; --check compares it",
    )
    one.add_argument("--check", action="store_true", help="check your file of the lesson")
    one.add_argument(
        "--watch", action="store_true", help="check your file now, and again whenever you save it"
    )


def main_learn(args: argparse.Namespace) -> int:
    """Do what the flags ask for and return the exit status. Raises UserError on wrong input."""
    lessons = {lesson.number: lesson for lesson in LESSONS}
    acts = args.predict is not None or args.check or args.watch
    refuse(
        {
            "which lesson? Give its number, e.g. lab learn 3 --check": acts and not args.lesson,
            f"lesson {args.lesson}: there are lessons 1 to {max(lessons)}": args.lesson is not None
            and args.lesson not in lessons,
        }
    )
    if args.lesson is None:
        return _list_lessons()
    lesson = lessons[args.lesson]
    if args.predict is not None:
        value = lesson.question.parse(args.predict)
        keep(lesson.number, {"prediction": value})
        say(f"Kept: {lesson.question.shown(value)}. --check compares it afterwards.")
        return 0
    if not acts:
        return _begin(lesson)
    if not file_of(lesson).exists():
        raise UserError(f"{file_of(lesson)} is missing: lab learn {lesson.number} writes it")
    from lab.learn.checking import check_apart, watch

    return watch(lesson) if args.watch else check_apart(lesson)


def _list_lessons() -> int:
    progress = read_progress()
    following = next(
        (one for one in LESSONS if not progress.get(str(one.number), {}).get("done")), None
    )
    for one in LESSONS:
        state = "next" if one is following else ""
        if progress.get(str(one.number), {}).get("done"):
            state = "done"
        say(f"{one.number:>3}  {one.title:<24}{one.minutes:>3} min  {state}".rstrip())
    if following:
        say(f"\nGo on with: lab learn {following.number}")
    return 0


def _begin(lesson: Lesson) -> int:
    """Write the skeleton, unless the file is there, and say what to do with it."""
    FOLDER.mkdir(exist_ok=True)
    path = file_of(lesson)
    if path.exists():
        say(f"{path} is there already, and stays as it is.")
    else:
        shutil.copyfile(lesson.skeleton, path)
        say(f"Wrote {path}.")
    say(
        f"Read {lesson.page}\n\n{lesson.question.text}\n\n"
        f"lab learn {lesson.number} --predict ANSWER   keeps your answer\n"
        f"lab learn {lesson.number} --check            checks your file; --watch at each save"
    )
    return 0
