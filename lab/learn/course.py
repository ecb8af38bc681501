"""The table of lessons: what each asks, what the answers are and why, and what checks the code.

Imports no torch. The text of an exercise is on the lesson's page and in its skeleton.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.utils.paths import IN_CHECKOUT, REPOSITORY

SKELETONS = Path(__file__).with_name("skeletons")
_PREFIXES = {"s": {"us": 1e-6, "ms": 1e-3}, "MB": {"KB": 1e-3, "GB": 1e3}}


@dataclass(frozen=True)
class Exercise:
    """A question whose answer is a number with a unit, or a word.

    why : how the answer follows; shown with a right answer.
    hint : shown with a wrong one.
    tolerance : the largest relative difference of a right number.
    """

    answer: float | str
    why: str
    hint: str = ""
    unit: str = ""
    tolerance: float = 0.02

    def accepts(self, given: object) -> bool:
        """Whether this is the answer; upper and lower case and spaces around a word do not matter.

        Raises TypeError and ValueError if a number is asked for and it is none.
        """
        if isinstance(self.answer, str):
            return str(given).strip().casefold() == self.answer.casefold()
        number = float(given)  # type: ignore[arg-type]  # the caller catches what is no number
        return math.isclose(number, self.answer, rel_tol=self.tolerance, abs_tol=1e-9)


@dataclass(frozen=True)
class Question(Exercise):
    """The question before anything runs; the answer is the formula's. ``text`` asks it."""

    text: str = ""

    def parse(self, text: str) -> float:
        """Return a prediction such as "1.8s", "1800ms" or "1.8". Raises UserError."""
        units = {"": 1.0, self.unit: 1.0, **_PREFIXES.get(self.unit, {})}
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([a-zA-Z%]*)", text.strip())
        if match is None or match[2] not in units:
            raise UserError(f"--predict: got {text!r}, give a number such as 1.5{self.unit}")
        return float(match[1]) * units[match[2]]

    def shown(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{value:.3g} {self.unit}".rstrip()

    def compare(self, prediction: float | None, measured: float | None) -> str:
        """Return the student's prediction beside the formula's and, if there is one, the measured.

        prediction : None if the student has made none.
        """
        own = "you made no prediction" if prediction is None else f"you: {self.shown(prediction)}"
        found = "" if measured is None else f"; measured: {self.shown(measured)}"
        return f"Prediction: {own}; formula: {self.shown(float(self.answer))}, {self.why}{found}"


@dataclass(frozen=True)
class Lesson:
    """A lesson.

    minutes : what a student needs, reading included.
    check : "module:function" of ``check(student, say)``, see checking.py.
    exercises : by the names under which ``ANSWERS`` in the student's file holds the answers.
    """

    number: int
    slug: str
    title: str
    minutes: int
    check: str
    question: Question
    exercises: dict[str, Exercise]

    @property
    def name(self) -> str:
        """The name of its page, its skeleton and its pictures, without suffix."""
        return f"{self.number:02}_{self.slug}"

    @property
    def skeleton(self) -> Path:
        """The file that the student completes."""
        return SKELETONS / f"{self.name}.py"

    @property
    def page(self) -> str:
        """The page: its path, as seen from here if this is a checkout."""
        page = Path(f"docs/learn/{self.name}.md")
        if not IN_CHECKOUT:
            return f"{page} of the project"
        return os.path.relpath(REPOSITORY / page)


LESSONS: Sequence[Lesson] = (
    Lesson(
        3,
        "gather_scatter",
        "Gather and scatter",
        25,
        "lab.learn.lessons.averaging:check_gather_scatter",
        Question(
            8,
            "rank 0 receives N-1 gradients and sends N-1 means: 2(N-1) = 2 x 4",
            unit="times",
            text="5 ranks average a gradient through rank 0. How many times its size passes "
            "rank 0's link in one step, in and out together?",
        ),
        {
            "a": Exercise(
                1.5,
                "the sum is N times the mean, and 3/2 of it is left",
                "what do you get from 3 ranks' sum if you divide it by 2?",
            ),
            "b": Exercise(
                147.7,
                "2(N-1)M = 2 x 2 x 36.92 MB",
                "rank 0 receives from 2 ranks and sends to 2 ranks",
                "MB",
            ),
            "c": Exercise(
                68, "two for each of 34 tensors", "a gather and a scatter for each tensor"
            ),
        },
    ),
)
