"""What a course's driver is made of: the one module of this project that it can import.

A driver is a Python file with ``PARTS``: by the name of a part in the rubric, its checks. A check
has two halves. ``run`` is called in each rank, in a group that has been joined (Gloo, on the CPU),
beside the student's code: it gets the student's module and the ``Rank``, calls the student's
functions on data made from the rank's seeds, and returns what came of it. ``judge`` is called once,
in another process, in which nothing of the student's has been imported: it gets what all ranks
returned, computes by itself what is right, and yields a ``Flaw`` for each thing that is wrong.
``averaged`` compares gradients with the mean over the ranks, ``close`` tensors, and ``Messages``
counts what a rank sends. A driver may have ``PATHS``: folders of a submission, relative to its own,
in which imports are found as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .student import Place, calling_line

# Operators of torch.distributed that carry no data of their own.
_SILENT = ("barrier", "monitored_barrier_", "wait_tensor", "recv_", "recv_any_source_")
# Operators whose first argument is what they receive into, and the second what they send.
_WITH_OUTPUT = (
    *("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_", "alltoall_base_"),
)
# Numbers of a parameter that are fitted: enough to tell the weights of some ranks.
_MOST_NUMBERS = 64


@dataclass(frozen=True)
class Rank:
    """A rank, and the numbers from which it makes its data.

    The numbers are new for each run, and no rank knows the seed of another one: what it does not
    receive from the others it cannot compute.

    seed : of this rank alone. common : the same on all ranks.
    """

    number: int
    size: int
    seed: int
    common: int

    def generator(self, stream: int = 0) -> torch.Generator:
        """Return a generator of the rank's own numbers; each stream has others."""
        return torch.Generator().manual_seed(self.seed + stream)

    def shared_generator(self, stream: int = 0) -> torch.Generator:
        """Return a generator of the same numbers on all ranks."""
        return torch.Generator().manual_seed(self.common + stream)


@dataclass(frozen=True)
class Returned:
    """What a check's ``run`` returned on a rank: ``returned["output"]``, for example.

    It may be forged: a name may be missing (KeyError), a list shorter, a shape another.
    """

    rank: Rank
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass
class Flaw:
    """Something wrong: ``name`` is one of the rubric's ``[findings]``, or of the audit's.

    evidence : what was seen, in a few words with numbers.
    at : the line of the submission that shows it.
    """

    name: str
    evidence: str
    at: Place | None = None


@dataclass
class Check:
    """A check of a part.

    Parameters
    ----------
    title : what it looks at, to say that it passed or where the student's code stopped.
    run : gets the student's module and the rank; returns, by names, tensors, messages, numbers,
        texts, None, and lists and dicts of these. Tensors arrive in 32 bits.
    judge : gets what all ranks returned, by rank; yields what is wrong.
    raises_as : the finding if the student's code raises an error although earlier checks passed.
    """

    title: str
    run: Callable[[Any, Rank], Mapping[str, Any]]
    judge: Callable[[Sequence[Returned]], Iterator[Flaw]]
    raises_as: str = "raises"


def close(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-2) -> bool:
    """Return whether two tensors agree, up to a share of the largest element of ``expected``."""
    if actual.shape != expected.shape:
        return False
    limit = share * expected.abs().max().item() + 1e-7
    return bool((actual - expected).abs().max().item() <= limit)


def averaged(
    own: Sequence[Mapping[str, torch.Tensor]],
    got: Sequence[Mapping[str, torch.Tensor | None]],
    where: str,
    at: Place | None = None,
) -> Iterator[Flaw]:
    """Yield a flaw unless every rank got the mean of all ranks' gradients. For ``judge`` alone.

    It names what the ranks got instead: a sum, a wrong divisor, a rank's own gradient, and so on.

    own : by rank, the gradients of its own samples, by parameter.
    got : by rank, what its optimiser would use, for the same parameters; None counts as zeros.
    where : for example "step 1".
    """
    # Here, since a rank's Python does not have it.
    from lab.grade.evidence_of_ranks import named_evidence

    used: list[dict[str, torch.Tensor]] = []
    for of_rank, computed in zip(got, own, strict=True):
        filled: dict[str, torch.Tensor] = {}
        for name, gradient in computed.items():
            value = of_rank[name]
            filled[name] = torch.zeros_like(gradient) if value is None else value
        used.append(filled)
    right = True
    for name in own[0]:
        mean = torch.stack([of_rank[name] for of_rank in own]).mean(0)
        right = right and all(close(of_rank[name], mean) for of_rank in used)
    if right:
        return
    lengths = {name: len(_sample(gradient)) for name, gradient in own[0].items()}
    name, sentence = named_evidence(lengths, _numbers(own), _numbers(used))
    yield Flaw(name, f"{where}: {sentence}", at)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers of a tensor, spread over it evenly."""
    return tensor.flatten()[:: -(-tensor.numel() // _MOST_NUMBERS)]


def _numbers(gradients: Iterable[Mapping[str, torch.Tensor]]) -> list[list[float]]:
    return [torch.cat([_sample(one) for one in named.values()]).tolist() for named in gradients]


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
