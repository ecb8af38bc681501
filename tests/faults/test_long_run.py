"""A long run of tiny steps keeps its number of descriptors and threads, and hardly grows.

The test reads all numbers in /proc, from outside the processes.
"""

import itertools
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import TINY, start_part, start_ranks

MOST_GROWTH_KIB = 1024
"""Of a process in 1,000 steps: the records of the steps, and epochs."""


@dataclass(frozen=True)
class Usage:
    """What a process holds: open descriptors, threads, and memory of its own in KiB."""

    descriptors: int
    threads: int
    memory_kib: int


def usage_of(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    looks = []
    for _ in range(10):
        looks.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.05)  # between two looks: a line or a checkpoint may be written in one
    descriptors = min(looks)
    return Usage(descriptors, int(status["Threads"]), int(status["RssAnon"].split()[0]))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_long_run_holds_what_it_held_at_its_start(tmp_path, ranks):
    steps, window = 2000, 500
    flags = [*TINY, "--dataset", "digits", "--batch-size", 24, "--max-steps", steps]
    flags += ["--log-every", 50, "--output-dir", tmp_path]
    if ranks > 1:
        started = start_ranks("PartTwo", ranks, *flags, "--sync", "all_reduce", cwd=tmp_path)
    else:
        started = [start_part("PartOne", *flags, "--threads", 1, cwd=tmp_path)]
    usages = []
    for step in (*range(window, steps, window), steps - 50):
        started[0].wait_for(f"step {step}/{steps}", timeout_seconds=400)
        usages.append([usage_of(one.process.pid) for one in started])
    for one in started:
        assert one.end().status == 0
    for rank, of_rank in enumerate(zip(*usages, strict=True)):
        print(f"rank {rank}:", *of_rank, sep="\n  ")
        assert len({(usage.descriptors, usage.threads) for usage in of_rank}) == 1, of_rank
        grown = [
            later.memory_kib - earlier.memory_kib for earlier, later in itertools.pairwise(of_rank)
        ]
        # A leak grows in every window; what is needed for the first time grows in one.
        assert statistics.median(grown) * 1000 / window < MOST_GROWTH_KIB, of_rank
