"""Lesson 8: a clock around steps, and the interval of a median."""

from typing import Any, NamedTuple

import numpy as np

from lab.learn.student_file import Mistake, Namespace, Say, StudentFile, shown, shown_call

WARM_UP = 3
STEPS = 40
TRIES = 2000
_PLACES = (13, 27)  # of 40 sorted values, the interval's ends


def check(student: StudentFile, say: Say) -> None:
    """Check lesson 8 with a step whose times are known, and many measurements of such steps."""
    [found] = student.on_ranks(1, _measure)
    if found.seconds != [1.0] * STEPS or found.calls != WARM_UP + STEPS:
        raise Mistake(
            f"the step takes 9 s in its first {WARM_UP} calls, then 1 s. After {WARM_UP} to warm "
            f"up, {STEPS} steps must give 1.0 each; time_steps called it {found.calls} times and "
            f"returns {len(found.seconds)} values: {found.seconds[:3]} ... {_why(found)}"
        )
    say(f"each of {STEPS} steps is timed by itself, and the {WARM_UP} to warm up do not count")
    covered = 100 * found.covered
    places = f"Of 40 sorted values, yours are numbers {found.low:g} and {found.high:g}"
    if not 94 < covered < 98.5:
        raise Mistake(
            f"of {TRIES} intervals {covered:.1f} % hold the true median, not 95 to 97 %. {places}: "
            "which ones are number n/2 - 0.98 sqrt(n) and n/2 + 0.98 sqrt(n), counted from 1?"
        )
    if (found.low, found.high) != _PLACES:
        raise Mistake(
            f"{places}, and must be {_PLACES[0]} (13.8, rounded down) and {_PLACES[1]} (26.2, "
            "rounded up)"
        )
    say(f"of {TRIES} intervals {covered:.1f} % hold the true median")


class Measured(NamedTuple):
    """What the student's functions made of known times.

    seconds, calls : the durations of a known step, and how often it was called.
    covered : the share of intervals that hold the true median.
    low, high : the ends of the interval of the numbers 1 to 40.
    """

    seconds: list[Any]
    calls: int
    covered: float
    low: float
    high: float


def _why(found: Measured) -> str:
    """Return which of the usual mistakes gives these durations."""
    if found.calls <= WARM_UP:
        return "Nothing calls step() between the two readings of the clock."
    if found.calls > WARM_UP + STEPS:
        return "Call step() once between the two readings of the clock."
    if found.seconds and set(found.seconds) == {0.0}:
        return "Read the clock again after step(), and take the difference."
    if found.seconds == sorted(set(found.seconds)):
        return "These are readings of the clock: take the difference from `began`."
    return "Take the clock's difference from `began`, right after step()."


def _measure(student: Namespace) -> Measured:
    """Let the student's functions measure what is known."""
    seconds, calls = _time_steps(student)
    low, _, high = _interval(student, [float(number) for number in range(1, STEPS + 1)])
    return Measured(seconds, calls, _covered(student), low, high)


def _interval(student: Namespace, seconds: list[float]) -> tuple[float, float, float]:
    """Return the student's interval. Raises Mistake unless it is three numbers."""
    interval = student["median_interval"](seconds)
    if not isinstance(interval, tuple | list) or len(interval) != 3 or None in interval:
        call = shown_call("median_interval", seconds)
        raise Mistake(f"{call} returns {shown(interval)}, and must return (low, median, high)")
    low, middle, high = interval
    return low, middle, high


def _time_steps(student: Namespace) -> tuple[list[Any], int]:
    """Return the durations of a step on a clock of its own, and its calls."""
    now = 0.0
    calls = 0

    def step() -> None:
        nonlocal now, calls
        now += 9.0 if calls < WARM_UP else 1.0
        calls += 1

    seconds = student["time_steps"](step, warmup=WARM_UP, steps=STEPS, clock=lambda: now)
    if not isinstance(seconds, list):
        raise Mistake(f"time_steps returns {shown(seconds)}, and must return a list of seconds")
    return seconds, calls


def _covered(student: Namespace) -> float:
    """Return the share of intervals that hold the true median."""
    draws = np.random.default_rng(0).exponential(1 / np.log(2), (TRIES, STEPS))  # median 1
    hits = 0
    for draw in draws.tolist():
        low, _, high = _interval(student, draw)
        if low <= 1 <= high:
            hits += 1
    return hits / TRIES
