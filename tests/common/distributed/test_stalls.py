"""Which rank ``find_stall`` names, from signs of life as the ranks of a broken group give them."""

import pytest
import torch.distributed as dist

from common.distributed.heartbeat import Activity, Heartbeat
from common.distributed.stalls import Beat, Place, Seen, find_stall


def address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def broken(rank: int, *, timed_out: bool = True, collective: str = "all_reduce") -> Seen:
    """Return a rank that found the group broken in the exchange of step 118."""
    return Seen(
        Beat(9, address(rank), "sync", 118, 1, 60.0, collective, broken=True, timed_out=timed_out)
    )


def computing(rank: int, place: Place = "forward", *, seconds: float = 0.4) -> Seen:
    return Seen(Beat(9, address(rank), place, 118, 1, seconds))


def silent(rank: int, place: Place = "forward", *, step: int = 117, seconds: float = 9.2) -> Seen:
    return Seen(Beat(9, address(rank), place, step, 1, 0.3), seconds)


def test_a_silent_rank_is_named_with_its_step() -> None:
    assert find_stall(
        {0: broken(0), 1: broken(1), 2: broken(2), 3: silent(3)}, broken_seconds=0.1
    ) == (
        "rank 3 (10.0.0.4) has not moved since step 117, 9.2 s ago; the others wait in all_reduce "
        "of step 118"
    )


@pytest.mark.parametrize(
    ("place", "step", "waiting", "since"),
    [
        # Those that exchange step 118's gradients have those of step 117 from every rank.
        ("forward", 103, "sync", "step 117"),
        ("checkpoint", 100, "sync", "step 117"),
        # Those that have come to the end of the epoch have exchanged every step's.
        ("forward", 103, "end of the epoch", "step 118"),
        ("checkpoint", 118, "checkpoint", "the checkpoint at step 118"),
    ],
)
def test_the_step_is_the_latest_that_is_sure(
    place: Place, step: int, waiting: Place, since: str
) -> None:
    """A rank's last sign of life may be a second, and many steps, old."""
    other = Beat(9, address(0), waiting, 118, 1, 60.0, "all_reduce", broken=True, timed_out=True)
    found = find_stall({0: Seen(other), 1: silent(1, place, step=step)}, broken_seconds=0.1)
    assert found is not None
    assert found.startswith(f"rank 1 (10.0.0.2) has not moved since {since}, 9.2 s ago; rank 0 ")


def test_a_periodic_strategy_proves_less() -> None:
    other = Beat(9, address(0), "update", 118, 4, 60.0, "all_reduce", broken=True, timed_out=True)
    found = find_stall({0: Seen(other), 1: silent(1, step=100)}, broken_seconds=0.1)
    assert found is not None
    assert "since step 114," in found


def test_a_killed_rank_is_named_once_its_silence_shows() -> None:
    ranks = {0: broken(0, timed_out=False), 1: computing(1), 2: silent(2, seconds=2.1)}
    assert find_stall(ranks, broken_seconds=1.2) is None
    assert find_stall(ranks | {2: silent(2, seconds=3.1)}, broken_seconds=2.2) == (
        "rank 2 (10.0.0.3) ended or was killed at step 117 (no sign of life for 3.1 s); the others "
        "wait in all_reduce of step 118"
    )


def test_survivors_are_never_named() -> None:
    """They leave one after another, and then are silent, too."""
    gone = Seen(broken(1).beat, silent_seconds=20.0)
    assert find_stall({0: broken(0), 1: gone}, broken_seconds=3.9) is None
    assert find_stall({0: broken(0), 1: gone}, broken_seconds=4.0) == ""
    found = find_stall({0: broken(0), 1: gone, 2: silent(2)}, broken_seconds=20.0)
    assert found is not None
    assert found.startswith("rank 2 ")


def test_a_rank_that_lives_but_is_busy_is_named_after_a_timeout_only() -> None:
    busy = computing(2, "checkpoint", seconds=12.1)
    assert find_stall({0: broken(0), 1: broken(1), 2: busy}, broken_seconds=0.0) == (
        "rank 2 (10.0.0.3) has been in the checkpoint at step 118 for 12.1 s; the others wait in "
        "all_reduce of step 118"
    )
    # A connection closed: another rank was killed, and its silence does not show yet.
    assert find_stall({0: broken(0, timed_out=False), 2: busy}, broken_seconds=0.0) is None
    assert find_stall({0: broken(0, timed_out=False), 2: busy}, broken_seconds=9.0) == ""


def test_a_rank_that_waits_within_backward_is_not_busy() -> None:
    """DistributedDataParallel: the others have just timed out there, this one is about to."""
    other = Beat(
        9, address(0), "backward", 118, 1, 5.0, "a collective", broken=True, timed_out=True
    )
    waiting = computing(1, "backward", seconds=4.9)
    assert find_stall({0: Seen(other), 1: waiting}, broken_seconds=0.0) is None


def test_a_collective_that_some_ranks_alone_called_is_named() -> None:
    elsewhere = Seen(Beat(9, address(1), "evaluation", 116, 1, 60.0, "all_gather_object"))
    assert find_stall({0: broken(0), 1: elsewhere, 2: broken(2)}, broken_seconds=4.0) == (
        "rank 1 (10.0.0.2) waits in all_gather_object of the evaluation at step 116; the others "
        "wait in all_reduce of step 118: the ranks did not call the same collective"
    )


def test_of_many_silent_ranks_three_are_listed() -> None:
    ranks = {0: broken(0)} | {rank: silent(rank) for rank in range(1, 6)}
    found = find_stall(ranks, broken_seconds=0.1)
    assert found is not None
    assert found.count("has not moved") == 3
    assert "; and 2 more; rank 0 waits in all_reduce" in found


def test_a_paused_rank_is_not_named_for_one_that_was_killed_later() -> None:
    """The break shows only the killed rank; its silence shows after that of the paused one."""

    def found(later: float) -> str | None:
        ranks = {
            0: broken(0, timed_out=False),
            1: silent(1, seconds=4.1 + later),
            2: silent(2, seconds=2.3 + later),
        }
        return find_stall(ranks, broken_seconds=1.6 + later)

    assert found(0.0) is None
    assert found(0.8) == (
        "rank 1 (10.0.0.2) has not moved since step 117, 4.9 s ago; rank 2 (10.0.0.3) ended or was "
        "killed at step 117 (no sign of life for 3.1 s); rank 0 waits in all_reduce of step 118"
    )


def test_a_rank_that_stood_still_says_where_it_is_now() -> None:
    """Its last sign of life is older: here from before the first step."""
    activity = Activity()
    heartbeat = Heartbeat(
        dist.HashStore(), 0, 2, activity=activity, address="10.0.0.1", timeout_seconds=0.0
    )
    activity.step, activity.place = 5, "forward"
    heartbeat._pause()  # a second: longer than this timeout
    assert heartbeat._stood_still is not None
    assert " at step 5: it was stopped" in heartbeat._stood_still[0]
