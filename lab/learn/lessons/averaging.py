"""Lessons 3 and 5: ``average_gradients`` leaves the mean over all ranks in every gradient."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.profiling.comm_trace import MessageRecorder
from lab.learn.causes import Numbers, cause, explain_average
from lab.learn.lessons.whole_program import check_program
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile
from lab.proofs import Case
from lab.proofs.equivalence import FunctionSync, RankErrors, combine, errors_on_this_rank

_CASE = Case(unused=False)
_TRAINING = "03_gather_scatter.py"  # lesson 5 trains with lesson 3's loop
_NUMBERS = 60  # of all gradients: 2, 3 and 5 equal chunks


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
    """Check ``average_gradients`` on 2, 3 and 5 ranks, and then the whole program.

    Returns how many times the gradients' size each of 5 ranks has sent. With ``cut``, problems are
    told of a ring's chunks, else of each parameter.
    """
    for size in (2, 3, 5):  # on 2 ranks a literal 2 passes, and a ring in the wrong direction
        found = student.on_ranks(size, _average_known_gradients)
        problem = _problem(found, cut=cut)
        if problem:
            raise Mistake(problem)
        errors = student.on_ranks(size, _train)
        result = combine(size, _CASE, errors)
        if not result:
            raise Mistake(f"the mean of equal shards is right, but not with others: {result}")
        say(f"each gradient becomes the mean of all ranks'. Trained on {result}")
    sent = [rank.sent for rank in found]
    training = StudentFile(student.path.with_name(_TRAINING)) if cut else student
    for size in (3, 2):
        check_program(student, size, training=training)
    say("the whole program trains as one process does on the ranks' batches together")
    return sent


def _train(student: Namespace) -> RankErrors:
    """Train with the function; return this rank's differences from one process."""

    def average(model: nn.Module) -> None:
        # Gloo copies memory as it lies, and the engine's channels_last is not this lesson's subject
        student["average_gradients"](model.to(memory_format=torch.contiguous_format))

    return errors_on_this_rank(dist.get_rank(), dist.get_world_size(), FunctionSync(average), _CASE)


class Averaged(NamedTuple):
    """What ``average_gradients`` did on a rank.

    gradients : its gradients afterwards, of shape (60,); None if one is None.
    moved : whether it has changed the weights.
    sent : how many times the gradients' size this rank sent.
    """

    gradients: Numbers | None
    moved: bool
    sent: float


def _known_gradients(size: int) -> Tensor:
    """Return the gradients with which the ranks begin, of shape (size, 60)."""
    seeded = torch.Generator().manual_seed(1)
    return torch.randn(size, _NUMBERS, dtype=torch.float64, generator=seeded)


def _small_model() -> nn.Module:
    """Return a model of 60 parameters, which 2, 3 and 5 ranks cut into equal chunks."""
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()


def _average_known_gradients(student: Namespace) -> Averaged:
    """Let the student's function average known gradients."""
    before = _known_gradients(dist.get_world_size())[dist.get_rank()]
    torch.manual_seed(dist.get_rank())  # other weights on each rank: a mean of them would show
    model = _small_model()
    lengths = [parameter.numel() for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before.split(lengths), strict=True):
        parameter.grad = gradient.clone().view_as(parameter)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with MessageRecorder() as recorder:
        student["average_gradients"](model)
    moved = False
    gradients: list[Tensor] = []
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        moved |= not torch.equal(parameter, weight)
        if parameter.grad is not None:
            gradients.append(parameter.grad.flatten())
    complete = len(gradients) == len(weights)
    sent = sum(message.sent_bytes for message in recorder.messages) / before.nbytes
    return Averaged(torch.cat(gradients).numpy() if complete else None, moved, sent)


def _problem(found: Sequence[Averaged], *, cut: bool) -> str | None:
    """Return what is wrong with the ranks' gradients; None if nothing is."""
    size = len(found)
    moved = [rank for rank, averaged in enumerate(found) if averaged.moved]
    if moved:
        return cause(
            "weights-averaged",
            f"average_gradients changes the weights on rank {moved[0]}. Exchange parameter.grad, "
            "and leave the parameter itself to the optimizer",
        )
    gradients = [averaged.gradients for averaged in found if averaged.gradients is not None]
    if len(gradients) < size:
        return cause("not-the-mean", "a gradient is None after average_gradients")
    if all(averaged.sent == 0 for averaged in found):
        return cause("group-unused", "average_gradients sends nothing to any rank")
    parts = {name: weight.numel() for name, weight in _small_model().named_parameters()}
    if cut:
        parts = {f"chunk {number} of {size}": _NUMBERS // size for number in range(size)}
    return explain_parts(gradients, _known_gradients(size).numpy(), parts)


def explain_parts(
    after: Sequence[Numbers], before: Numbers, parts: Mapping[str, int]
) -> str | None:
    """Say what is wrong with the ranks' gradients, which should be the mean; None if nothing is.

    after : by rank, of shape (n,). before : of shape (ranks, n). parts : names of consecutive
    parts, with their lengths.
    """
    problems: dict[str, str] = {}
    first = 0
    for name, length in parts.items():
        own = slice(first, first + length)
        first += length
        found = [gradients[own] for gradients in after]
        problem = explain_average(found, before[:, own], where=f" in {name}")
        if problem:
            problems[name] = problem
    if not problems:
        return None
    told = next(iter(problems.values()))
    keeps_own = told.startswith(cause("own-gradient", ""))
    if keeps_own and len(problems) < len(parts):
        names = ", ".join(problems)
        return cause("some-parameters", f"every rank keeps its own gradient in {names}")
    return told
