"""One operation of a message plan (``Operation``), and what it sends to whom (``sends_of``).

lab/predict/event_model.py turns operations into seconds. common/profiling/comm_trace.py
counts the bytes of the messages that it records with ``sent_bytes``. Nothing here imports torch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import msgspec

# Copies for each collective: into contiguous memory, for the division, and back.
COPIES_PER_PARAMETER = 3

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
)
KINDS = (*COLLECTIVES, "exchange")

Compressor = Literal["", "search", "project", "cast"]
"""How gradients are made smaller: by a search for the largest entries (top-k), as products of thin
matrices (PowerSGD), by rounding to fewer bits; with what undoes it. "": not at all."""

Among = Literal["all", "node", "leaders"]
"""Which ranks an operation is among: all, those of each node, or the first one of each node."""


class Operation(msgspec.Struct, frozen=True):  # a struct, since predictions make many
    """One collective, or one round of sends and receives, on the slowest path through a step.

    Parameters
    ----------
    kind : one of ``KINDS``; "exchange" is one round of simultaneous point-to-point messages.
    nbytes : bytes of the tensor that a rank passes in. For gather, scatter and all_gather this is
        one rank's part; for an exchange, the longest message of the round.
    count : number of such operations in a row, each waiting for the one before.
    summed_bytes, copied_bytes : what the strategy's own code adds and copies in memory around each
        one, on the busiest rank.
    ready_bytes : if it may start during backward, the bytes of gradients that backward must have
        computed by then (it goes through the parameters in reverse); None: it starts afterwards.
    needed_bytes : if it runs during the next forward, the bytes of parameters that forward may use,
        in their order, before it must have ended. It starts after the update; None: before it.
    among : the ranks that take part; with "node" every node does the same at the same time.
    partner : of an exchange, the rank with which a rank exchanges, None if with none; by default
        the next one. It says how many messages pass the link of a node with several ranks.
    compressor, compressed_bytes : how the strategy compresses gradients around each one, and the
        bytes of these gradients, on every rank.
    """

    kind: str
    nbytes: int
    count: int = 1
    summed_bytes: int = 0
    copied_bytes: int = 0
    ready_bytes: int | None = None
    needed_bytes: int | None = None
    among: Among = "all"
    partner: Callable[[int], int | None] | None = None
    compressor: Compressor = ""
    compressed_bytes: int = 0


class GradientSize(int):
    """The bytes of a gradient, an int with its ``shape`` and ``itemsize`` (bytes of an entry).

    A plain int stands for a vector of 4-byte entries.
    """

    shape: tuple[int, ...]
    itemsize: int

    def __new__(cls, shape: Sequence[int], itemsize: int = 4) -> "GradientSize":
        """Return the size of a gradient of that shape."""
        size = super().__new__(cls, math.prod(shape) * itemsize)
        size.shape = tuple(shape)
        size.itemsize = itemsize
        return size

    def __reduce__(self) -> tuple[type["GradientSize"], tuple[tuple[int, ...], int]]:
        """Let pickle and copy keep shape and itemsize."""
        return GradientSize, (self.shape, self.itemsize)

    @property
    def entries(self) -> int:
        """The number of entries."""
        return self // self.itemsize

    @classmethod
    def of(cls, parameters: Iterable[Any]) -> "list[GradientSize]":
        """Return the gradient sizes of those ``parameters`` that require a gradient."""
        return [cls(p.shape, p.element_size()) for p in parameters if p.requires_grad]


def with_shape(size: int) -> GradientSize:
    """Return ``size`` itself, or a vector of 4-byte entries for a plain int."""
    return size if isinstance(size, GradientSize) else GradientSize((size // 4,))


# What each rank passes on around a ring, in tensors of a rank, by the number of ranks.
_AROUND_RING: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda ranks: Fraction(2 * (ranks - 1), ranks),
    "all_gather": lambda ranks: Fraction(ranks - 1),
    "reduce_scatter": lambda ranks: Fraction(ranks - 1, ranks),
    "reduce": lambda ranks: Fraction(ranks - 1, ranks),
}


class Sends(NamedTuple):
    """What a rank sends to others: ``nbytes`` to each one of ``receivers``."""

    receivers: Sequence[int]
    nbytes: Fraction

    @property
    def total(self) -> Fraction:
        """The bytes to all receivers together."""
        return len(self.receivers) * self.nbytes


def sent_bytes(kind: str, nbytes: int, *, rank: int, ranks: int, root: int = 0) -> Fraction:
    """Return the payload bytes that ``rank`` sends in one collective; see ``sends_of``."""
    sends = sends_of(kind, nbytes, rank=rank, ranks=ranks, root=root)
    return sum((send.total for send in sends), Fraction(0))


def sends_of(kind: str, nbytes: int, *, rank: int, ranks: int, root: int = 0) -> list[Sends]:
    """Return what ``rank`` sends to whom in one collective, with Gloo's algorithms.

    all_reduce, all_gather and reduce are rings; after its ring, reduce collects the N parts at the
    root. broadcast is a binomial tree; gather and scatter go straight to and from the root, in
    all_to_all each part goes straight to its rank. reduce_scatter is the first half of all_reduce's
    ring, as NCCL and ``sharded`` run it; Gloo's own call is a whole all_reduce.
    Of an exchange only its plan knows the bytes. They are fractions because the parts of a ring are
    M/N bytes.
    """
    if kind in _AROUND_RING:
        found = [Sends([(rank + 1) % ranks], nbytes * _AROUND_RING[kind](ranks))]
        if kind == "reduce" and rank != root:
            found.append(Sends([root], Fraction(nbytes, ranks)))
        return found
    if kind == "all_to_all":
        return _to_all_but(rank, ranks, Fraction(nbytes, ranks))
    if kind == "gather":
        return [] if rank == root else [Sends([root], Fraction(nbytes))]
    if kind == "scatter":
        return _to_all_but(root, ranks, Fraction(nbytes)) if rank == root else []
    assert kind == "broadcast", kind
    below_root = (rank - root) % ranks
    children = [(rank + (1 << level)) % ranks for level in range(tree_children(below_root, ranks))]
    return [Sends(children, Fraction(nbytes))]


def _to_all_but(rank: int, ranks: int, nbytes: Fraction) -> list[Sends]:
    return [Sends(range(rank), nbytes), Sends(range(rank + 1, ranks), nbytes)]


def tree_children(rank: int, ranks: int) -> int:
    """Return how many children ``rank`` has in a binomial tree over ``ranks`` with root 0.

    The children of a rank are rank + 1, 2, 4, ... below its own lowest bit that is 1.
    """
    lowest_bit = rank & -rank or ranks
    steps = (1 << level for level in range(ranks.bit_length()))
    return sum(step < lowest_bit and rank + step < ranks for step in steps)
