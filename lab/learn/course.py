"""The table of lessons: what each asks, what the answers are and why, and what checks the code.

Imports no torch. The text of an exercise is on the lesson's page and in its skeleton.
"""

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import UserError
from common.utils.paths import IN_CHECKOUT, REPOSITORY
from lab.learn.lessons.find_the_bug import BLIND

# The student's folder: a file for each lesson, and progress.json.
FOLDER = Path("learn")


def page_path(name: str) -> str:
    """Return the path of a page from here, or in the project if this is no checkout."""
    page = f"docs/learn/{name}.md"
    if IN_CHECKOUT:
        return os.path.relpath(REPOSITORY / page)
    return page


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
    left_out : why a measurement differs from it; "" if it hardly does.
    differs : which measurements that explains, e.g. those that are "more" than the formula.
    """

    text: str
    answer: float
    formula: str
    unit: str
    left_out: str = ""
    differs: Literal["less", "more", "either"] = "either"

    def parse(self, text: str) -> float:
        """Return a prediction such as "1.8s", "1.8 s" or "1.8". Raises UserError."""
        try:
            return float(text.removesuffix(self.unit))
        except ValueError as error:
            form = f"a number ({self.unit})" if self.unit else "a number"
            raise UserError(f"--predict: got {text!r}, give {form} in place of ANSWER") from error

    def compare(self, prediction: float | None, measured: float | None) -> str:
        """Return the student's prediction, the formula's, and what was measured, if anything."""
        values = {"you": prediction, "formula": self.answer, "measured": measured}
        told = [
            f"{who} {value:.3g} {self.unit}".rstrip()
            for who, value in values.items()
            if value is not None
        ]
        sentences = [f"Prediction: {', '.join(told)}.", f"The formula: {self.formula}."]
        if measured is not None and self._explains(measured):
            sentences.append(f"Why the measurement differs: {self.left_out}.")
        return " ".join(sentences)

    def _explains(self, measured: float) -> bool:
        """Return whether ``left_out`` is why this was measured."""
        side = "more" if measured > self.answer else "less"
        return bool(self.left_out) and self.differs in (side, "either")


@dataclass(frozen=True)
class Lesson:
    """A lesson.

    minutes : what a student needs, reading included.
    check : "module:function" of ``check(student, say)``, see checking.py.
    exercises : by the names under which ``ANSWERS`` in the student's file holds the answers.
    uses : the lesson whose file this one's program loads; None if it stands alone.
    later : functions of a second step, which may have blanks while the first is checked.
    faults : which it explains, by the audit's names.
    """

    number: int
    slug: str
    title: str
    minutes: int
    check: str
    question: Question
    exercises: Mapping[str, Exercise]
    uses: int | None = None
    later: Sequence[str] = ()
    faults: Sequence[str] = ()

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
        """The path of its page, see ``page_path``."""
        return page_path(self.name)

    def hints(self) -> list[str]:
        """Return its hints, three for each step, from a question to the line."""
        text = Path(__file__).with_name("hints.toml").read_text(encoding="utf-8")
        return tomllib.loads(text)[str(self.number)]["hints"]


def _blind_scripts() -> dict[str, Exercise]:
    """Return an exercise for each script of lesson 9: the name of its fault."""
    names = ", ".join(sorted(BLIND.values()))
    exercises: dict[str, Exercise] = {}
    for number, (script, finding) in enumerate(BLIND.items(), 1):
        file = f"{number:02}"
        exercises[file] = Exercise(
            finding,
            f"the audit's case {script}",
            f"if it is one of {names}, let the audit look: lab audit -- python "
            f"learn/blind/{file}.py --port {{port}} --num-nodes {{nodes}} --rank {{rank}}",
        )
    return exercises


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
            left_out="the first layer needs no gradient of its input, and not all work is products",
            differs="less",
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
                "to two decimals: a layer's product multiplies as often as it has weights, and "
                "biases only add",
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
            left_out="the formula is an expectation, your order one draw",
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
        faults=(
            "group-unused",
            "different-start",
            "same-samples",
            "uneven-coverage",
            "same-order",
            "different-batch-counts",
            "weights-diverge",
            "different-learning-rates",
            "different-optimizer-state",
            "wrong-global-batch",
        ),
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
        faults=(
            "sum-not-mean",
            "literal-divisor",
            "averaged-twice",
            "scaled-in-loss",
            "own-gradient",
            "not-the-mean",
            "some-parameters",
            "group-divisor",
            "inside-groups",
            "one-group",
            "unequal-groups",
            "weights-averaged",
        ),
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
            "2(N-1)M/R = 2 x 3 x 36.92 MB x 8 bit / 1,000 Mbit/s",
            "s",
            left_out="headers add 4 to 6 %, and copying in and out of the kernel takes time, too",
            differs="more",
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
        uses=3,
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
        uses=3,
    ),
    Lesson(
        6,
        "overlap",
        "Overlap",
        35,
        "lab.learn.lessons.overlap:check",
        Question(
            "4 nodes all-reduce 36.8 MB in one bucket, over links of 1 Gbit/s, in a ring. How many "
            "seconds does a step wait after backward has ended?",
            0.442,
            "2(N-1)/N x 36.8 MB x 8 bits / 1,000 Mbit/s; one bucket is complete when backward ends",
            "s",
            left_out="headers, latency, adding, and few cores for four nodes",
            differs="more",
        ),
        {
            "a": Exercise(
                8.6,
                "4.7 + 2.4 + 1.2 + 0.3 MB; it is complete with the first layer's gradient",
                "fill buckets from the last layer to the first; one above 9 MB has its own",
            ),
            "b": Exercise(
                0.352,
                "0.442 s of messages, of which 0.09 s lie under backward",
                "the link works all the time once the first bucket has left",
            ),
            "c": Exercise(
                "later",
                "messages share the link, so the small one finishes first",
                "Gloo works on both at once: who has less to send?",
            ),
        },
        faults=("ddp-bypassed", "stale-gradient", "needless-communication"),
    ),
    Lesson(
        7,
        "batchnorm",
        "BatchNorm",
        50,
        "lab.learn.lessons.batchnorm:check",
        Question(
            "BatchNorm subtracts a batch's mean and divides by its standard deviation. In the "
            "batch 1, 3, 5, 11, one process turns the 3 into -0.53. Of two ranks, the first has 1 "
            "and 3. What does it make of the 3?",
            1,
            "(3 - 2) / 1: the mean of 1 and 3 is 2, their standard deviation is 1",
            "",
        ),
        {
            "a": Exercise(-1.069, "(1 - 5) / sqrt(14)", "mean 5, variance (16 + 4 + 0 + 36) / 4"),
            "b": Exercise(1, "(11 - 8) / 3", "its rank knows 5 and 11 alone"),
            "c": Exercise(
                "shards",
                "each rank normalises by its own shard, and so must the one process",
                "which of the two agreed with 4 ranks to 1e-15?",
            ),
            "d": Exercise(
                0.0477,
                "1/sqrt(14) x (0 - 1/4 - 1.604 x (-1.069)/4): dL/dy of the 11 is 0, "
                "but it moves mean and deviation",
                "z is -1.069 for the 1 and 1.604 for the 11, so sum(g) is 1 and sum(g z) is -1.069",
            ),
            "e": Exercise(
                19.2,
                "8 layers x 2 messages x 6 rounds x 0.2 ms: it is all latency",
                "each layer sends one message in forward and one in backward, and waits for both",
            ),
        },
        later=("moments_over_ranks", "gradients_over_ranks"),
    ),
    Lesson(
        8,
        "measuring",
        "Measuring",
        25,
        "lab.learn.lessons.measuring:check",
        Question(
            "A step takes 0.715 s, of which 0.544 s are exposed communication. The network becomes "
            "10 times as fast, in bandwidth and in latency. How many seconds does a step take?",
            0.225,
            "0.171 s of computing stay, and 0.0544 s of communication",
            "s",
        ),
        {
            "a": Exercise(
                2.95,
                "1.5 x 36.92 MB x 8 / 0.15 s: copying in memory is slower than many networks",
                "bits over each link, divided by the seconds",
            ),
            "b": Exercise(
                0.888,
                "1.96 x sqrt(2) x sqrt(0.116 x 0.884 / 10,000), times 100",
                "p = 0.116 and n = 10,000; a share of 0.01 is one point",
            ),
            "c": Exercise(1.053, "1 / 0.95", "0.95 of the step stay", tolerance=0.005),
        },
        faults=("clock-first-iteration", "clock-before-update", "clock-wrong-divisor"),
    ),
    Lesson(
        9,
        "find_the_bug",
        "Find the bug",
        60,
        "lab.learn.lessons.find_the_bug:check",
        Question(
            "Twelve scripts train on three ranks, each with one fault. In how many does the test "
            "loss fall within 20 steps?",
            12,
            "all: what is wrong is still more or less downhill",
            "scripts",
        ),
        _blind_scripts()
        | {
            "a": Exercise(
                2, "a sum divided by 2 is the mean on 2 ranks", "what does it divide by?"
            ),
            "b": Exercise(
                4,
                "01, 07, 08 and 10; in 09 the weights have been averaged by then",
                "at the step's end: where each rank has its own gradient, or its own start",
            ),
            "c": Exercise(2, "3 and 6", "look for: only the first number"),
        },
        faults=("clipped-before-averaging", "value-clipped-before-averaging"),
    ),
    Lesson(
        10,
        "break_it",
        "Break it",
        30,
        "lab.learn.lessons.break_it:check",
        Question(
            "3 nodes all-reduce in a ring over links of 200 Mbit/s. One node's link falls to 40. "
            "How many times as long does the exchange take?",
            5,
            "200 / 40: every chunk passes every link, so the slowest sets the pace",
            "times",
            left_out="noise, and the time before is the median of three steps",
        ),
        {
            "a": Exercise(
                "at once",
                "the kernel closes a dead process's connections, and its neighbours notice",
                "look at the times: does the limit of some seconds pass?",
            ),
            "b": Exercise(
                "limit",
                "a stopped process keeps its connections: only the limit tells it from a slow one",
                "nothing closes the connections of a stopped process",
            ),
            "c": Exercise(
                "no",
                "in a ring all wait for the slowest, so all sync times grow alike",
                "compare the means of ten steps: does the order stay from run to run?",
            ),
        },
        faults=("collectives-differ",),
    ),
    Lesson(
        11,
        "ddp",
        "Built-in DDP",
        30,
        "lab.learn.lessons.ddp:check",
        Question(
            "DDP collects VGG-11's gradients from the last layer to the first. It sends the first "
            "bucket once it holds 1 MB, each later one once it holds 25 MB, and at the end what is "
            "left. How many messages does a step send?",
            3,
            "9.5 MB, then 27.2 MB, and 0.3 MB are left",
            "messages",
        ),
        {
            "a": Exercise(
                9.5,
                "the last layer's 0.02 MB do not fill it, and the layer before brings 9.44 MB",
                "the second-last weight alone is larger than 1 MB, and a tensor is not cut",
            ),
            "b": Exercise(
                221.5,
                "4 x 2(N-1)/N x 36.92 MB: four messages where one is enough",
                "each micro-batch sends 2(N-1)/N of the gradients",
            ),
            "c": Exercise(
                "module",
                "the network is DDP's attribute `module`, so its names begin with module.",
                "print list(model.state_dict()) in train",
            ),
        },
    ),
)
