"""Ctrl-C on some of the ranks: in training, while they meet, and inside a collective."""

import signal
import sys
import time

import pytest

from common.checkpoint import load_checkpoint
from tests.helpers import (
    ROOT,
    Started,
    free_port,
    make_image_folder,
    only_run_folder,
    start_part,
    start_ranks,
    user_environment,
)
from tests.helpers.stage import PACED, QUICK, assert_told, set_pace
from tests.helpers.waiting import wait_until

MANY = 100_000
"""A number of steps or epochs that no test reaches."""


@pytest.mark.parametrize(
    "interrupted",
    [
        pytest.param((1,), id="rank 1"),
        pytest.param((0,), id="rank 0, whose store tells it", marks=pytest.mark.slow),
        pytest.param((0, 1), id="both", marks=pytest.mark.slow),
    ],
)
def test_interrupt_is_told_to_the_others_and_keeps_what_is_done(tmp_path, interrupted):
    make_image_folder(tmp_path / "data")
    flags = (*QUICK, "--dataset", "folder", "--data-dir", tmp_path / "data", "--epochs", MANY)
    flags += ("--output-dir", tmp_path / "out")
    ranks = start_ranks("PartTwo", 2, *flags, cwd=tmp_path)
    ranks[0].wait_for("Epoch 3: train loss")  # Epoch 2's checkpoint has been saved by then
    for rank in interrupted:
        ranks[rank].send(signal.SIGINT)
    ended = [rank.end(timeout_seconds=90) for rank in ranks]
    assert any("interrupted (rank" in rank.err for rank in ended)
    for number, rank in enumerate(ended):
        assert "Traceback" not in rank.err
        assert "onnection" not in rank.err
        if number in interrupted:
            assert rank.status in (130, 1), rank
        else:
            assert_told(rank, rf"rank {interrupted[0]} was interrupted \(Ctrl-C\)\.")
    folder = only_run_folder(tmp_path / "out", "PartTwo-gather_scatter")
    assert load_checkpoint(folder / "checkpoints" / "Epoch_2.pt")["epoch"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [0, 1])
def test_interrupt_while_the_ranks_meet(tmp_path, interrupted):
    """Two of three ranks wait for the third one; the other one does not go on waiting."""
    port = free_port()
    place = ("-M", "127.0.0.1", "--master-port", port, "-N", 3, "--meeting-timeout", 60, "-R")
    ranks = [start_part("PartTwo", *QUICK, *place, rank, cwd=tmp_path) for rank in (0, 1)]
    wait_until(
        lambda: all("waiting for" in rank.read_err() for rank in ranks),
        "both ranks in the meeting",
        timeout_seconds=60,
    )
    ranks[interrupted].send(signal.SIGINT)
    ended = [rank.end(timeout_seconds=30) for rank in ranks]
    told = f"rank {interrupted} was interrupted while the ranks were meeting"
    assert_told(ended[1 - interrupted], told)
    assert_told(ended[interrupted], rf"interrupted \(rank {interrupted}\)", status=130)


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
    # Stopped, it could not read what rank 0 told before its store ended.
    killed = r"rank 0 \(127.0.0.1\) ended or was killed at step \d"
    assert_told(ranks[1].end(timeout_seconds=90), killed)


@pytest.mark.slow
def test_interrupt_inside_a_collective_is_told_to_the_rank_that_still_computes(tmp_path):
    """Rank 0 computes for long; rank 1 waits for it in the exchange, where it sees no signal."""
    place = ("-M", "127.0.0.1", "-N", 2, "--master-port", free_port(), "--output-dir", tmp_path)
    flags = (*PACED, *QUICK, "--sync", "all_reduce", "--max-steps", MANY, *place, "--rank")
    command = [sys.executable, *map(str, flags)]
    how = {"cwd": tmp_path, "env": user_environment(**set_pace(tmp_path, 0)), "forked": True}
    ranks = [Started([*command, str(rank)], **how) for rank in range(2)]
    ranks[0].wait_for("step 3/")
    set_pace(tmp_path, 30)
    time.sleep(1)
    ranks[1].send(signal.SIGINT)
    ended = ranks[1].end(timeout_seconds=20)
    assert_told(ended, "interrupted", status=130)
    set_pace(tmp_path, 0)
    told = r"error \(rank 0\): rank 1 was interrupted \(Ctrl-C\)\."
    assert_told(ranks[0].end(timeout_seconds=30), told)  # not at Gloo's timeout


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
