"""Lesson 10: a rank of the student's program is killed, stopped, or its link slowed down."""

import re
import runpy
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import Mock, patch

import torch.distributed as dist

from common.errors import UserError
from lab.cluster import Cluster
from lab.learn.lessons.nodes import run_on_nodes
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

NODES = 3
STEPS = "20"
SLOW_RATE = "40mbit"
# Each fault, the node that has it, and what find_culprit must return.
FAULTS = (("kill", 1, 1), ("pause", 2, 2), ("slow", 1, None))
# Sync times on the slow link over those before (AMD EPYC, 2 virtual cores, torch 2.14).
RECORDED_RATIO = 5.1
_SIZES = (NODES, 2, 4)  # of runs whose last lines are known
_BEGIN_SECONDS = 60.0
_LONGEST_LIMIT = 60.0


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 10; return how many times as long an exchange takes with one slow link."""
    student.on_ranks(1, _check_by_hand, student.path)
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
        printed = run_on_nodes(student.path, NODES, [STEPS], disturb=disturb, **options)
        ends = "\n".join(f"  {text.splitlines()[-1]}" for text in printed)
        [found] = student.on_ranks(1, _find_culprit, printed)
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


def _find_culprit(student: Namespace, printed: list[str]) -> Any:
    """Return whom the student's function blames."""
    return student["find_culprit"](printed)


def _check_by_hand(student: Namespace, path: Path) -> None:
    """Check the limit and the culprits that are known, before any rank starts."""
    limit = _limit_seconds(path)
    if limit is None or not 1 <= limit <= _LONGEST_LIMIT:
        found = "none" if limit is None else f"{limit:g} s"
        raise Mistake(
            f"the process group's limit is {found}: give it LIMIT_SECONDS. Without one the ranks "
            "wait for half an hour, and one shorter than a step stops them for nothing"
        )
    steps = "rank {} step 5 sync 0.109 s\n  rank {} step 6 sync 0.112 s"
    gives_up = "rank {} gives up: Connection closed by peer"
    cases = [(size, culprit) for size in _SIZES for culprit in (None, *range(size))]
    for size, culprit in cases:
        lines = [steps if culprit in (None, rank) else gives_up for rank in range(size)]
        printed = [line.replace("{}", str(rank)) for rank, line in enumerate(lines)]
        found = _find_culprit(student, printed)
        if found != culprit or isinstance(found, bool):
            told = "\n  ".join(printed)
            raise Mistake(
                f"find_culprit returns {found}, and must {culprit}, if the last lines of {size} "
                f"ranks are\n  {told}"
            )


def _limit_seconds(path: Path) -> float | None:
    """Return the limit that the program gives its process group; None if it gives none."""
    arguments = ["127.0.0.1:1", str(NODES), "0", "1"]
    join = Mock(side_effect=SystemExit)
    with (
        patch.object(dist, "init_process_group", join),
        patch.object(sys, "argv", [str(path), *arguments]),
        suppress(SystemExit),
    ):
        runpy.run_path(str(path), run_name="__main__")
    for call in join.mock_calls:
        if "timeout" in call.kwargs:
            return float(call.kwargs["timeout"].total_seconds())
    return None


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
