"""Lessons 3 and 5: ``average_gradients`` leaves the mean over all ranks in every gradient."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.profiling.comm_trace import MessageRecorder
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile
from lab.proofs import Case
from lab.proofs.equivalence import FunctionSync, RankErrors, combine, errors_on_this_rank

_CASE = Case(unused=False)


def check_gather_scatter(student: StudentFile, say: Say) -> float:
    """Check lesson 3; return how many times the gradients' size passes rank 0's link on 5 ranks."""
    # Every message begins or ends at rank 0, so what all ranks send passes its link.
    return sum(_check_averaging(student, say, cut=False))


def check_ring(student: StudentFile, say: Say) -> float:
    """Check lesson 5; return how many times the gradients' size rank 0 sends on 5 ranks."""
    sent = _check_averaging(student, say, cut=True)
    mean = sum(sent) / len(sent)
    if max(sent) > 1.01 * mean or min(sent) == 0:
        shown = ", ".join(f"{times:.2f}" for times in sent)
        raise Mistake(f"the ranks send {shown} times the gradients' size: in a ring all send alike")
    return sent[0]


def _check_averaging(student: StudentFile, say: Say, *, cut: bool) -> list[float]:
    """Check ``average_gradients`` on 2, 3 and 5 ranks.

    Returns how many times the gradients' size each of 5 ranks has sent. With ``cut``, problems are
    told of a ring's chunks, else of each parameter.
    """
    for size in (2, 3, 5):  # on 2 ranks a literal 2 passes, and a ring in the wrong direction
        found = student.on_ranks(size, _average_known_gradients, cut)
        sent = [times for _, times in found]
        for rank, (problem, _) in enumerate(found):
            if problem:
                raise Mistake(f"rank {rank} ends with {problem}")
        errors = student.on_ranks(size, _train)
        result = combine(size, _CASE, errors)
        if not result:
            raise Mistake(f"the mean of equal shards is right, but not with others: {result}")
        say(f"each gradient becomes the mean of all ranks'. Trained on {result}")
    return sent


def _train(student: Namespace) -> RankErrors:
    """Train with the function; return this rank's differences from one process."""

    def average(model: nn.Module) -> None:
        # Gloo copies memory as it lies, and the engine's channels_last is not this lesson's subject
        student["average_gradients"](model.to(memory_format=torch.contiguous_format))

    return errors_on_this_rank(dist.get_rank(), dist.get_world_size(), FunctionSync(average), _CASE)


def _average_known_gradients(student: Namespace, cut: bool) -> tuple[str | None, float]:
    """Return what is wrong with this rank's gradients, and how many times their size it sent."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()  # 60: equal chunks
    seeded = torch.Generator().manual_seed(1)
    before = torch.randn(size, 60, dtype=torch.float64, generator=seeded)
    parts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    own = before[rank].split(list(parts.values()))
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        parameter.grad = gradient.clone().view_as(parameter)
    with MessageRecorder() as recorder:
        student["average_gradients"](model)
    sent = sum(message.sent_bytes for message in recorder.messages) / before[rank].nbytes
    after: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.grad is None:
            return "a gradient that is None", sent
        after.append(parameter.grad.flatten())
    if cut:
        parts = {f"chunk {number} of {size}": 60 // size for number in range(size)}
    return diagnose(torch.cat(after), before, parts), sent


def diagnose(after: Tensor, before: Tensor, parts: Mapping[str, int]) -> str | None:
    """Say what is wrong with a rank's gradients, which should be the mean; None if nothing is.

    after : of shape (n,). before : of shape (ranks, n). parts : names of consecutive parts, with
    their lengths.
    """
    lengths = list(parts.values())
    found_parts = after.split(lengths)
    given_parts = before.split(lengths, dim=1)
    for name, found, given in zip(parts, found_parts, given_parts, strict=True):
        problem = _diagnose_part(name, found, given)
        if problem:
            return problem
    return None


def _diagnose_part(name: str, found: Tensor, given: Tensor) -> str | None:
    """Say what is wrong with a part. found : of shape (n,). given : of shape (ranks, n)."""
    size = len(given)
    shares = torch.linalg.lstsq(given.T, found).solution  # found = shares @ given
    if not torch.allclose(shares @ given, found):
        return (
            f"numbers in {name} that are no sum of the ranks' gradients there: has another "
            "part got into it?"
        )
    if not torch.allclose(shares, shares[0]):
        told = " + ".join(f"{share:z.3f} g{rank}" for rank, share in enumerate(shares.tolist()))
        return (
            f"{told} in {name}, where g0 is rank 0's own gradient: it should be "
            f"{1 / size:.3f} of each"
        )
    if torch.allclose(shares * size, torch.ones_like(shares)):
        return None
    times = float(shares.sum())
    told = f"{times:.3f} times the mean"
    if round(times, 3) == size:
        told = f"the sum, {told}"
    return f"{told} on {size} ranks, in {name}: divide the sum by the number of ranks, once"
