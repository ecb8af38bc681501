"""Ranks killed or interrupted under every strategy, started as in the assignment."""

import signal
import time
from pathlib import Path

import pytest

from common.checkpoint import load_checkpoint
from tests.helpers import make_image_folder, only_run_folder, start_ranks
from tests.helpers.stage import QUICK, WAYS, assert_told

MANY = 100_000
"""A number of steps or epochs that no test reaches."""


@pytest.mark.parametrize(
    ("way", "victim"),
    [
        ("gather_scatter", 1),
        *(
            pytest.param(way, victim, marks=pytest.mark.slow)
            for way, victim in (
                ("gather_scatter", 0),
                ("ddp", 0),
                ("all_reduce", 0),
                ("all_reduce", 1),
                ("ddp", 1),
            )
        ),
    ],
)
def test_a_killed_rank_ends_the_others_within_the_timeout(
    tmp_path: Path, way: str, victim: int
) -> None:
    part, *flags = WAYS[way]
    ranks = start_ranks(
        part,
        2,
        *flags,
        *QUICK,
        "--timeout",
        4,
        "--max-steps",
        MANY,
        "--output-dir",
        tmp_path,
        cwd=tmp_path,
    )
    ranks[0].wait_for("step 3/")
    ranks[victim].send(signal.SIGKILL)
    killed = time.monotonic()
    survivor = ranks[1 - victim].end()
    assert time.monotonic() - killed < 20
    how = r"ended or was killed at .*\d" + (
        "|has not moved since" if way == "gather_scatter" else ""
    )
    assert_told(survivor, rf"error \(rank {1 - victim}\): rank {victim} \(127.0.0.1\) ({how})")
    assert ranks[victim].end().status == -signal.SIGKILL
    folder = only_run_folder(tmp_path, f"{part}-{way}")
    assert (folder / "metrics.jsonl").read_text().count("\n") >= 3, (
        "the steps that were done are recorded"
    )


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
