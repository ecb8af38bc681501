"""Lesson 10: a rank of the student's program is killed, stopped, or its link slowed down."""

import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common.errors import UserError
from lab.cluster import Cluster
from lab.learn.student_file import Namespace, Say, StudentFile, Wrong

NODES, RATE, SLOW_RATE, BROKEN = 3, "200mbit", "40mbit", 1
RECORDED_RATIO = 5.0
"""Sync times on the slow link over those before (AMD EPYC, 2 virtual cores, torch 2.15)."""
_BEGIN_SECONDS, _END_SECONDS, _GRACE_SECONDS = 60.0, 90.0, 5.0


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 10; return how many times as long an exchange takes with one slow link."""
    options: dict[str, Any] = {"rate": RATE}
    try:
        Cluster(NODES, **options)
    except UserError as error:
        say(f"no link can be slowed down here ({error}): the ranks run on loopback instead")
        options = {"loopback": True}
    for fault, done in (("kill", "killed"), ("pause", "stopped")):
        printed, statuses = _run(student.path, options, fault)
        for rank in {*range(NODES)} - {BROKEN}:
            if statuses.get(rank, 0) <= 0 or "gives up" not in printed[rank]:
                raise Wrong(
                    f"rank {BROKEN} was {done}. Rank {rank} must give up within the limit, say so, "
                    f"and end with a status above 0. It printed:\n{printed[rank][-300:]}"
                )
        _check_culprit(student, printed, BROKEN)
        say(f"rank {BROKEN} is {done}: {printed[0].splitlines()[-1]}")
    if "loopback" in options:
        return RECORDED_RATIO
    printed, statuses = _run(student.path, options, "slow", rate=SLOW_RATE)
    if any(statuses.values()):
        raise Wrong(f"a slow link is no failure, and a rank gave up:\n{printed[0][-300:]}")
    _check_culprit(student, printed, None)
    seconds = [float(text) for text in re.findall(r"sync (\d+\.\d+)", printed[0])]
    return median(seconds[-5:]) / median(seconds[1:4])


def _check_culprit(student: StudentFile, printed: list[str], right: int | None) -> None:
    [found] = student.on_ranks(1, _find_culprit, printed)
    if found != right:
        raise Wrong(f"find_culprit returns {found}, not {right}, for what the ranks printed")


def _find_culprit(student: Namespace, printed: list[str]) -> Any:
    return student["find_culprit"](printed)


def _run(
    program: Path, options: dict[str, Any], fault: str, *, rate: str | None = None
) -> tuple[list[str], dict[int, int]]:
    """Return what each rank printed, and the exit status of each that ended, after a fault."""
    command = f"{sys.executable} {program} {{master}}:{{port}} {{nodes}} {{rank}}"
    with tempfile.TemporaryDirectory() as logs, Cluster(NODES, **options) as cluster:
        cluster.start(command.split(), logs=Path(logs))
        limit = time.monotonic() + _BEGIN_SECONDS
        while "step 5 " not in cluster.output(BROKEN):
            if time.monotonic() > limit:
                raise Wrong(f"no rank came to step 5. Rank 0 printed:\n{cluster.output(0)[-300:]}")
            time.sleep(0.05)
        cluster.fault(BROKEN, fault, rate=rate)
        ends = []
        with contextlib.suppress(TimeoutError):
            ends = cluster.wait(
                limit_seconds=_END_SECONDS, stop_at_failure=True, grace_seconds=_GRACE_SECONDS
            )
        return [cluster.output(rank) for rank in range(NODES)], {e.node: e.status for e in ends}
