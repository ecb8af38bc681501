"""Lessons 3 and 5: the mean over all ranks in every gradient, in a training that uses it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.profiling.comm_trace import MessageRecorder
from lab.learn.causes import Part, cause_of, parts_of, told
from lab.learn.program import KEPT_STEPS, run_program
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile
from lab.learn.verdict import judge_ranks
from lab.proofs import Case
from lab.proofs.equivalence import FunctionSync, RankErrors, combine, errors_on_this_rank

# First 3: on 2 ranks a literal 2 passes, and a ring in the wrong direction.
SIZES = (3, 2, 5)
GLOBAL_BATCH = 64
_CASE = Case(unused=False)


def check_gather_scatter(student: StudentFile, say: Say) -> float:
    """Check lesson 3; return how many times the gradients' size passes rank 0's link on 5 ranks."""
    # Every message begins or ends at rank 0, so what all ranks send passes its link.
    return sum(_check_averaging(student, say, ring=False))


def check_ring(student: StudentFile, say: Say) -> float:
    """Check lesson 5; return how many times the gradients' size rank 0 sends on 5 ranks."""
    sent = _check_averaging(student, say, ring=True)
    mean = sum(sent) / len(sent)
    if max(sent) > 1.01 * mean or min(sent) == 0:
        shown = ", ".join(f"{times:.2f}" for times in sent)
        raise Mistake(f"the ranks send {shown} times the gradients' size: in a ring all send alike")
    return sent[0]


@dataclass
class Averaging:
    """What a rank found.

    problem : the first thing that is wrong, on any rank; what comes after it is not checked.
    sent : how many times the gradients' size this rank sent.
    errors : in a training with the function, against one process.
    """

    problem: str | None = None
    sent: float = 0.0
    errors: RankErrors = field(default_factory=RankErrors)


def _check_averaging(student: StudentFile, say: Say, *, ring: bool) -> list[float]:
    """Check the function and the program; return what each of 5 ranks has sent.

    ring : problems are told of a ring's chunks, else of each parameter.
    """
    for size in SIZES:
        found = student.on_ranks(size, _check_on_rank, student.path, ring)
        if found[0].problem:
            raise Mistake(found[0].problem)
        result = combine(size, _CASE, [rank.errors for rank in found])
        if not result:
            raise Mistake(f"the mean of equal shards is right, but not with others: {result}")
        say(f"each gradient becomes the mean of all ranks'. Trained on {result}")
        if size < max(SIZES):
            say(f"your program on {size} ranks: equal weights, those of one process")
    return [rank.sent for rank in found]


def _check_on_rank(student: Namespace, path: Path, ring: bool) -> Averaging:
    """Check the function on known gradients, then in a training, then the program as it is."""
    size = dist.get_world_size()
    found = Averaging()
    found.problem, found.sent = _average_known_gradients(student, ring)
    if found.problem is None:
        found.errors = _train(student)
    if found.problem is None and size < max(SIZES):
        steps = None if size == min(SIZES) else KEPT_STEPS  # once to its end
        found.problem = judge_ranks(run_program(path, steps=steps), global_batch=GLOBAL_BATCH)
    return found


def _train(student: Namespace) -> RankErrors:
    """Train with the function; return this rank's differences from one process."""

    def average(model: nn.Module) -> None:
        # Gloo copies memory as it lies, and the engine's channels_last is not this lesson's subject
        student["average_gradients"](model.to(memory_format=torch.contiguous_format))

    return errors_on_this_rank(dist.get_rank(), dist.get_world_size(), FunctionSync(average), _CASE)


def _average_known_gradients(student: Namespace, ring: bool) -> tuple[str | None, float]:
    """Return what is wrong with all ranks' gradients, and how many times their size this one sent.

    Each rank has weights of its own, so that averaged weights show.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()  # 60: equal chunks
    seeded = torch.Generator().manual_seed(1)
    before = torch.randn(size, 60, dtype=torch.float64, generator=seeded)
    lengths = {name: parameter.numel() for name, parameter in model.named_parameters()}
    own = before[rank].split(list(lengths.values()))
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        parameter.grad = gradient.clone().view_as(parameter)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    with MessageRecorder() as recorder:
        student["average_gradients"](model)
    sent = sum(message.sent_bytes for message in recorder.messages) / before[rank].nbytes
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - weights
    after = [
        p.new_full((p.numel(),), torch.nan) if p.grad is None else p.grad.flatten()
        for p in model.parameters()
    ]
    rows = _from_all_ranks(torch.cat([torch.cat(after), moved, torch.tensor([sent])]))
    if ring:
        lengths = {f"chunk {number} of {size}": 60 // size for number in range(size)}
    return _problem_of(rows, before, lengths, ring=ring), sent


def _from_all_ranks(row: Tensor) -> Tensor:
    """Return the rows of all ranks, of shape (ranks, n). Collective."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def _problem_of(rows: Tensor, before: Tensor, lengths: dict[str, int], *, ring: bool) -> str | None:
    """Return what is wrong with the ranks' gradients.

    rows : by rank the 60 gradients after the averaging, what it added to the 60 weights, and what
    was sent. before : of shape (ranks, 60).
    """
    after = rows[:, :60]
    moved = rows[:, 60:120].norm(dim=1)
    exchanged = bool(rows[:, 120].any())
    if after.isnan().any():
        rank = int(after.isnan().any(dim=1).int().argmax())
        return f"rank {rank} ends with a gradient that is None (or no number): leave the mean in it"
    if moved.any():
        rank = int(moved.argmax())
        evidence = f"average_gradients changes rank {rank}'s parameters and must change their .grad"
        if torch.allclose(after, before):
            return told(
                "weights-averaged", "the weights are averaged in place of the gradients", evidence
            )
        return f"the weights change: {evidence} alone. optimizer.step() changes them"
    parts = parts_of(after, before, lengths)
    if ring and exchanged:
        return _wrong_chunk(parts) or cause_of(parts, exchanged=exchanged)
    return cause_of(parts, exchanged=exchanged)


def _wrong_chunk(parts: Sequence[Part]) -> str | None:
    """Say which of a ring's loops sends a wrong chunk; None if the chunks are alike or right."""
    wrong = [part for part in parts if not part.right]
    matrices = [part.matrix for part in parts]
    alike = all(torch.allclose(matrix, matrices[0], atol=1e-6) for matrix in matrices)
    if not wrong or alike:
        return None
    complete = [_has_mean(part) for part in parts]
    loop = "the second loop passes on a wrong chunk, or replaces a wrong one"
    if not all(complete):
        loop = "the first loop adds a wrong chunk, or sends one"
    return told(
        "not-the-mean",
        loop,
        wrong[0].evidence(),
        "Follow one chunk through the page's table.",
    )


def _has_mean(part: Part) -> bool:
    """Return whether some rank holds the mean of this part."""
    right = torch.full((part.size,), 1 / part.size, dtype=torch.float64)
    return any(row is not None and torch.allclose(row, right, atol=1e-6) for row in part.rows)
