"""Under NCCL a lost rank is named, though the thread that trains waits for the GPU.

The GPU is a thread (guarded_rank.py); ranks, store, signs of life and signals are real.
"""

import re
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError

from common.distributed.failures import broken_collective, cause_of, explain_collective_failure
from tests.helpers import free_port, user_environment
from tests.helpers.processes import Ended, Started

SCRIPT = Path(__file__).with_name("guarded_rank.py")


def start(what: str, folder: Path) -> list[Started]:
    """Start both ranks; return them once they are in the group."""
    port = free_port()
    ranks = [
        Started(
            ["python", str(SCRIPT), str(rank), str(port), what],
            cwd=folder,
            env=user_environment(),
            forked=True,
        )
        for rank in (0, 1)
    ]
    for one in ranks:
        one.wait_for("ready")
    return ranks


def end_of(waiting: Started) -> Ended:
    ended = waiting.end(timeout_seconds=40)
    assert ended.status == 1, ended
    assert ended.err.count("error (rank") == 1, ended.err
    return ended


def test_the_rank_that_waits_for_a_killed_one_names_it(tmp_path: Path) -> None:
    ranks = start("collective 0", tmp_path)
    ranks[1].send(signal.SIGKILL)
    ended = end_of(ranks[0])
    assert re.match(
        r"error \(rank 0\): rank 1 \(127.0.0.1\) ended or was killed at step [67] \(", ended.err
    )
    assert "(a collective broke here)" in ended.err


@pytest.mark.slow
def test_other_ends_are_named_too_and_long_work_is_none(tmp_path: Path) -> None:
    without_rank0 = start("collective 1", tmp_path)
    without_rank0[0].send(signal.SIGKILL)
    stopped = start("collective 0", tmp_path)
    stopped[1].send(signal.SIGSTOP)
    late = start("collective 0", tmp_path)  # rank 1 works for longer than the timeout
    failing = start("fails", tmp_path)
    busy = start("busy", tmp_path)

    found = end_of(without_rank0[1]).err
    assert re.match(
        r"error \(rank 1\): rank 0 \(127.0.0.1\) ended or was killed at step [67] ", found
    )
    found = end_of(stopped[0]).err
    assert re.match(
        r"error \(rank 0\): rank 1 \(127.0.0.1\) has not moved since step [67], ", found
    )
    assert "rank 1 (127.0.0.1) has been in data of step 7 for" in end_of(late[0]).err
    assert "rank 1 stopped: the disk is full. (a collective broke here" in end_of(failing[0]).err
    assert failing[1].end().err == "own error: the disk is full\n"
    for rank in busy:
        ended = rank.end(timeout_seconds=40)
        assert (ended.status, ended.out) == (0, "ready\nended well\n"), ended


NCCL = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {what}, NCCL version 2.28.9
{kind}
Last error:
{last}
Exception raised from create at NCCLUtils.cpp:94 (most recent call first):"""


@pytest.mark.parametrize(
    ("what", "kind", "last", "cause", "lost"),
    [
        (
            "invalid usage (run with NCCL_DEBUG=WARN for details)",
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5c000",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5c000",
            False,
        ),
        (
            "remote process exited or there was a network error",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely.",
            "",
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process "
            "exited or there was a network error, NCCL version 2.28.9",
            True,
        ),
        (
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.",
            "socketProgress: Connection closed by remote peer node2<45678>",
            "socketProgress: Connection closed by remote peer node2<45678>",
            True,
        ),
    ],
)
def test_nccls_cause_stands_below_last_error(
    what: str, kind: str, last: str, cause: str, *, lost: bool
) -> None:
    error = DistBackendError(NCCL.format(what=what, kind=kind, last=last))
    assert cause_of(error) == cause
    assert (broken_collective(error) is not None) == lost
    assert (f"(torch: {cause})" in (explain_collective_failure(error) or "")) == lost
    assert cause_of(ValueError("first\nsecond")) == "first"


def test_a_hook_of_backward_is_not_named_after_distributed_data_parallel() -> None:
    def broke(_: torch.Tensor) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:29500")

    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(broke)
    with pytest.raises(RuntimeError) as caught:
        weight.sum().backward()
    assert broken_collective(caught.value) == "a collective"
