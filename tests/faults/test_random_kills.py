"""Ranks are killed at random moments, again and again, until the run has finished.

Weights, metrics.jsonl and epochs.jsonl are then those of the undisturbed run, times aside.
"""

import random
import signal
import time

import pytest

from tests.faults.harness import TIMEOUT, Fault, Run
from tests.helpers import make_image_folder
from tests.helpers.stage import assert_equal_runs

FLAGS = ("--batch-size", 4, "--checkpoint-every", 2, "--log-every", 4)
"""Six steps an epoch, with checkpoints between the writes to metrics.jsonl."""
MOST_KILLS = 5
"""In one series; its last run is left alone."""


def start(run):
    """Start or resume the run, and return the time."""
    run.start(*FLAGS, "--resume", "auto", timeout=TIMEOUT)
    return time.monotonic()


def finish(run):
    """Let the run come to its end, and return how many seconds it took."""
    began = start(run)
    for ended in run.end():
        assert ended.status == 0, ended
    return time.monotonic() - began


def kill_until_done(run, chance, *, seconds, most):
    """Kill a random rank at a random moment of each of the runs; return the number of kills."""
    kills = 0
    while kills < most:
        start(run)
        time.sleep(chance.uniform(0, seconds))  # the moment of the kill
        chance.choice(run.processes).send(signal.SIGKILL)
        ends = run.end()
        if all(ended.status == 0 for ended in ends):
            return kills
        for ended in ends:
            assert ended.status in (0, 1, -signal.SIGKILL), ended
            assert "Traceback" not in ended.err, ended
        kills += any(ended.status == -signal.SIGKILL for ended in ends)
    finish(run)
    return kills


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(8, marks=pytest.mark.slow),
        pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_kills_at_random_moments_lose_nothing(kills, tmp_path, request):
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # shown if the test fails
    chance, images = random.Random(seed), make_image_folder(tmp_path / "images")
    reference = {}
    for ranks in (1, 2):
        (tmp_path / f"undisturbed{ranks}").mkdir()
        run = Run(tmp_path / f"undisturbed{ranks}", images, Fault("", "", ranks))
        reference[ranks] = run.output, finish(run)
    done, series = 0, 0
    while done < kills:
        series += 1
        folder, ranks = tmp_path / f"series{series}", 1 + series % 2
        folder.mkdir()
        undisturbed, seconds = reference[ranks]
        run = Run(folder, images, Fault("kill", "", ranks))
        most = min(MOST_KILLS, kills - done)
        done += kill_until_done(run, chance, seconds=seconds, most=most)
        assert_equal_runs(run.output, undisturbed)
    figures = f"{done} kills in {series} series (seed {seed}): {done} survived, 0 failed"
    request.config.get_terminal_writer().line(f"\n{figures}")
