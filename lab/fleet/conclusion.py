"""Say how the ranks of a launch ended, as its last line, and find its exit status."""

import signal
from collections.abc import Mapping
from pathlib import Path

from common.errors import TO_BE_CONTINUED
from lab.terminal import say

STOPS = (signal.SIGINT, signal.SIGTERM)
"""The signals that a launch passes on to its ranks."""


def conclude(
    failures: Mapping[int, int],
    *,
    stopped_by: int,
    seconds: float,
    logs: Path,
    ended: str = "all processes on all nodes have ended",
) -> int | None:
    """Say how a launch ended and return its exit status.

    If a rank failed, say nothing and return None: the caller names the rank.

    failures : by rank, the exit statuses other than 0.
    stopped_by : the signal of ``STOPS`` that stopped the ranks; 0 if none did.
    seconds, logs : how long it took, and where its output is.
    ended : what is certain of the processes after a signal.
    """
    statuses = set(failures.values())
    if TO_BE_CONTINUED in statuses and (stopped_by or statuses == {TO_BE_CONTINUED}):
        say(
            f"stopped after {seconds:.1f} s, after saving a checkpoint; resume with the same "
            f"command and --resume auto; output: {logs}"
        )
        return TO_BE_CONTINUED
    if not failures:
        say(f"all nodes finished without errors after {seconds:.1f} s; output: {logs}")
        return 0
    if stopped_by:
        what = "interrupted" if stopped_by == signal.SIGINT else "ended by SIGTERM"
        say(f"{what}: {ended}; output: {logs}")
        return 128 + stopped_by  # as a shell reports a signal
    return None
