"""Which rank a broken collective names: from torch's error, from signs of life, and under NCCL."""

import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistBackendError
from torch.utils.data import DataLoader

from common.distributed.failures import (
    Activity,
    Beat,
    FailureWatch,
    broken_collective,
    cause_of,
    explain_collective_failure,
    find_culprit,
    nccl_failure,
)
from common.distributed.launch_env import LaunchSpec
from common.errors import UserError
from tests.helpers import free_port, user_environment
from tests.helpers.processes import Started

# --- from signs of life ---


def broken(rank, place="sync", *, period=1, closed=False, step=118):
    """Return the beat of a rank whose collective broke: it timed out, or was ``closed``."""
    where, collective = f"10.0.0.{rank}", "all_reduce"
    return Beat(
        90.0, where, place, step, period, 60.0, collective, broken=True, timed_out=not closed
    )


def alive(rank, place="forward", *, step=117, seconds=0.4, waits=""):
    return Beat(80.0, f"10.0.0.{rank}", place, step, 1, seconds, waits)


CULPRITS = {
    "stopped": (
        {0: broken(0), 1: broken(1), 2: broken(2), 3: alive(3)},
        {3: 9.2},
        "rank 3 (10.0.0.3) has not moved since step 117, 9.2 s ago; the others wait in all_reduce "
        "of step 118",
    ),
    "killed": (
        {0: broken(0, closed=True), 1: alive(1), 2: alive(2)},
        {2: 4.1},
        "rank 2 (10.0.0.2) ended or was killed at step 117 (no sign of life for 4.1 s); the others "
        "wait in all_reduce of step 118",
    ),
    # The break shows only the killed rank; the paused one has been silent for longer.
    "paused, another killed later": (
        {0: broken(0, closed=True), 1: alive(1), 2: alive(2)},
        {1: 5.9, 2: 4.1},
        "rank 1 (10.0.0.1) has not moved since step 117, 5.9 s ago; rank 2 (10.0.0.2) ended or was "
        "killed at step 117 (no sign of life for 4.1 s); rank 0 waits in all_reduce of step 118",
    ),
    # A sign of life may be a second, and many steps, old. Those that exchange step 118's gradients
    # have those of step 117 from every rank; those at the epoch's end have every step's.
    "stopped steps later": (
        {0: broken(0), 1: alive(1, step=103)},
        {1: 9.2},
        "rank 1 (10.0.0.1) has not moved since step 117, 9.2 s ago; rank 0 waits in",
    ),
    "stopped at the epoch's end": (
        {0: broken(0, "end of the epoch"), 1: alive(1, step=103)},
        {1: 9.2},
        "rank 1 (10.0.0.1) has not moved since step 118, 9.2 s ago; rank 0 waits in",
    ),
    "stopped in a checkpoint": (
        {0: broken(0, "checkpoint"), 1: alive(1, "checkpoint", step=118)},
        {1: 9.2},
        "rank 1 (10.0.0.1) has not moved since the checkpoint at step 118, 9.2 s ago; rank 0 waits",
    ),
    "stopped between averages": (
        {0: broken(0, "update", period=4), 1: alive(1, step=100)},
        {1: 9.2},
        "rank 1 (10.0.0.1) has not moved since step 114, 9.2 s ago; rank 0 waits in",
    ),
    "many": (
        {0: broken(0)} | {rank: alive(rank) for rank in range(1, 6)},
        dict.fromkeys(range(1, 6), 9.2),
        "rank 1 (10.0.0.1) has not moved since step 117, 9.2 s ago; rank 2 (10.0.0.2) has not "
        "moved since step 117, 9.2 s ago; rank 3 (10.0.0.3) has not moved since step 117, 9.2 s "
        "ago; and 2 more; rank 0 waits in all_reduce",
    ),
    "busy": (
        {0: broken(0), 1: broken(1), 2: alive(2, "checkpoint", step=118, seconds=12.1)},
        {},
        "rank 2 (10.0.0.2) has been in the checkpoint at step 118 for 12.1 s; the others wait in "
        "all_reduce of step 118",
    ),
    "elsewhere": (
        {0: broken(0), 1: alive(1, "evaluation", waits="all_gather_object"), 2: broken(2)},
        {},
        "rank 1 (10.0.0.1) waits in all_gather_object of the evaluation at step 117; the others "
        "wait in all_reduce of step 118: the ranks did not call the same collective",
    ),
    # A connection closed, so a rank ended: one that is busy did not do it.
    "busy, but not the cause": (
        {0: broken(0, closed=True), 2: alive(2, "checkpoint", seconds=12.1)},
        {},
        None,
    ),
    # DistributedDataParallel: the others have timed out within backward, this one is about to.
    "waits within backward": (
        {0: broken(0, "backward"), 1: alive(1, "backward", step=118, seconds=4.9)},
        {},
        None,
    ),
    "nobody stands out": ({0: broken(0), 1: broken(1)}, {}, None),
}


@pytest.mark.parametrize("case", CULPRITS)
def test_the_culprit_is_named_with_its_step(case):
    beats, silent, expected = CULPRITS[case]
    found = find_culprit(beats, silent)
    assert found == expected if expected is None else (found or "").startswith(expected), found


