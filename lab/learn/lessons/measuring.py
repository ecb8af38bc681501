"""Lesson 8: a clock around steps, and the interval of a median."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from common.say import listed
from lab.evidence import near
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile, shown, shown_call

WARM_UP = 3
_MORE_WARM_UP = 5
STEPS = 40
TRIES = 2000
# A step's seconds in the calls to warm up, and later: all different, and one ten times as long.
_WARM_UP_SECONDS = 9.0
_SECONDS = [1 + (17 * number % STEPS) / 64 for number in range(STEPS)]
_SECONDS[20] = 10.0
_LENGTHS = (STEPS, 41, 100, 7)  # of lists with a known median


def check(student: StudentFile, say: Say) -> None:
    """Check lesson 8 with a step whose times are known, and many measurements of such steps."""
    [found] = student.on_ranks(1, _measure)
    timed = len(found.seconds) == STEPS and np.allclose(found.seconds, _SECONDS, atol=1e-3)
    if not timed or found.calls != WARM_UP + STEPS:
        raise Mistake(
            f"a step takes 9 s in its first {WARM_UP} calls, then 1 to 2 s, and once 10 s. After "
            f"{WARM_UP} to warm up, time_steps must return what each of {STEPS} steps took. It "
            f"called it {found.calls} times and returns {len(found.seconds)} values: "
            f"{found.seconds[19:22]} as numbers 20 to 22, not {_SECONDS[19:22]}. {_why(found)}"
        )
    if found.more_calls != _MORE_WARM_UP + STEPS:
        raise Mistake(
            f"time_steps(step, warmup={_MORE_WARM_UP}, steps={STEPS}) calls step() "
            f"{found.more_calls} times, and must {_MORE_WARM_UP + STEPS} times: is `warmup` used?"
        )
    say(
        f"each of {STEPS} steps of unequal length is timed by itself, and the {WARM_UP} to warm up "
        "do not count"
    )
    covered = 100 * found.covered
    of_40, *_ = found.intervals
    places = f"Of {STEPS} sorted values, yours are {of_40.places()}"
    if not 94 < covered < 98.5:
        raise Mistake(
            f"of {TRIES} intervals {covered:.1f} % hold the true median, not 95 to 97 %. {places}: "
            "which ones are number n/2 - 0.98 sqrt(n) and n/2 + 0.98 sqrt(n), counted from 1?"
        )
    for interval in found.intervals:
        _check_interval(interval)
    say(
        f"of {TRIES} intervals {covered:.1f} % hold the true median, and of {listed(_LENGTHS)} "
        "values with a long tail the middle is the median"
    )


class Interval(NamedTuple):
    """What median_interval made of the numbers 1 to n, of which the last is ten times as large."""

    n: int
    low: float
    middle: float
    high: float

    def places(self) -> str:
        """Return the places of both ends in the sorted list, such as "numbers 13 and 27"."""
        last = 10.0 * self.n
        ends = [self.n if end == last else end for end in (self.low, self.high)]
        return "numbers " + " and ".join(f"{end:g}" for end in ends)


def _check_interval(found: Interval) -> None:
    """Raise Mistake unless these are the median and its interval."""
    n = found.n
    below = n / 2 - 0.98 * math.sqrt(n)
    above = n / 2 + 0.98 * math.sqrt(n)
    right = (max(1, math.floor(below)), min(n, math.ceil(above)))
    if found.places() != f"numbers {right[0]} and {right[1]}":
        raise Mistake(
            f"Of {n} sorted values, yours are {found.places()}, and must be {right[0]} "
            f"({below:.1f}, rounded down, at least 1) and {right[1]} ({above:.1f}, rounded up, at "
            f"most {n})"
        )
    if not (n + 1) // 2 <= found.middle <= n // 2 + 1:
        mean = (sum(range(n)) + 10 * n) / n
        why = "That is the mean, which one late step moves. " if near(found.middle, mean) else ""
        raise Mistake(
            f"of the numbers 1 to {n - 1} and {10 * n}, the middle is {found.middle:g}, and must "
            f"be {(n + 1) / 2:g}, the median. {why}Half of the sorted values lie below it"
        )


class Measured(NamedTuple):
    """What the student's functions made of known times.

    seconds, calls : the durations of a known step, and how often it was called.
    more_calls : the same with more calls to warm up.
    covered : the share of intervals that hold the true median.
    intervals : of lists whose medians are known, the first of STEPS values.
    """

    seconds: list[Any]
    calls: int
    more_calls: int
    covered: float
    intervals: Sequence[Interval]


def _why(found: Measured) -> str:
    """Return which of the usual mistakes gives these durations."""
    if found.calls <= WARM_UP:
        return "Nothing calls step() between the two readings of the clock."
    if found.calls > WARM_UP + STEPS:
        return "Call step() once between the two readings of the clock."
    if len(found.seconds) != STEPS:
        return "Return one value for each step, in the order of the steps."
    if set(found.seconds) == {0.0}:
        return "Read the clock again after step(), and take the difference."
    if len(set(found.seconds)) == 1:
        return "All are equal: one clock around all steps hides the late one. Time each by itself."
    if found.seconds == sorted(set(found.seconds)):
        return "These are readings of the clock: take the difference from `began`."
    return "Take the clock's difference from `began`, right after step()."


def _measure(student: Namespace) -> Measured:
    """Let the student's functions measure what is known."""
    seconds, calls = _time_steps(student)
    _, more_calls = _time_steps(student, _MORE_WARM_UP)
    intervals = [Interval(n, *_interval(student, _known_values(n))) for n in _LENGTHS]
    return Measured(seconds, calls, more_calls, _covered(student), intervals)


def _known_values(n: int) -> list[float]:
    """Return the numbers 1 to n, the last one times ten, in no order."""
    values = np.arange(1.0, n + 1)
    values[-1] *= 10
    return np.random.default_rng(n).permutation(values).tolist()


def _interval(student: Namespace, seconds: list[float]) -> tuple[float, float, float]:
    """Return the student's interval. Raises Mistake unless it is three numbers."""
    interval = student["median_interval"](seconds)
    if not isinstance(interval, tuple | list) or len(interval) != 3 or None in interval:
        call = shown_call("median_interval", seconds)
        raise Mistake(f"{call} returns {shown(interval)}, and must return (low, median, high)")
    low, middle, high = interval
    return low, middle, high


def _time_steps(student: Namespace, warmup: int = WARM_UP) -> tuple[list[Any], int]:
    """Return the durations of a step on a clock of its own, and its calls."""
    now = 0.0
    calls = 0

    def step() -> None:
        nonlocal now, calls
        now += _WARM_UP_SECONDS if calls < warmup else _SECONDS[(calls - warmup) % STEPS]
        calls += 1

    seconds = student["time_steps"](step, warmup=warmup, steps=STEPS, clock=lambda: now)
    if not isinstance(seconds, list):
        raise Mistake(f"time_steps returns {shown(seconds)}, and must return a list of seconds")
    if not all(isinstance(value, int | float) for value in seconds):
        raise Mistake(f"time_steps returns {shown(seconds)}, and must return numbers, in seconds")
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
