"""Lesson 8: a clock around steps, and the interval of a median."""

import numpy as np

from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

WARM_UP = 3
STEPS = 40
TRIES = 2000


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


def _measure(student: Namespace) -> tuple[list[float], int, float]:
    """Return the durations of a known step, its calls, and the share of right intervals."""
    seconds, calls = _time_steps(student)
    return seconds, calls, _covered(student)


def _time_steps(student: Namespace) -> tuple[list[float], int]:
    """Return the durations of a step on a clock of its own, and its calls."""
    now = 0.0
    calls = 0

    def step() -> None:
        nonlocal now, calls
        now += 9.0 if calls < WARM_UP else 1.0
        calls += 1

    seconds = student["time_steps"](step, warmup=WARM_UP, steps=STEPS, clock=lambda: now)
    return seconds, calls


def _covered(student: Namespace) -> float:
    """Return the share of intervals that hold the true median."""
    draws = np.random.default_rng(0).exponential(1 / np.log(2), (TRIES, STEPS))  # median 1
    hits = 0
    for draw in draws.tolist():
        low, _, high = student["median_interval"](draw)
        if low <= 1 <= high:
            hits += 1
    return hits / TRIES
