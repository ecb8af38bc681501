"""Lesson 4: a formula for the time of lesson 3's exchange, against emulated nodes."""

import math
import time
from contextlib import ExitStack
from unittest.mock import patch

from common.profiling.comm_trace import MessageRecorder
from lab.learn.lessons.averaging import check_function
from lab.learn.lessons.nodes import check_limits, print_seconds
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

# Nodes, MB and Gbit/s; the first case is measured.
_CASES = ((4, 36.92, 1.0), (2, 36.92, 1.0), (8, 100.0, 1.0), (4, 36.92, 0.2))
# Measured with a right lesson 3 (AMD EPYC, 2 virtual cores, torch 2.14).
RECORDED_SECONDS = 2.386
LESSON_3 = "03_gather_scatter.py"
# What is measured by the false clock: 10,000 numbers of 4 bytes, three times.
_SMALL_MB = 0.04
_STEPS = 3


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 4; return the measured seconds of an exchange."""
    [found] = student.on_ranks(1, _exchange_seconds)
    for (nodes, megabytes, gbit), seconds in zip(_CASES, found, strict=True):
        right = 2 * (nodes - 1) * megabytes * 8 / 1000 / gbit
        if abs(seconds / right - 1) > 0.01:
            times = seconds / right
            raise Mistake(
                f"{nodes} nodes, {megabytes} MB, {gbit} Gbit/s: the formula gives {seconds:.4g} s, "
                f"{times:.3g} times what rank 0's link needs. {_why(times, nodes)}"
            )
    say("the formula is 2(N-1)M/R")
    nodes, megabytes, gbit = _CASES[0]
    earlier = StudentFile(student.path.with_name(LESSON_3))
    check_function(earlier, size=nodes)
    timed, _ = student.on_ranks(2, _measure_by_false_clock)
    if abs(timed - 1) > 0.01:
        raise Mistake(
            f"by a clock on which a gather of the whole gradient takes 1 s, and nothing else any "
            f"time, measure({_SMALL_MB}, {_STEPS}) returns {timed:.3g} s, and must return 1 s: the "
            f"mean of {_STEPS} exchanges, without a first one"
        )
    say(
        f"on {nodes} ranks your lesson 3 sends each gradient through rank 0, and measure() times "
        f"{_STEPS} exchanges without the first one"
    )
    printed = print_seconds(student, r"measured: (\d+\.\d+) s")
    if not printed.emulated:
        return RECORDED_SECONDS
    seconds = printed.seconds[0]
    right = 2 * (nodes - 1) * megabytes * 8 / 1000 / gbit
    check_limits(printed.text, seconds, link_seconds=right, what="an exchange")
    say(f"on {nodes} nodes at {gbit:g} Gbit/s an exchange takes {seconds:.3f} s")
    return seconds


def _measure_by_false_clock(student: Namespace) -> float:
    """Return the student's measurement by a clock that only gathers move."""
    recorder = MessageRecorder()

    def gathered() -> float:
        sizes = [message.bytes for message in recorder.messages if message.kind == "gather"]
        return sum(sizes) / (1e6 * _SMALL_MB)

    with ExitStack() as stack:
        for clock in ("perf_counter", "monotonic", "time"):
            stack.enter_context(patch.object(time, clock, gathered))
        stack.enter_context(recorder)
        return float(student["measure"](_SMALL_MB, _STEPS))


def _why(times: float, nodes: int) -> str:
    """Return which of the usual mistakes makes the formula this many times as large."""
    causes = {
        1 / 8: "Bytes are taken for bits: a byte has 8.",
        1 / 64: "Multiply the bytes by 8 to get bits, do not divide.",
        1 / 2: "That is one direction: N-1 gradients come in, then N-1 means go out.",
        nodes / (nodes - 1): "Rank 0 sends nothing to itself: N-1, not N.",
        nodes / (nodes - 1) / 2: "That is N gradients: N-1 come in, and N-1 means go out.",
        1 / nodes: "That is a ring's time (lesson 5): here all bytes pass one link.",
        1 / (nodes - 1): "That is one other rank: rank 0 exchanges with N-1 of them.",
        1e3: "A Gbit has 1,000 Mbit.",
        1e-3: "A Gbit has 1,000 Mbit.",
    }
    for ratio, cause in causes.items():
        if math.isclose(times, ratio, rel_tol=0.01):
            return cause
    return "2(N-1) gradients pass the link, of 8 bits a byte, and a Gbit has 1,000 Mbit."


def _exchange_seconds(student: Namespace) -> list[float]:
    """Return what the student's formula gives for each case."""
    return [student.call_for_number("exchange_seconds", *case) for case in _CASES]
