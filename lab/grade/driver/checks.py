"""What a course's driver is made of: the one module of this project that it can import.

A driver is a Python file with ``PARTS``: by the name of a part in the rubric, its checks. Each
rank, in a group that has been joined (Gloo, on the CPU), imports the student's file and runs the
checks in their order. A check gets the student's module and yields a ``Flaw`` for each thing that
is wrong. ``averaged`` compares gradients with the mean over the ranks, ``close`` tensors, and
``Messages`` counts what a rank sends. A driver may have ``PATHS``: folders of a submission,
relative to its own, in which imports are found as well.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .student import Place, calling_line

# Operators of torch.distributed that carry no data of their own.
_SILENT = ("barrier", "monitored_barrier_", "wait_tensor", "recv_", "recv_any_source_")
# Operators whose first argument is what they receive into, and the second what they send.
_WITH_OUTPUT = (
    *("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_", "alltoall_base_"),
)
# Numbers of a parameter that are reported: enough to tell the weights of some ranks.
_MOST_NUMBERS = 64


@dataclass
class Gradients:
    """What all ranks computed and got; the grader says what the one is of the other.

    lengths : how many numbers there are of each parameter, by name.
    own, got : by rank the numbers of all parameters, one after another; None: not finite.
    """

    lengths: dict[str, int]
    own: list[list[float | None]]
    got: list[list[float | None]]


@dataclass
class Flaw:
    """Something wrong: ``name`` is one of the rubric's ``[findings]``, or of the audit's.

    evidence : what was seen, in a few words with numbers.
    at : the line of the submission that shows it.
    gradients : those that are not the mean; the grader then finds a more exact name.
    """

    name: str
    evidence: str
    at: Place | None = None
    gradients: Gradients | None = None


@dataclass
class Check:
    """A check of a part.

    Parameters
    ----------
    title : what it looks at, to say that it passed or where the student's code stopped.
    run : gets the student's module; yields what is wrong.
    raises_as : the finding if the student's code raises an error although earlier checks passed.
    """

    title: str
    run: Callable[[Any], Iterator[Flaw]]
    raises_as: str = "raises"


def close(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-2) -> bool:
    """Return whether two tensors agree, up to a share of the largest element of ``expected``."""
    if actual.shape != expected.shape:
        return False
    limit = share * expected.abs().max().item() + 1e-7
    return bool((actual - expected).abs().max().item() <= limit)


def averaged(
    own: Mapping[str, torch.Tensor],
    got: Mapping[str, torch.Tensor | None],
    where: str,
    at: Place | None = None,
) -> Iterator[Flaw]:
    """Yield a flaw unless every rank got the mean of all ranks' gradients. Collective.

    The grader names it: a sum, a wrong divisor, a rank's own gradient, and so on.

    own : this rank's gradients of its own samples, by parameter.
    got : what its optimiser would use, for the same parameters; None counts as zeros.
    where : for example "step 1".
    """
    computed = _of_all_ranks(own.values())
    used: list[torch.Tensor] = []
    for name, gradient in own.items():
        value = got[name]
        used.append(torch.zeros_like(gradient) if value is None else value)
    received = _of_all_ranks(used)
    mean = [torch.stack(of_ranks).mean(0) for of_ranks in zip(*computed)]
    if all(all(map(close, of_rank, mean)) for of_rank in received):
        return
    lengths = {name: len(_sample(gradient)) for name, gradient in own.items()}
    gradients = Gradients(lengths, list(map(_numbers, computed)), list(map(_numbers, received)))
    yield Flaw("not-the-mean", where, at, gradients)


def _of_all_ranks(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return by rank the tensors of all ranks."""
    of_ranks: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size())]
    for tensor in tensors:
        copies = [torch.empty_like(tensor).contiguous() for _ in of_ranks]
        dist.all_gather(copies, tensor.detach().contiguous())
        for of_rank, copy in zip(of_ranks, copies):
            of_rank.append(copy)
    return of_ranks


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers of a tensor, spread over it evenly."""
    return tensor.flatten()[:: -(-tensor.numel() // _MOST_NUMBERS)]


def _numbers(tensors: Iterable[torch.Tensor]) -> list[float | None]:
    numbers = torch.cat([_sample(tensor) for tensor in tensors]).tolist()
    return [number if math.isfinite(number) else None for number in numbers]


# --- messages ---


@dataclass
class Message:
    """A call of torch.distributed that sends something.

    Parameters
    ----------
    name : of its operator, for example ``allreduce_`` or ``send``.
    phase : in which part of a step it began, as set by the check.
    peer : the rank that a ``send`` goes to.
    at : the student's line.
    """

    name: str
    nbytes: int
    phase: str
    peer: int | None
    at: Place | None


class Messages(TorchDispatchMode):
    """Keeps the messages that begin while it is entered, however the student calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []
        self.phase = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Note a message, then let it begin."""
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space and name not in _SILENT:
            peer = args[2] if name == "send" else None
            nbytes = _bytes_of(args[1] if name in _WITH_OUTPUT else args[0])
            self.sent.append(Message(name, nbytes, self.phase, peer, calling_line()))
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Keep messages as those of a phase."""
        self.phase = phase
        try:
            with self:
                yield
        finally:
            self.phase = ""


def _bytes_of(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, Iterable):
        return sum(_bytes_of(tensor) for tensor in tensors)
    return 0
