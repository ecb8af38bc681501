"""collectives-differ and group-unused, on records of ranks that never ran."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.audit.findings.collectives import check
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.recording import read_recording
from tests.lab.audit.recordings import Writer

AT = ["train.py", 7, "dist.all_reduce(p.grad)"]
Script = Callable[["RankWriter"], None]


class RankWriter(Writer):
    """The records of one rank's calls."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        super().__init__(folder, 100 + rank)
        self.rank, self.calls = rank, 0
        self.record("group", rank=rank, world=size, backend="gloo", at=AT)

    def call(self, name: str = "all_reduce", *, returns: bool = True, **fields: Any) -> None:
        """Record a call; ``returns`` False: the rank waits in it for ever."""
        known = {"op": "SUM", "size": 2, "group": None, "bytes": 40, "dtype": "float32"}
        known |= {"shape": [10], "step": 1, "peer": None, "async": False, "content": "gradient"}
        self.record("call", c=self.calls, name=name, **(known | fields), at=AT)
        if returns:
            self.record("done", c=self.calls, seconds=0.1, error=None)
        self.calls += 1

    def fail(self, name: str = "all_reduce") -> None:
        """Record a call that raises an error."""
        self.call(name, returns=False)
        self.record("done", c=self.calls - 1, seconds=1.0, error="RuntimeError: closed by peer")

    def stand(self, file: str, *, busy: float) -> None:
        """Record where this rank stands."""
        frames = [["train.py", 9, "train", "loss.backward()"], [file, 1, "run", ""]]
        self.record("stack", why="asked", busy=busy, threads=[["MainThread", frames]])

    def steps(self, number: int, own: list[float], got: list[float]) -> None:
        """Record steps with this rank's own gradient and what the optimiser gets."""
        for step in range(number):
            references = {"own": self.numbers(own), "got": self.numbers(got)}
            self.record("step", o=0, step=step, **references)


def examine(folder: Path, *scripts: Script, hung: bool = False) -> list[Any]:
    """Return the outcomes of ranks that do what one function each says."""
    for rank, script in enumerate(scripts):
        script(RankWriter(folder, rank, len(scripts)))
    return list(check(read_recording(folder, hung=hung)))


def ends_after(number: int) -> Script:
    """Return a rank that calls all_reduce, then ends in good order."""

    def script(rank: RankWriter) -> None:
        for _ in range(number):
            rank.call()
        rank.record("end", status=None, after_cut=False)

    return script


def waits(rank: RankWriter) -> None:
    rank.call()
    rank.call(returns=False)


def faults(outcomes: list[Any]) -> list[str]:
    return [one.name for one in outcomes if isinstance(one, Finding)]


def test_equal_calls_are_right_and_counted_by_step(tmp_path: Path) -> None:
    def three_a_step(rank: RankWriter) -> None:
        for step in range(4):
            for _ in range(3):
                rank.call(step=step)

    (observed,) = examine(tmp_path, three_a_step, three_a_step)
    assert observed == Right("all ranks call the same collectives in the same order, 3 a step")


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"name": "broadcast", "peer": 1}, True),
        ({"bytes": 80}, True),
        ({"dtype": "float64"}, True),
        ({"op": "MAX"}, True),
        ({"content": "other", "async": True, "shape": [2, 5]}, False),
        ({"name": "all_gather", "bytes": 80}, True),
    ],
)
def test_what_must_be_equal(tmp_path: Path, change: dict[str, Any], differs: bool) -> None:
    def other(rank: RankWriter) -> None:
        rank.call()
        rank.call(**change)

    assert faults(examine(tmp_path, ends_after(2), other)) == ["collectives-differ"] * differs


def test_gathered_sizes_may_differ(tmp_path: Path) -> None:
    def gathers(size: int) -> Script:
        return lambda rank: rank.call("all_gather", bytes=size)

    assert not faults(examine(tmp_path, gathers(40), gathers(80)))


def test_another_root_differs(tmp_path: Path) -> None:
    def own_root(rank: RankWriter) -> None:
        rank.call("broadcast", peer=rank.rank)

    assert faults(examine(tmp_path, own_root, own_root)) == ["collectives-differ"]


def test_calls_after_the_cut_are_not_compared(tmp_path: Path) -> None:
    def cut(rank: RankWriter) -> None:
        rank.call()
        rank.record("cut", step=6, why="6 steps")
        rank.call("barrier" if rank.rank else "all_reduce")
        rank.fail()

    assert not faults(examine(tmp_path, cut, cut))


