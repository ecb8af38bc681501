"""Lessons 3 and 5: the mean over all ranks in every gradient, in a training that uses it.

``average_gradients`` is called with known gradients: what became of them, and which messages it
sent. Then a training uses it, and at last the program runs as it is.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.profiling.comm_trace import MessageRecorder
from common.say import count
from lab.evidence import Evidence
from lab.learn.causes import cause_of, ends_with, parts_of, told
from lab.learn.program import (
    fault_of,
    flat,
    flat_gradients,
    from_all_ranks,
    kinds_of,
    on_watched_ranks,
    run_program,
)
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile
from lab.proofs import Case
from lab.proofs.equivalence import FunctionSync, RankErrors, combine, errors_on_this_rank

# First 3: on 2 ranks a literal 2 passes, and a ring in the wrong direction.
SIZES = (3, 2, 5)
GLOBAL_BATCH = 64
_CASE = Case(unused=False)
_NUMBERS = 60  # of known gradients: 2, 3 and 5 equal chunks


def check_gather_scatter(student: StudentFile, say: Say) -> float:
    """Check lesson 3; return how many times the gradients' size passes rank 0's link on 5 ranks."""
    sent = _check_averaging(student, say, ring=False)
    # Every message was seen to begin or end at rank 0, so what all ranks send passes its link.
    return sum(rank.total for rank in sent)


def check_ring(student: StudentFile, say: Say) -> float:
    """Check lesson 5; return how many times the gradients' size rank 0 sends on 5 ranks."""
    return _check_averaging(student, say, ring=True)[0].total


def check_function(student: StudentFile, *, size: int) -> None:
    """Raise Mistake unless lesson 3's function averages known gradients through rank 0."""
    found = student.on_ranks(size, _average_known_gradients, False)
    problem = found[0][0] or _wrong_way([sent for _, sent in found], ring=False)
    if problem:
        raise Mistake(f"{student.path}: {problem}")


class Sent(NamedTuple):
    """What a rank has sent in one call of ``average_gradients``.

    calls : of torch.distributed, by their kinds.
    times : how many times the gradients' size this rank sent with each kind.
    to_next : how many messages it sent to the next rank.
    """

    calls: Mapping[str, int]
    times: Mapping[str, float]
    to_next: int

    @property
    def total(self) -> float:
        return sum(self.times.values())


@dataclass
class Averaging:
    """What a rank found.

    problem : the first thing that is wrong, on any rank; what comes after it is not checked.
    sent : by this rank.
    errors : in a training with the function, against one process.
    """

    problem: str | None
    sent: Sent
    errors: RankErrors = field(default_factory=RankErrors)


def _check_averaging(student: StudentFile, say: Say, *, ring: bool) -> list[Sent]:
    """Check the function and the program; return what each of 5 ranks has sent.

    ring : problems are told of a ring's chunks, else of each parameter.
    """
    for size in SIZES:
        found, recording = on_watched_ranks(
            student, size, _check_on_rank, student.path, ring, global_batch=GLOBAL_BATCH
        )
        sent = [rank.sent for rank in found]
        problem = found[0].problem or _wrong_way(sent, ring=ring)
        if problem is None and size < max(SIZES):
            problem = fault_of(recording) or _other_way(kinds_of(recording), ring=ring)
        if problem:
            raise Mistake(problem)
        result = combine(size, _CASE, [rank.errors for rank in found])
        if not result:
            raise Mistake(f"the mean of equal shards is right, but not with others: {result}")
        say(f"each gradient becomes the mean of all ranks'. Trained on {result}")
        say(_way_in_words(sent, ring=ring))
        if size < max(SIZES):
            say(f"your program on {size} ranks: equal weights, those of one process")
    return sent


def _way_in_words(sent: Sequence[Sent], *, ring: bool) -> str:
    """Say what the ranks have sent, and how."""
    size = len(sent)
    if ring:
        return (
            f"on {size} ranks each sends {count(sent[0].to_next, 'message')}, all to the next "
            f"rank, {sent[0].total:.3g} times the gradients' size"
        )
    arrives = sum(rank.total for rank in sent[1:])
    return (
        f"on {size} ranks {arrives:.3g} times the gradients' size arrives at rank 0 with gather, "
        f"and {sent[0].total:.3g} times leaves it with scatter"
    )


def _kinds(ring: bool) -> set[str]:
    """Return the calls with which a lesson averages."""
    return {"send", "recv"} if ring else {"gather", "scatter"}


