"""Lessons 3 and 5: ``average_gradients`` leaves the mean over all ranks in every gradient."""

import functools
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.profiling.comm_trace import MessageRecorder
from common.profiling.records import SentMessage
from lab.learn.student_file import Namespace, Say, StudentFile, Wrong
from lab.proofs import Case, RankError, check_equivalence

SIZES = (2, 3, 5)
"""A literal 2, and an order that fits only one other rank, pass on 2 ranks."""

Messages = list[list[SentMessage]]  # of each rank


def check_gather_scatter(student: StudentFile, say: Say) -> float:
    """Check lesson 3; return how many times the gradients' size passed rank 0's link on 5 ranks."""
    messages = check_averaging(student, say)
    sent = sum(message["sent_bytes"] for of_rank in messages for message in of_rank)
    return sent / sum(parameter.nbytes for parameter in _model().parameters())


def check_averaging(student: StudentFile, say: Say) -> Messages:
    """Check ``average_gradients`` on each of ``SIZES``; return what 5 ranks have sent."""
    for size in SIZES:
        found = student.on_ranks(size, _average_known_gradients)
        for rank, (problem, _) in enumerate(found):
            if problem:
                raise Wrong(f"rank {rank} ends with {problem}")
        say(f"on {size} ranks every gradient becomes the mean of all ranks'")
    path = student.path
    try:
        results = check_equivalence(
            lambda model: _loaded(path)["average_gradients"](model),
            sizes=SIZES,
            case=Case(unused=False),
        )
    except RankError as error:
        raise Wrong(str(error)) from error
    for result in results:
        if not result:
            raise Wrong(str(result))
        say(str(result))
    return [messages for _, messages in found]


@functools.cache
def _loaded(path: Path) -> Namespace:
    return StudentFile(path).load()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).double()


def _average_known_gradients(student: Namespace) -> tuple[str | None, list[SentMessage]]:
    """Return what is wrong with this rank's gradients afterwards, and what it has sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, generator = _model(), torch.Generator().manual_seed(1)
    given = {
        name: torch.randn((size, *parameter.shape), dtype=parameter.dtype, generator=generator)
        for name, parameter in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        parameter.grad = given[name][rank].clone()
    with MessageRecorder() as recorder:
        student["average_gradients"](model)
    recorder.finish()
    problems = [
        f"{problem} ({name})"
        for name, parameter in model.named_parameters()
        if (problem := diagnose(parameter.grad, given[name], rank))
    ]
    return next(iter(problems), None), recorder.messages


def diagnose(found: Tensor | None, given: Tensor, rank: int) -> str | None:
    """Say what this rank's gradient is after the exchange; None if it is the mean.

    given : of shape (ranks, ...), every rank's gradient before it.
    """
    if found is None:
        return "no gradient, None"
    size, mean = len(given), given.mean(0)
    times = float((found * mean).sum() / (mean * mean).sum())
    if torch.allclose(found, times * mean) and not math.isclose(times, 1, rel_tol=1e-6):
        return (
            f"{'the sum, ' if math.isclose(times, size) else ''}{times:.3f} times the mean on "
            f"{size} ranks: divide the sum once, by the number of ranks that the group tells"
        )
    looks: dict[str | None, Tensor] = {
        None: mean,
        "its own gradient, as before: this tensor was not exchanged": given[rank],
        **{f"rank {other}'s gradient": given[other] for other in range(size)},
        **{
            f"the mean without rank {other}'s gradient": mean - given[other] / size
            for other in range(size)
        },
    }
    for what, tensor in looks.items():
        if torch.allclose(found, tensor):
            return what
    return "neither the mean nor any rank's gradient"
