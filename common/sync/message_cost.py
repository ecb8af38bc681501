"""What a strategy's step sends, as numbers: ``Operation`` is one line of its plan, ``sent_bytes`` what a rank sends in it.

``MessagePlan.operations`` lists a step's operations; common/cost_model/event_model.py turns them into seconds.
``payload_sent`` counts their bytes, and ``sent_bytes`` those of the messages that common/profiling/comm_trace.py records.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

KINDS = ("all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather", "exchange")


@dataclass(frozen=True)
class Operation:
    """One collective, or one round in which ranks send to one another, on the way that takes longest through a step.

    Parameters
    ----------
    kind : one of ``KINDS``; "exchange" is a round of point-to-point messages, all at once.
    nbytes : bytes of the tensor that a rank hands in: of a gather, a scatter and an all_gather one rank's part, of an
        exchange the longest message of the round.
    count : how many of them follow one another, each waiting for the one before.
    summed_bytes, copied_bytes : what the busiest rank adds and copies in its memory by hand, beside each one.
    ready_bytes : of one that may begin during backward, how many bytes of gradients backward must have made by then (it
        makes them in the order of the parameters, reversed); None where it begins after backward.
    """

    kind: str
    nbytes: int
    count: int = 1
    summed_bytes: int = 0
    copied_bytes: int = 0
    ready_bytes: int | None = None


class GradientSize(int):
    """Bytes of a gradient, with what some strategies need to know beside them: ``shape`` and ``itemsize``, the bytes of an
    entry. An int by itself stands for a vector of 4-byte entries."""

    shape: tuple[int, ...]
    itemsize: int

    def __new__(cls, shape: Sequence[int], itemsize: int = 4) -> "GradientSize":
        """Of a gradient of that shape."""
        size = super().__new__(cls, math.prod(shape) * itemsize)
        size.shape, size.itemsize = tuple(shape), itemsize
        return size

    def __reduce__(self) -> tuple[type["GradientSize"], tuple[tuple[int, ...], int]]:
        """So that copies and pickles keep both."""
        return GradientSize, (self.shape, self.itemsize)

    @classmethod
    def of(cls, parameters: Iterable[Any]) -> "list[GradientSize]":
        """Return the sizes of the gradients of those of ``parameters`` that train, for ``MessagePlan.operations``."""
        return [cls(p.shape, p.element_size()) for p in parameters if p.requires_grad]


def itemsize(size: int) -> int:
    """Return the bytes of an entry of a gradient of ``size`` bytes; 4 where the size does not tell."""
    return getattr(size, "itemsize", 4)


def buffers(sizes: Iterable[int]) -> list[GradientSize]:
    """Return the flat buffers that hold gradients of these ``sizes``, one for each type of entry."""
    entries: dict[int, int] = {}
    for size in sizes:
        entries[itemsize(size)] = entries.get(itemsize(size), 0) + size // itemsize(size)
    return [GradientSize((count,), bytes_each) for bytes_each, count in entries.items()]


def after_copy(nbytes: int, operations: Sequence[Operation]) -> list[Operation]:
    """Return ``operations`` with a copy of ``nbytes`` into a flat buffer beside the first of them."""
    if not operations:
        return []
    first, *others = operations
    again = [replace(first, count=first.count - 1)] if first.count > 1 else []
    return [replace(first, count=1, copied_bytes=first.copied_bytes + nbytes), *again, *others]


def sent_bytes(kind: str, nbytes: int, *, rank: int, ranks: int, root: int = 0) -> Fraction:
    """Return the payload bytes that ``rank`` sends in one collective, by the algorithms that Gloo uses.

    all_reduce, all_gather and reduce are rings (the last one then collects the parts at the root), broadcast is a binomial
    tree, gather and scatter go straight to and from the root. Fractions, since a ring's parts are M/N.
    """
    if kind == "all_reduce":
        return Fraction(2 * (ranks - 1) * nbytes, ranks)
    if kind == "all_gather":
        return Fraction((ranks - 1) * nbytes)
    if kind == "reduce":
        return Fraction((ranks - 1) * nbytes, ranks) + (
            0 if rank == root else Fraction(nbytes, ranks)
        )
    if kind == "gather":
        return Fraction(0 if rank == root else nbytes)
    if kind == "scatter":
        return Fraction((ranks - 1) * nbytes if rank == root else 0)
    if kind == "broadcast":
        return Fraction(nbytes * tree_children((rank - root) % ranks, ranks))
    raise ValueError(
        f"kind: got {kind!r}; the bytes of an exchange are known to its strategy alone"
    )


def payload_sent(operations: Iterable[Operation], *, rank: int, ranks: int) -> Fraction:
    """Return the payload bytes that ``rank`` sends in all of ``operations``, none of which is an exchange."""
    sent = (
        one.count * sent_bytes(one.kind, one.nbytes, rank=rank, ranks=ranks) for one in operations
    )
    return sum(sent, Fraction(0))


def tree_children(rank: int, ranks: int) -> int:
    """Return how many children ``rank`` has in a binomial tree over ``ranks`` with root 0."""
    own = rank & -rank if rank else 1 << max(0, math.ceil(math.log2(ranks)))
    return sum(1 for power in range(max(0, own.bit_length() - 1)) if rank + (1 << power) < ranks)