def _wrong_way(sent: Sequence[Sent], *, ring: bool) -> str | None:
    """Say which rank has averaged in another way than the lesson's; None if none has."""
    size = len(sent)
    for rank, own in enumerate(sent):
        if set(own.calls) != _kinds(ring):
            calls = [f"{kind} {count(number, 'time')}" for kind, number in own.calls.items()]
            called = ", ".join(calls) or "nothing"
            way = "dist.gather to rank 0 and dist.scatter from rank 0"
            if ring:
                way = "messages from each rank to the next, dist.isend and dist.recv"
            return (
                f"the mean is right, and comes in another way: on {size} ranks, rank {rank} calls "
                f"{called}. This lesson averages with {way}, and with nothing else"
            )
        problem = _wrong_ring(own, size) if ring else _wrong_root(own, rank, size)
        if problem:
            return f"the mean is right, but on {size} ranks, rank {rank} {problem}"
    return None


def _wrong_ring(own: Sent, size: int) -> str | None:
    """Say what a rank sends in place of a ring's messages; None if it sends those."""
    rounds = 2 * (size - 1)
    messages = own.calls["send"]
    in_chunks = np.isclose(own.total, rounds / size, rtol=0.01)
    if messages == own.to_next == rounds and in_chunks:
        return None
    return (
        f"sends {count(messages, 'message')}, {own.to_next} of them to the next rank, with "
        f"{own.total:.3g} times the gradients' size in all. A ring sends {rounds}, all to the next "
        f"rank, each with 1/{size} of the size: {rounds / size:.3g} times in all"
    )


def _wrong_root(own: Sent, rank: int, size: int) -> str | None:
    """Say what a rank sends in place of its part through rank 0; None if it sends that."""
    gathered, scattered = (own.times[kind] for kind in ("gather", "scatter"))
    right = (0, size - 1) if rank == 0 else (1, 0)
    if np.allclose((gathered, scattered), right, rtol=0.01):
        return None
    return (
        f"sends {gathered:.3g} times the gradients' size with gather and {scattered:.3g} times "
        f"with scatter, not {right[0]} and {right[1]}. Through rank 0 every gradient goes once: "
        "dst=0 and src=0"
    )


def _other_way(kinds: Sequence[set[str]], *, ring: bool) -> str | None:
    """Say which rank's program never calls what its function calls; None if none does."""
    for rank, own in enumerate(kinds):
        if not _kinds(ring) <= own:
            return (
                f"average_gradients is right, but the program trains without it: on {len(kinds)} "
                f"ranks, rank {rank} calls {', '.join(sorted(own))}, and not "
                f"{' and '.join(sorted(_kinds(ring)))}"
            )
    return None


def _check_on_rank(student: Namespace, path: Path, ring: bool, records: Path) -> Averaging:
    """Check the function on known gradients, then in a training, then the program as it is."""
    size = dist.get_world_size()
    found = Averaging(*_average_known_gradients(student, ring))
    if found.problem is None:
        found.errors = _train(student)
    if found.problem is None and size < max(SIZES):
        run_program(path, records=records)
    return found


def _train(student: Namespace) -> RankErrors:
    """Train with the function; return this rank's differences from one process."""

    def average(model: nn.Module) -> None:
        # Gloo copies memory as it lies, and the engine's channels_last is not this lesson's subject
        student["average_gradients"](model.to(memory_format=torch.contiguous_format))

    return errors_on_this_rank(dist.get_rank(), dist.get_world_size(), FunctionSync(average), _CASE)


