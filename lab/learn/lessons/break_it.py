"""Lesson 10: a rank of the student's program is killed, stopped, or its link slowed down."""

import re
import time
from functools import partial
from statistics import mean, median
from typing import Any

from common.errors import UserError
from lab.cluster import Cluster
from lab.learn.lessons.nodes import run_on_nodes
from lab.learn.student_file import Mistake, Say, StudentFile

NODES = 3
STEPS = "20"
SLOW_RATE = "40mbit"
# Each fault, the node that has it, and what find_culprit must return.
FAULTS = (("kill", 1, 1), ("pause", 2, 2), ("slow", 1, None))
# Sync times on the slow link over those before (AMD EPYC, 2 virtual cores, torch 2.14).
RECORDED_RATIO = 5.1
_BEGIN_SECONDS = 60.0


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 10; return how many times as long an exchange takes with one slow link."""
    options: dict[str, Any] = {"rate": "200mbit"}
    try:
        Cluster(NODES, **options)
    except UserError as error:
        say(f"no link can be slowed down here ({error}): the ranks run on loopback instead")
        options = {"loopback": True}
    for fault, node, culprit in FAULTS:
        if fault == "slow" and "loopback" in options:
            return RECORDED_RATIO
        disturb = partial(_disturb, fault, node)
        printed = run_on_nodes(student.path, NODES, STEPS, disturb=disturb, **options)
        ends = "\n".join(f"  {text.splitlines()[-1]}" for text in printed)
        [found] = student.on_ranks(1, lambda names, given=printed: names["find_culprit"](given))
        if found != culprit:
            raise Mistake(
                f"{fault} of node {node}: find_culprit returns {found}, and must {culprit}. Does "
                f"a rank wait no longer than the limit? The ranks' last lines:\n{ends}"
            )
        say(f"{fault} of node {node}, find_culprit returns {found}. The last lines:\n{ends}")
    syncs = [_sync_seconds(text) for text in printed]
    means = ", ".join(f"{mean(seconds[-10:]):.3f} s" for seconds in syncs)
    say(f"sync of the last ten steps, mean of each rank (the order changes with the run): {means}")
    rank_0 = syncs[0]
    return median(rank_0[-10:]) / median(rank_0[1:4])


def _sync_seconds(printed: str) -> list[float]:
    """Return the exchange's time in each step, from what a rank printed."""
    return [float(seconds) for seconds in re.findall(r"sync (\d+\.\d+)", printed)]


def _disturb(fault: str, node: int, cluster: Cluster) -> None:
    """Disturb a node as soon as its program has made a few steps."""
    limit = time.monotonic() + _BEGIN_SECONDS
    while "step 5 " not in cluster.output(node):
        if time.monotonic() > limit:
            raise Mistake(f"no rank came to step 5. Rank 0 printed:\n{cluster.output(0)[-300:]}")
        time.sleep(0.05)
    cluster.fault(node, fault, rate=SLOW_RATE if fault == "slow" else None)