def test_a_rank_that_stood_still_names_itself_and_where_it_is_now():
    """Its last sign of life is older: here from before the first step."""
    activity = Activity()
    launch = LaunchSpec(0, 2, "127.0.0.1")
    watch = FailureWatch(dist.HashStore(), launch, activity=activity, timeout_seconds=0.3)
    watch._thread.start()  # it pauses for a second: longer than this timeout
    time.sleep(1.2)
    activity.step, activity.place = 5, "forward"
    found = watch.explain_broken("all_reduce", timed_out=False)
    watch._closing.set()
    under_torchrun = FailureWatch(None, launch, activity=activity, timeout_seconds=0.3)
    assert under_torchrun.explain(UserError("no disk")) is None
    assert re.match(
        r"rank 0 \(127.0.0.1\), this one, stood still for 1\.\d s at step 5: ", found or ""
    )


# --- from torch's error ---

NCCL = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {what}, NCCL version 2.28.9
{kind}
Last error:
{last}
Exception raised from create at NCCLUtils.cpp:94 (most recent call first):"""


@pytest.mark.parametrize(
    ("what", "last", "cause", "lost"),
    [
        (
            "invalid usage",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5c000",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5c000",
            False,
        ),
        (
            "remote process exited or there was a network error",
            "",
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process "
            "exited or there was a network error, NCCL version 2.28.9",
            True,
        ),
        (
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "socketProgress: Connection closed by remote peer node2<45678>",
            "socketProgress: Connection closed by remote peer node2<45678>",
            True,
        ),
    ],
)
def test_nccls_cause_stands_below_last_error(what, last, cause, *, lost):
    error = DistBackendError(NCCL.format(what=what, kind="ncclError", last=last))
    assert cause_of(error) == cause
    assert (broken_collective(error) is not None) == lost
    assert (f"(torch: {cause})" in (explain_collective_failure(error) or "")) == lost


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(3)
        return index


def test_an_error_that_no_collective_raised_blames_no_rank():
    """Its words are those of a lost rank."""
    with pytest.raises(RuntimeError, match="timed out") as caught:
        next(iter(DataLoader(Slow(), num_workers=1, timeout=1)))
    assert broken_collective(caught.value) is None
    for words in ("the tracker's socket is closed", "peer review", "Connection reset by peer"):
        assert broken_collective(RuntimeError(words)) is None


def test_a_hook_of_backward_is_not_named_after_distributed_data_parallel():
    def broke(_):
        raise RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer "
            "[127.0.0.1]:29500"
        )

    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(broke)
    with pytest.raises(RuntimeError) as caught:
        weight.sum().backward()
    assert broken_collective(caught.value) == "a collective"


# --- under NCCL: the GPU is a thread (guarded_rank.py); ranks, store and signals are real ---

SCRIPT = Path(__file__).with_name("guarded_rank.py")


def start(what, folder):
    """Start both ranks; return them once they are in the group."""
    port = free_port()
    commands = [["python", str(SCRIPT), str(rank), str(port), what] for rank in (0, 1)]
    env = user_environment()
    ranks = [Started(command, cwd=folder, env=env, forked=True) for command in commands]
    for one in ranks:
        one.wait_for("ready")
    return ranks


def end_of(waiting):
    ended = waiting.end(timeout_seconds=40)
    assert ended.status == 1, ended
    assert ended.err.count("error (rank") == 1, ended.err
    return ended.err


def test_the_rank_that_waits_for_a_killed_one_names_it(tmp_path):
    ranks = start("collective 0", tmp_path)
    ranks[1].send(signal.SIGKILL)
    assert re.match(
        r"error \(rank 0\): rank 1 \(127.0.0.1\) ended or was killed at step [67] \(.* s\)"
        r".*\(a collective broke here\)",
        end_of(ranks[0]),
    )


@pytest.mark.slow
def test_other_ends_are_named_too_and_long_work_is_none(tmp_path):
    without_rank0 = start("collective 1", tmp_path)
    without_rank0[0].send(signal.SIGKILL)
    stopped = start("collective 0", tmp_path)
    stopped[1].send(signal.SIGSTOP)
    late = start("collective 0", tmp_path)  # rank 1 works for longer than the timeout
    failing = start("fails", tmp_path)
    busy = start("busy", tmp_path)
    assert re.match(
        r"error \(rank 1\): rank 0 \(127.0.0.1\) ended or was killed at step [67] ",
        end_of(without_rank0[1]),
    )
    assert re.match(
        r"error \(rank 0\): rank 1 \(127.0.0.1\) has not moved since step [67], ",
        end_of(stopped[0]),
    )
    assert "rank 1 (127.0.0.1) has been in data of step 7 for" in end_of(late[0])
    assert "rank 1 stopped: the disk is full. (a collective broke here" in end_of(failing[0])
    assert failing[1].end().err == "own error: the disk is full\n"
    for rank in busy:
        ended = rank.end(timeout_seconds=40)
        assert (ended.status, ended.out) == (0, "ready\nended well\n"), ended


class Group:
    """A group of torch's, whose watchdog saw ``error``."""

    def __init__(self, backend, error):
        self.backend, self.error = backend, error

    def _get_backend(self, device):
        assert (self.backend, device.type) == ("nccl", "cuda"), "Gloo has no watchdog"
        return self

    def get_error(self):
        return SimpleNamespace(name=self.error)


@pytest.mark.parametrize(
    ("groups", "failure"),
    [
        ([("nccl", "SUCCESS"), ("gloo", ""), ("nccl", "SUCCESS")], None),
        ([("nccl", "SUCCESS"), ("gloo", ""), ("nccl", "TIMEOUT")], True),
        ([("nccl", "COMM_ERROR"), ("nccl", "SUCCESS")], False),
    ],
)
def test_a_strategys_own_group_under_nccl_is_watched_too(monkeypatch, groups, failure):
    open_groups = dict.fromkeys(Group(*facts) for facts in groups)
    world = SimpleNamespace(pg_map=open_groups)
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    assert nccl_failure() is failure