def _average_known_gradients(student: Namespace, ring: bool) -> tuple[str | None, Sent]:
    """Return what is wrong with all ranks' gradients, and what this one sent.

    Each rank has weights of its own, so that averaged weights show.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    seeded = torch.Generator().manual_seed(1)
    before = torch.randn(size, _NUMBERS, dtype=torch.float64, generator=seeded)
    lengths = {name: parameter.numel() for name, parameter in model.named_parameters()}
    own = before[rank].split(list(lengths.values()))
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        parameter.grad = gradient.clone().view_as(parameter)
    weights = flat(model.parameters())
    recorder = MessageRecorder(nodes=_with_next(rank, size))
    with _Halfway(student) as halfway, recorder:
        student["average_gradients"](model)
    sent = _sent(recorder, before[rank].nbytes)
    moved = flat(model.parameters()) - weights
    found = Averaged(
        from_all_ranks(flat_gradients(model, missing=torch.nan)),
        from_all_ranks(moved),
        from_all_ranks(halfway.numbers),
        bool(from_all_ranks(torch.tensor([sent.total])).any()),
    )
    if ring:
        lengths = {f"chunk {number} of {size}": _NUMBERS // size for number in range(size)}
    return _problem_of(found, before, lengths, ring=ring), sent


def _with_next(rank: int, size: int) -> list[int]:
    """Return a node for each rank, so that only what goes to the next rank stays inside one."""
    return [int(other not in (rank, (rank + 1) % size)) for other in range(size)]


def _sent(recorder: MessageRecorder, gradient_bytes: int) -> Sent:
    """Return what this rank has sent."""
    calls = Counter(message.kind for message in recorder.messages)
    times: defaultdict[str, float] = defaultdict(float)
    for message in recorder.messages:
        times[message.kind] += message.sent_bytes / gradient_bytes
    elsewhere = Counter(message.kind for message in recorder.messages if message.scope == "between")
    return Sent(dict(calls), dict(times), calls["send"] - elsewhere["send"])


@dataclass(frozen=True)
class Averaged:
    """What ``average_gradients`` did to known gradients, of shape (ranks, 60) each.

    after : the gradients; not-a-number where one is None.
    moved : what was added to the weights.
    halfway : the ring's buffer when the second loop began.
    exchanged : whether any rank sent anything.
    """

    after: Tensor
    moved: Tensor
    halfway: Tensor
    exchanged: bool


class _Halfway:
    """Context manager that keeps a ring's buffer as it is when the second loop begins.

    numbers : the buffer, of shape (60,); zeros if there is none.
    """

    def __init__(self, student: Namespace) -> None:
        self.numbers = torch.zeros(_NUMBERS, dtype=torch.float64)
        self._calls = 0
        self._exchange: Any = student.get("exchange")  # lesson 5's
        self._names = student["average_gradients"].__globals__

    def __enter__(self) -> "_Halfway":
        if self._exchange is not None:
            self._names["exchange"] = self._noted
        return self

    def __exit__(self, *_: object) -> None:
        if self._exchange is not None:
            self._names["exchange"] = self._exchange

    def _noted(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Note the buffer, of which ``outgoing`` is a view, and exchange."""
        self._calls += 1
        if self._calls == dist.get_world_size() and outgoing._base is not None:
            self.numbers = outgoing._base.detach().clone().flatten()
        self._exchange(outgoing, incoming)


def _problem_of(
    found: Averaged, before: Tensor, lengths: Mapping[str, int], *, ring: bool
) -> str | None:
    """Return what is wrong with the ranks' gradients. before : of shape (ranks, 60)."""
    gone = found.after.isnan().any(dim=1)
    if gone.any():
        rank = int(gone.int().argmax())
        return f"rank {rank} ends with a gradient that is None (or no number): leave the mean in it"
    moved = found.moved.abs().amax(dim=1)
    if moved.any():
        rank = int(moved.argmax())
        evidence = f"average_gradients changes rank {rank}'s parameters and must change their .grad"
        if torch.allclose(found.after, before):
            sentence = "the weights are averaged in place of the gradients"
            return told("weights-averaged", sentence, evidence)
        return f"the weights change: {evidence} alone. optimizer.step() changes them"
    parts = parts_of(found.after, before, lengths)
    cause = _wrong_chunk(parts, found.halfway, before) if ring and found.exchanged else None
    return cause or cause_of(parts, exchanged=found.exchanged)


def _wrong_chunk(parts: Mapping[str, Evidence], halfway: Tensor, before: Tensor) -> str | None:
    """Say which of a ring's loops has a wrong chunk; None if all chunks are right, or wrong alike.

    halfway : see ``Averaged``. Then rank r should hold the sum in chunk r + 1.
    """
    wrong = {name: part for name, part in parts.items() if not part.right}
    matrices = [part.weights for part in parts.values()]
    alike = all(np.allclose(matrix, matrices[0], atol=1e-6) for matrix in matrices)
    if not wrong or alike:
        return None
    size = len(parts)
    sums = before.sum(0).tensor_split(size)
    loop = "the second loop passes on or replaces a wrong chunk"
    for rank, numbers in enumerate(halfway):
        complete = (rank + 1) % size
        if not torch.allclose(numbers.tensor_split(size)[complete], sums[complete]):
            loop = "the first loop sends a wrong chunk or adds to one"
    cure = "Follow one chunk through the page's table."
    return told("not-the-mean", loop, ends_with(*next(iter(wrong.items()))), cure)