def test_groups_are_compared_apart(tmp_path: Path) -> None:
    def mixed(rank: RankWriter) -> None:
        calls: list[tuple[Any, int]] = [(None, 40), (["1", [0, 1]], 8)]
        for group, size in calls if rank.rank else reversed(calls):
            rank.call(group=group, bytes=size)

    assert not faults(examine(tmp_path, mixed, mixed))


def test_a_rank_that_ends_while_another_waits(tmp_path: Path) -> None:
    def fails(rank: RankWriter) -> None:
        rank.call()
        rank.fail()

    (observed,) = examine(tmp_path, fails, ends_after(1))
    assert observed.name == "collectives-differ"
    assert "rank 0 waits in all_reduce of 40 bytes (train.py:7" in observed.evidence[0]
    assert "rank 1 ends without it" in observed.evidence[0]


def test_a_rank_that_ends_early_in_peace_is_no_fault(tmp_path: Path) -> None:
    assert not faults(examine(tmp_path, ends_after(2), ends_after(1)))


@pytest.mark.parametrize("kind", ["error", "status", "vanished"])
def test_a_rank_that_died_of_something_else_explains_it(tmp_path: Path, kind: str) -> None:
    def dies(rank: RankWriter) -> None:
        rank.call()
        if kind == "error":
            rank.record("error", type="OSError", message="no data", at=AT, after_cut=False)
        if kind != "vanished":
            rank.record("end", status=int(kind == "status"), after_cut=False)

    assert not faults(examine(tmp_path, waits, dies, waits, hung=True))


def test_a_busy_rank_is_unknown_and_one_in_ddp_waits(tmp_path: Path) -> None:
    def stands(file: str, busy: float) -> Script:
        def script(rank: RankWriter) -> None:
            rank.call()
            rank.stand(file, busy=busy)

        return script

    folders = [tmp_path / name for name in ("busy", "sleeps", "waits")]
    for folder in folders:
        folder.mkdir()
    autograd = "torch/autograd/graph.py"
    (busy,) = examine(folders[0], waits, stands(autograd, 0.9), hung=True)
    (sleeps,) = examine(folders[1], waits, stands("socket.py", 0.0), hung=True)
    (observed,) = examine(folders[2], waits, stands(autograd, 0.01), hung=True)
    assert isinstance(busy, Unknown)
    assert isinstance(sleeps, Unknown)
    assert observed.name == "collectives-differ"
    assert "rank 1 was at" in observed.evidence[1]


def test_messages_pair_by_pair(tmp_path: Path) -> None:
    def exchange(rank: RankWriter) -> None:
        for name in ("send", "recv") if rank.rank else ("recv", "send"):
            rank.call(name, peer=1 - rank.rank)

    def both_receive(rank: RankWriter) -> None:
        rank.call("recv", peer=1 - rank.rank, returns=False)

    right, deadlock = tmp_path / "right", tmp_path / "deadlock"
    right.mkdir()
    deadlock.mkdir()
    assert not faults(examine(right, exchange, exchange))
    assert faults(examine(deadlock, both_receive, both_receive, hung=True)) == [
        "collectives-differ"
    ]


def alone(*calls: str, got: tuple[float, float] = (2.0, 1.0), also: str = "") -> Script:
    """Return a rank that steps four times; its own gradient is (2, 1)."""

    def script(rank: RankWriter) -> None:
        if also:
            rank.record(also, at=AT)
        for name in calls:
            size = 0 if "barrier" in name or "object" in name else 4
            rank.call(name, bytes=size, content="other")
        rank.steps(4, [2.0, 1.0], list(got))

    return script


@pytest.mark.parametrize(
    ("script", "unused"),
    [
        (alone(), True),
        (alone("barrier", "broadcast_object_list"), True),
        (alone(got=(1.0, 0.5)), True),  # clipped, or scaled
        (alone("all_reduce"), False),  # of a loss; then own-gradient is told
        (alone(got=(2.0, 0.0)), False),  # exchanged by other means
        (alone(also="ddp"), False),
        (alone(also="mesh"), False),
    ],
)
def test_group_unused(tmp_path: Path, script: Script, unused: bool) -> None:
    assert faults(examine(tmp_path, script, script)) == ["group-unused"] * unused
