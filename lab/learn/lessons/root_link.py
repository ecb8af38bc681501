"""Lesson 4: a formula for the time of lesson 3's exchange, against emulated nodes."""

import re

from common.errors import GroupError, UserError
from lab.learn.lessons.nodes import run_on_nodes
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile
from lab.terminal import say as tell

# Nodes, MB and Gbit/s; the first case is measured.
_CASES = ((4, 36.92, 1.0), (2, 36.92, 1.0), (8, 100.0, 1.0), (4, 36.92, 0.2))
# Measured with a right lesson 3 (AMD EPYC, 2 virtual cores, torch 2.14).
RECORDED_SECONDS = 2.386


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 4; return the measured seconds of an exchange."""
    [found] = student.on_ranks(1, _exchange_seconds)
    for (nodes, megabytes, gbit), seconds in zip(_CASES, found, strict=True):
        right = 2 * (nodes - 1) * megabytes * 8 / 1000 / gbit
        if abs(seconds / right - 1) > 0.01:
            raise Mistake(
                f"{nodes} nodes, {megabytes} MB, {gbit} Gbit/s: the formula gives {seconds:.4g} s, "
                f"{seconds / right:.3g} times what rank 0's link needs. Do N-1 gradients come in, "
                "and N-1 means go out? Does a byte have 8 bits, a Gbit 1,000 Mbit?"
            )
    say("the formula is 2(N-1)M/R")
    try:
        printed, *_ = run_on_nodes(student.path, 4, rate="1gbit")
    except (UserError, GroupError) as error:
        tell(f"not measured here, but on another machine: {error}")
        return RECORDED_SECONDS
    measured = re.search(r"measured: (\d+\.\d+) s", printed)
    if measured is None:
        raise Mistake(f"rank 0 printed no measured time, but:\n{printed[-1000:]}")
    return float(measured[1])


def _exchange_seconds(student: Namespace) -> list[float]:
    """Return what the student's formula gives for each case."""
    return [student.call_for_number("exchange_seconds", *case) for case in _CASES]
