"""Rank 0 or another rank is killed with ``kill -9`` at a precisely chosen moment.

The other ranks stop in time with a message. Every finished checkpoint survives and equals that of
an undisturbed run, and a resumed run ends with the same bits.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoint import checkpoints_by_age, load_checkpoint
from common.utils.hashing import digest
from tests.helpers.stage import (
    NODES,
    TIMEOUT,
    Stage,
    assert_in_time,
    assert_no_result,
    assert_same_training,
    assert_told,
)

KILLED = r"error \(rank {rank}\): rank {victim} \([\d.]+\) ({how}) .*step \d"
HOW = "ended or was killed at"
LATE = "has not moved since"  # gather and scatter may notice only by the timeout
Reference = Callable[[str], Path]


def killed(
    stage: Stage, undisturbed: Reference, victim: int, moment: str, *, way: str = "all_reduce"
) -> list[str]:
    """Run until ``victim`` is killed, check what must hold, and return the checkpoints' names."""
    stage.start(way, hurt=(victim, moment, "kill"), timeout=TIMEOUT)
    ends = stage.end()
    assert ends[victim].status == -signal.SIGKILL, ends[victim]
    assert_in_time(ends, victim)
    for rank in set(range(NODES)) - {victim}:
        how = f"{HOW}|{LATE}" if way == "gather_scatter" else HOW
        assert_told(ends[rank], KILLED.format(rank=rank, victim=victim, how=how))
    run = stage.run(way=way)
    assert_no_result(run)
    left = checkpoints_by_age(run / "checkpoints")
    for path in left:
        kept = undisturbed(way) / "checkpoints" / path.name
        assert digest(load_checkpoint(path)) == digest(load_checkpoint(kept)), path
    return [path.name for path in left]


def resuming(stage: Stage, undisturbed: Reference, *, step: int) -> None:
    """Resume at ``step``, and check that the run ends like the undisturbed one."""
    run = stage.finish("all_reduce", "--resume", "auto")
    assert f", step {step}" in stage.text(0)
    assert_same_training(run, undisturbed("all_reduce"))


@pytest.mark.parametrize(
    ("way", "victim"),
    [
        ("all_reduce", 0),
        *(
            pytest.param(way, victim, marks=pytest.mark.slow)
            for way, victim in (
                ("all_reduce", 2),
                ("gather_scatter", 0),
                ("gather_scatter", 2),
                ("ddp", 0),
                ("ddp", 2),
            )
        ),
    ],
)
def test_in_a_collective(stage: Stage, undisturbed: Reference, way: str, victim: int) -> None:
    assert killed(stage, undisturbed, victim, "collective", way=way) == ["Epoch_1.pt"]


@pytest.mark.slow
def test_rank_0_in_forward_and_gone_on_with(stage: Stage, undisturbed: Reference) -> None:
    assert killed(stage, undisturbed, 0, "forward") == ["Epoch_1.pt"]
    resuming(stage, undisturbed, step=2)


@pytest.mark.slow
def test_another_in_forward(stage: Stage, undisturbed: Reference) -> None:
    assert killed(stage, undisturbed, 2, "forward") == ["Epoch_1.pt"]


@pytest.mark.slow
def test_rank_0_in_evaluation(stage: Stage, undisturbed: Reference) -> None:
    assert killed(stage, undisturbed, 0, "evaluation") == ["Epoch_2.pt", "Epoch_1.pt"]


@pytest.mark.slow
def test_another_in_evaluation_and_gone_on_with(stage: Stage, undisturbed: Reference) -> None:
    assert killed(stage, undisturbed, 2, "evaluation") == ["Epoch_2.pt", "Epoch_1.pt"]
    resuming(stage, undisturbed, step=4)


def test_the_writer_with_half_a_checkpoint_and_gone_on_with(
    stage: Stage, undisturbed: Reference
) -> None:
    assert killed(stage, undisturbed, 0, "writing") == ["Epoch_1.pt"]
    assert len(list((stage.run() / "checkpoints").glob(".Epoch_2.pt.*.unfinished"))) == 1
    resuming(stage, undisturbed, step=2)  # also checks that no unfinished file remains


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "left"), [("renaming", ["Epoch_1.pt"]), ("renamed", ["Epoch_2.pt", "Epoch_1.pt"])]
)
def test_the_writer_around_the_rename(
    stage: Stage, undisturbed: Reference, moment: str, left: list[str]
) -> None:
    assert killed(stage, undisturbed, 0, moment) == left


@pytest.mark.slow
def test_another_while_rank_0_saves(stage: Stage, undisturbed: Reference) -> None:
    assert killed(stage, undisturbed, 2, "waiting") == ["Epoch_2.pt", "Epoch_1.pt"]
