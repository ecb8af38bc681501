"""Ctrl-C on all ranks, and on one that waits in a collective."""

import signal
import time
from pathlib import Path

import pytest

from common.checkpoint import load_checkpoint
from tests.helpers import make_image_folder, only_run_folder, start_ranks
from tests.helpers.stage import QUICK, assert_told

MANY = 100_000
"""A number of steps or epochs that no test reaches."""


def test_interrupt_ends_all_and_keeps_what_is_done(tmp_path: Path) -> None:
    make_image_folder(tmp_path / "data")
    ranks = start_ranks(
        "PartTwo",
        2,
        *QUICK,
        "--dataset",
        "folder",
        "--data-dir",
        tmp_path / "data",
        "--epochs",
        MANY,
        "--output-dir",
        tmp_path / "out",
        cwd=tmp_path,
    )
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
def test_interrupt_of_one_rank_that_waits_for_the_other(tmp_path: Path) -> None:
    """A rank blocked in a collective cannot handle a signal, but must still end."""
    ranks = start_ranks(
        "PartTwo",
        2,
        *QUICK,
        "--timeout",
        60,
        "--max-steps",
        MANY,
        "--output-dir",
        tmp_path,
        cwd=tmp_path,
    )
    ranks[0].wait_for("step 3/")
    ranks[1].send(signal.SIGSTOP)
    time.sleep(1)  # by now the other rank waits in its collective
    try:
        ranks[0].send(signal.SIGINT)
        ended = ranks[0].end(timeout_seconds=90)
    finally:
        ranks[1].send(signal.SIGCONT)
    assert_told(ended, "interrupted", status=130)
    assert_told(
        ranks[1].end(timeout_seconds=90), r"rank 0 \(127.0.0.1\) ended or was killed at step \d"
    )
