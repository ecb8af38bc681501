"""Write solutions of the lessons, right ones and wrong ones."""

import re

from lab.learn.course import LESSONS
from lab.learn.solutions import SOLUTIONS
from tests.helpers import ROOT, start_lab


def learn(*arguments, cwd):
    """Run ``lab learn`` in a folder and return how it ended."""
    return start_lab("learn", *arguments, cwd=cwd, env={"PYTHONPATH": str(ROOT)}).end()


def solve(number, folder, changes=(), edit=("", "")):
    """Write a solution into ``folder``/learn and return its path.

    ``changes`` are wrong texts by the number of the blank; ``edit`` replaces a text of the rest.
    """
    [lesson] = [one for one in LESSONS if one.number == number]
    texts = dict(enumerate(SOLUTIONS[number])) | dict(changes)
    blanks = iter(texts.values())
    text = re.sub(r"\.\.\.", lambda _: next(blanks), lesson.skeleton.read_text().replace(*edit))
    assert list(blanks) == []
    path = folder / lesson.file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path
