"""The table of lessons: what each asks, what the answers are and why, and what checks the code.

Imports no torch. The text of an exercise is on the lesson's page and in its skeleton.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.utils.paths import IN_CHECKOUT, REPOSITORY

FOLDER = Path("learn")
"""The student's folder: a file for each lesson, and progress.json."""


@dataclass(frozen=True)
class Exercise:
    """A question whose answer is a number or a word.

    why : how the answer follows; shown with a right answer.
    hint : shown with a wrong one.
    tolerance : the largest relative difference of a right number.
    """

    answer: float | str
    why: str
    hint: str
    tolerance: float = 0.02

    def accepts(self, given: object) -> bool:
        """Whether this is the answer; upper and lower case of a word do not matter."""
        if isinstance(self.answer, str):
            return str(given).casefold() == self.answer
        return isinstance(given, int | float) and math.isclose(
            given, self.answer, rel_tol=self.tolerance
        )


@dataclass(frozen=True)
class Question:
    """What a student predicts before anything runs.

    formula : in words, what the answer follows from.
    """

    text: str
    answer: float
    formula: str
    unit: str

    def parse(self, text: str) -> float:
        """Return a prediction such as "1.8s", "1.8 s" or "1.8". Raises UserError."""
        try:
            return float(text.removesuffix(self.unit))
        except ValueError as error:
            example = f"{2 * self.answer:.2g}{self.unit}"
            raise UserError(
                f"--predict: got {text!r}, give a number in {self.unit}, e.g. {example}"
            ) from error

    def compare(self, prediction: float | None, measured: float | None) -> str:
        """Return the student's prediction, the formula's, and what was measured, if anything."""
        values = {"you": prediction, "formula": self.answer, "measured": measured}
        told = [f"{who} {value:.3g} {self.unit}" for who, value in values.items() if value]
        return f"Prediction: {', '.join(told)}. The formula: {self.formula}"


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
    exercises: Mapping[str, Exercise]

    @property
    def name(self) -> str:
        """The name of its page, its skeleton and its pictures, without suffix."""
        return f"{self.number:02}_{self.slug}"

    @property
    def skeleton(self) -> Path:
        """The file with blanks that the student gets."""
        return Path(__file__).with_name("skeletons") / f"{self.name}.py"

    @property
    def file(self) -> Path:
        """The student's own file."""
        return FOLDER / f"{self.name}.py"

    @property
    def page(self) -> str:
        """The path of its page from here, or in the project if this is no checkout."""
        page = f"docs/learn/{self.name}.md"
        return os.path.relpath(REPOSITORY / page) if IN_CHECKOUT else page


LESSONS: Sequence[Lesson] = (
    Lesson(
        1,
        "one_process",
        "One process",
        20,
        "lab.learn.lessons.one_process:check",
        Question(
            "A step computes the loss (forward) and then all gradients (backward). How many "
            "times as long as forward does backward take?",
            2,
            "each layer takes one matrix product forward and two backward, for its weights and for "
            "its input",
            "times",
        ),
        {
            "a": Exercise(
                1.204,
                "64 x 512 + 512 + 512 x 512 + 512 + 512 x 10 + 10 = 301,066 numbers of 4 bytes",
                "count weights and biases of each layer; a float32 has 4 bytes",
            ),
            "b": Exercise(
                29,
                "1,797 / 64 = 28.08, and the last 5 samples are a batch, too",
                "do not drop the last batch",
            ),
            "c": Exercise(
                1.89,
                "(2 x 300,032 - 64 x 512) / 300,032",
                "a layer's product multiplies as often as it has weights; biases only add",
                tolerance=0.004,
            ),
        },
    ),
    Lesson(
        2,
        "two_ranks",
        "Two silent ranks",
        25,
        "lab.learn.lessons.two_ranks:check",
        Question(
            "2 ranks share the samples in halves, anew in each epoch. After 3 epochs, what "
            "percentage of all samples has rank 0 seen at least once?",
            87.5,
            "a sample goes to rank 0 with probability 1/2 in each epoch: 1 - 1/2^3",
            "%",
        ),
        {
            "a": Exercise(
                "nothing",
                "so each rank trains a model of its own, and its loss falls all the same",
                "one word, from the first line that the audit prints",
            ),
            "b": Exercise(3, "5 x 360 - 1,797", "each rank takes 1,797 / 5, rounded up"),
            "c": Exercise(320, "5 x 64", "every rank takes 64"),
        },
    ),
    Lesson(
        3,
        "gather_scatter",
        "Gather and scatter",
        25,
        "lab.learn.lessons.averaging:check_gather_scatter",
        Question(
            "5 ranks average a gradient through rank 0. How many times its size passes "
            "rank 0's link in one step, in and out together?",
            8,
            "rank 0 receives N-1 gradients and sends N-1 means: 2(N-1) = 2 x 4",
            "times",
        ),
        {
            "a": Exercise(
                1.5,
                "the sum is 3 times the mean, and half of it is left",
                "what is 3 ranks' sum, in means?",
            ),
            "b": Exercise(
                147.68,
                "2(N-1)M = 2 x 2 x 36.92 MB",
                "rank 0 receives from 2 ranks and sends to 2 ranks",
            ),
            "c": Exercise(
                68, "two for each of 34 tensors", "a gather and a scatter for each tensor"
            ),
        },
    ),
    Lesson(
        4,
        "root_link",
        "The root's link",
        25,
        "lab.learn.lessons.root_link:check",
        Question(
            "4 nodes average VGG-11's gradients (36.92 MB) through rank 0, over links of "
            "1 Gbit/s. How long does a step's exchange take?",
            1.772,
            "2(N-1)M/B = 2 x 3 x 36.92 MB x 8 bit / 1,000 Mbit/s",
            "s",
        ),
        {
            "a": Exercise(4.135, "2 x 7 x 0.2954 s", "only N-1 changes: 7 in place of 3"),
            "b": Exercise(
                2.333,
                "7/3 of the data in the same time",
                "the rate must grow as N-1 does",
            ),
            "c": Exercise(
                0.312,
                "0.6 / (0.6 / 4 + 1.772): three times as slow as one node",
                "a step takes 0.6 s / 4 and then the exchange",
            ),
        },
    ),
    Lesson(
        5,
        "ring",
        "The ring",
        35,
        "lab.learn.lessons.averaging:check_ring",
        Question(
            "5 ranks average a gradient in a ring, cut into 5 chunks. How many times the "
            "gradient's size does one rank send?",
            1.6,
            "2(N-1) rounds of one chunk, M/N: 2(N-1)/N = 8/5",
            "times",
        ),
        {
            "a": Exercise(8, "2(N-1): 4 rounds that add, 4 that pass on", "one in each round"),
            "b": Exercise(7, "14 rounds x 0.5 ms", "2(N-1) rounds, each waits for a message"),
            "c": Exercise(
                238, "34 x 14 x 0.5 ms", "34 rings, one after the other, each with 2(N-1) rounds"
            ),
        },
    ),
)
