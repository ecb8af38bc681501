"""Lesson 8: a clock around steps, and the interval of a median."""

import itertools
from typing import Any

import numpy as np

from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

WARM_UP, STEPS, TRIES = 3, 40, 2000


def check(student: StudentFile, say: Say) -> None:
    """Check lesson 8 with a step whose times are known, and many measurements of such steps."""
    [(seconds, calls, covered)] = student.on_ranks(1, _measure)
    if seconds != [1.0] * STEPS or calls != WARM_UP + STEPS:
        raise Mistake(
            f"the step takes 9 s in its first {WARM_UP} calls, then 1 s. After {WARM_UP} to warm "
            f"up, {STEPS} steps must give 1.0 each; time_steps called it {calls} times and returns "
            f"{len(seconds)} values: {seconds[:3]} ..."
        )
    say(f"each of {STEPS} steps is timed by itself, and the {WARM_UP} to warm up do not count")
    if not 0.94 < covered < 0.985:
        raise Mistake(
            f"of {TRIES} intervals {100 * covered:.1f} % hold the true median, not 95 to 97 %: "
            "which values are number n/2 - 0.98 sqrt(n) and n/2 + 0.98 sqrt(n), counted from 1?"
        )
    say(f"of {TRIES} intervals {100 * covered:.1f} % hold the true median")


def _measure(student: Namespace) -> Any:
    """Return the durations of a step on a clock of its own, its calls, and the share of hits."""
    moments, calls = [0.0], itertools.count()
    seconds = student["time_steps"](
        lambda: moments.append(moments[-1] + (9.0 if next(calls) < WARM_UP else 1.0)),
        warmup=WARM_UP,
        steps=STEPS,
        clock=lambda: moments[-1],
    )
    draws = np.random.default_rng(0).exponential(1 / np.log(2), (TRIES, STEPS))  # median 1
    hits = [low <= 1 <= high for low, _, high in map(student["median_interval"], draws.tolist())]
    return seconds, next(calls), float(np.mean(hits))
