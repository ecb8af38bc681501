"""``lab learn``: list the lessons, write a lesson's skeleton, keep a prediction, check the file."""

import argparse
import shutil

from common.errors import UserError
from lab.flags import add_command, refuse
from lab.learn.checking import check_apart, watch
from lab.learn.course import FOLDER, LESSONS, Lesson
from lab.learn.progress import keep, read_progress
from lab.terminal import say


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
    if args.lesson is None:
        refuse(
            {
                "which lesson? Give its number, e.g. lab learn 3 --check": bool(
                    args.predict or args.check or args.watch
                )
            }
        )
        return _list_lessons()
    lesson = next((one for one in LESSONS if one.number == args.lesson), None)
    if lesson is None:
        raise UserError(f"lesson {args.lesson}: there are lessons 1 to {LESSONS[-1].number}")
    if args.predict is not None:
        keep(lesson, {"prediction": lesson.question.parse(args.predict)})
        say(f"Kept: {args.predict}. A check compares it with formula and measurement.")
        return 0
    if not (args.check or args.watch):
        return _begin(lesson)
    refuse(
        {f"{lesson.file} is missing: lab learn {args.lesson} writes it": not lesson.file.exists()}
    )
    return watch(lesson) if args.watch else check_apart(lesson)


def _list_lessons() -> int:
    """List the lessons; the first that is not done is next."""
    done = [lesson for lesson in LESSONS if read_progress().get(lesson.name, {}).get("done")]
    following = next((lesson for lesson in LESSONS if lesson not in done), None)
    for one in LESSONS:
        state = "done" if one in done else "next" if one is following else ""
        say(f"{one.number:>3}  {one.title:<24}{one.minutes:>3} min  {state}".rstrip())
    return 0


def _begin(lesson: Lesson) -> int:
    """Write the skeleton, unless the file is there, and say what to do with it."""
    if lesson.file.exists():
        say(f"{lesson.file} is there already, and stays as it is.")
    else:
        FOLDER.mkdir(exist_ok=True)
        shutil.copyfile(lesson.skeleton, lesson.file)
        say(f"Wrote {lesson.file}.")
    say(
        f"Its page: {lesson.page}\n\n{lesson.question.text}\n\n"
        f"lab learn {lesson.number} --predict ANSWER   keeps what you expect\n"
        f"lab learn {lesson.number} --check            checks the file (--watch: at each save)"
    )
    return 0
