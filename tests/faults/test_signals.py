"""Ctrl-C on all ranks, and on one that waits in a collective."""

import signal
import sys
import time

import pytest

from common.checkpoint import load_checkpoint
from tests.helpers import (
    ROOT,
    Started,
    make_image_folder,
    only_run_folder,
    start_ranks,
    user_environment,
)
from tests.helpers.stage import QUICK, assert_told

MANY = 100_000
"""A number of steps or epochs that no test reaches."""


def test_interrupt_ends_all_and_keeps_what_is_done(tmp_path):
    make_image_folder(tmp_path / "data")
    flags = (*QUICK, "--dataset", "folder", "--data-dir", tmp_path / "data", "--epochs", MANY)
    flags += ("--output-dir", tmp_path / "out")
    ranks = start_ranks("PartTwo", 2, *flags, cwd=tmp_path)
    ranks[0].wait_for("Epoch 3: train loss")  # Epoch 2's checkpoint has been saved by then
    for rank in ranks:
        rank.send(signal.SIGINT)
    for rank in ranks:
        ended = rank.end(timeout_seconds=90)
        assert ended.status in (130, 1), ended
        assert "Traceback" not in ended.err
    assert any("interrupted" in rank.end().err for rank in ranks)
    folder = only_run_folder(tmp_path / "out", "PartTwo-gather_scatter")
    assert load_checkpoint(folder / "checkpoints" / "Epoch_2.pt")["epoch"] == 2


@pytest.mark.slow
def test_interrupt_of_one_rank_that_waits_for_the_other(tmp_path):
    """A rank blocked in a collective cannot handle a signal, but must still end."""
    flags = (*QUICK, "--timeout", 60, "--max-steps", MANY, "--output-dir", tmp_path)
    ranks = start_ranks("PartTwo", 2, *flags, cwd=tmp_path)
    ranks[0].wait_for("step 3/")
    ranks[1].send(signal.SIGSTOP)
    time.sleep(1)  # by now the other rank waits in its collective
    try:
        ranks[0].send(signal.SIGINT)
        ended = ranks[0].end(timeout_seconds=90)
    finally:
        ranks[1].send(signal.SIGCONT)
    assert_told(ended, "interrupted", status=130)
    killed = r"rank 0 \(127.0.0.1\) ended or was killed at step \d"
    assert_told(ranks[1].end(timeout_seconds=90), killed)


def test_interrupt_while_the_report_is_written(tmp_path):
    """The signal comes within a callback that would drop the exception; the folder is free."""
    hurt = [sys.executable, ROOT / "tests" / "helpers" / "hurt.py", 0, "end", "swallow"]
    part = [ROOT / "PartOne" / "main.py", *QUICK, "--max-steps", 2, "--output-dir", tmp_path]
    command = [str(word) for word in (*hurt, *part)]
    rank = Started(command, cwd=tmp_path, env=user_environment(), forked=True)
    rank.wait_for("held now")
    rank.send(signal.SIGINT)
    ended = rank.end(timeout_seconds=60)
    assert_told(ended, "interrupted", status=130)
    assert "Exception ignored" not in ended.err
    assert "another rank" not in ended.err
    folder = only_run_folder(tmp_path, "PartOne-none")
    assert not (folder / ".lock").exists()
    assert load_checkpoint(folder / "checkpoints" / "Epoch_1.pt")["step"] == 2
