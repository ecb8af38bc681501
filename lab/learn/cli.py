"""``lab learn``: list the lessons, write a lesson's skeleton, keep a prediction, check the file.

It also shows a lesson's hints and a solution beside the student's file, and writes the assignment's
program with blanks.
"""

import argparse
import shlex
import shutil
from pathlib import Path

from common.errors import UserError
from lab.flags import add_command
from lab.learn.checking import NOT_YET, check_apart, comes_first, watch
from lab.learn.course import FOLDER, LESSONS, Lesson, page_path
from lab.learn.progress import keep, progress_of
from lab.learn.solutions import beside
from lab.terminal import say

STARTER = Path(__file__).parent / "starter"


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab learn``."""
    parser = add_command(
        commands,
        "learn",
        run=main_learn,
        help="learn data-parallel training in eleven lessons that check themselves; without a "
        "number it lists the lessons, with one it writes the lesson's skeleton into learn/. Exit "
        "status of --check: 0 right, 1 wrong, 3 not yet done",
    )
    parser.add_argument("lesson", type=int, nargs="?", help="number of a lesson")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--predict",
        metavar="ANSWER",
        help="keep your answer to the lesson's question, a number; --check compares it",
    )
    action.add_argument("--check", action="store_true", help="check your file of the lesson")
    parser.add_argument(
        "--without-prediction",
        action="store_true",
        help="check although you have not answered the lesson's question",
    )
    action.add_argument(
        "--watch", action="store_true", help="check your file now, and again whenever you save it"
    )
    action.add_argument(
        "--hint",
        type=int,
        metavar="NUMBER",
        nargs="?",
        const=0,
        help="show the next hint (three for each step, from a question to the line); or the one of "
        "this number",
    )
    action.add_argument(
        "--solution",
        action="store_true",
        help="show how your file differs from a solution; after a check in which all was right, or "
        "with --give-up",
    )
    action.add_argument(
        "--starter",
        type=Path,
        metavar="DIR",
        help="write the assignment's program into DIR: VGG-11 on CIFAR-10, with the two averages "
        "and DistributedDataParallel left for you to write",
    )
    parser.add_argument(
        "--give-up", action="store_true", help="show the solution of a lesson that is not done"
    )


def main_learn(args: argparse.Namespace) -> int:
    """Do what the flags ask for and return the exit status. Raises UserError on wrong input."""
    if args.starter is not None:
        return _begin_program(args.starter)
    if args.lesson is None:
        chosen = (args.predict, args.check, args.watch, args.hint, args.solution, args.give_up)
        if any(value not in (None, False) for value in chosen):
            raise UserError("which lesson? Give its number, e.g. lab learn 3 --check")
        return _list_lessons()
    lesson = _lesson(args.lesson)
    if args.check or args.watch:
        return _check(lesson, again=args.watch, predicted=not args.without_prediction)
    if args.predict is not None:
        keep(lesson, prediction=lesson.question.parse(args.predict))
        say(f"Kept: {args.predict}. A check compares it with formula and measurement.")
        return 0
    if args.hint is not None:
        return _hint(lesson, args.hint)
    if args.solution or args.give_up:
        return _solution(lesson, give_up=args.give_up)
    return _begin(lesson)


def _check(lesson: Lesson, *, again: bool, predicted: bool) -> int:
    """Check the student's file, with ``again`` at each save. Raises UserError if there is none.

    predicted : nothing is checked before the student has answered the lesson's question.
    """
    if not lesson.file.exists():
        raise UserError(f"{lesson.file} is missing: lab learn {lesson.number} writes it")
    if predicted and progress_of(lesson).prediction is None:
        say(
            f"not yet: first answer the lesson's question, lab learn {lesson.number} --predict "
            f"ANSWER (or add --without-prediction). {lesson.question.text}"
        )
        return NOT_YET
    if again:
        return watch(lesson)
    return check_apart(lesson)  # in a process of its own


def _hint(lesson: Lesson, number: int) -> int:
    """Show a hint; 0: the next one, after the last one the last again. Raises UserError."""
    hints = lesson.hints()
    if not 0 <= number <= len(hints):
        raise UserError(f"--hint: got {number}, lesson {lesson.number} has hints 1 to {len(hints)}")
    number = number or min(progress_of(lesson).hints + 1, len(hints))
    keep(lesson, hints=number)
    say(f"Hint {number} of {len(hints)}: {hints[number - 1]}")
    if number == len(hints):
        say(f"That was the last one. The solution: lab learn {lesson.number} --give-up")
    return 0


def _solution(lesson: Lesson, *, give_up: bool) -> int:
    """Show how the student's file differs from a solution. Raises UserError before it is right."""
    if not (give_up or progress_of(lesson).done):
        raise UserError(
            f"lesson {lesson.number} is not done yet. Check it with lab learn {lesson.number} "
            f"--check, ask for a hint with --hint, or add --give-up to see the solution"
        )
    own = ""
    if lesson.file.exists():
        own = lesson.file.read_text(encoding="utf-8")
    differences = beside(own, lesson)
    if not differences:
        say(f"{lesson.file} is this solution, word for word.")
        return 0
    say(f"Lines with - are yours, lines with + a solution. Others are right, too.\n\n{differences}")
    return 0


def _lesson(number: int) -> Lesson:
    """Return a lesson. Raises UserError if there is none of this number."""
    for lesson in LESSONS:
        if lesson.number == number:
            return lesson
    raise UserError(f"lesson {number}: there are lessons 1 to {LESSONS[-1].number}")


def _list_lessons() -> int:
    """List the lessons; the first that is not done is next."""
    next_is_listed = False
    for lesson in LESSONS:
        state = ""
        if progress_of(lesson).done:
            state = "done"
        elif not next_is_listed:
            state = "next"
            next_is_listed = True
        line = f"{lesson.number:>3}  {lesson.title:<24}{lesson.minutes:>3} min  {state}"
        say(line.rstrip())
    say(f"\nFrom the lessons to a program of your own: {page_path('your_own_program')}")
    return 0


def _begin_program(folder: Path) -> int:
    """Write the assignment's program, with blanks, into a folder. UserError if one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in STARTER.glob("*.py"):
        if (folder / file.name).exists():
            raise UserError(f"{folder / file.name} is there already: give --starter a new folder")
    for file in STARTER.glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    main = shlex.quote(str(folder / "main.py"))
    command = (
        f"python {main} --sync all_reduce --dataset digits --steps 6 --batch-size 24 --master-ip "
        "{master} --master-port {port} --num-nodes {nodes} --rank {rank}"
    )
    say(
        f"Wrote {folder}/main.py and {folder}/model.py. Write the three functions at the top of "
        "main.py; its first lines say how to start it. Then check each way, here all_reduce:\n\n"
        f"lab audit -- {command}"
    )
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
        f"lab learn {lesson.number} --check            checks the file (--watch: at each save)\n"
        f"lab learn {lesson.number} --hint             shows a hint, each time one more of "
        f"{len(lesson.hints())}"
    )
    first = comes_first(lesson)
    if first is not None:
        say(f"\n{first}")
    return 0
