"""What one message carries (``Piece``), and the numbers of a piece that a plan's lines name.

``SentStep`` cuts a model's gradients into pieces. ``VALUES`` has the numbers by name,
``CONDITIONS`` what a line may depend on. Imports no torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from common.sync.bucketing import bucket_sizes
from common.sync.message_cost import GradientSize, with_shape
from common.utils.grouping import grouped

# PowerSGD compresses a gradient that has more than this many times the entries of P and Q.
POWERSGD_LEAST_GAIN = 2

Each = Literal["gradient", "buffer", "bucket", "layer", "model"]
"""What a piece is.

"gradient": one parameter's, in the order of the parameters. "buffer": all gradients of one
itemsize. "bucket": those that are sent together during backward, the last layers' first
(bucketing.py). "layer": those of a layer, in the order of forward. "model": all gradients.
"""


class Piece(NamedTuple):
    """What one message carries.

    Parameters
    ----------
    nbytes, itemsize : bytes of all its gradients together, and of an entry (of its first one).
    gradients : their sizes; a bucket counts as one vector.
    ready_bytes : of all gradients that backward has computed once the piece is complete.
    needed_bytes : of the parameters that the next forward uses before it needs the piece.
    """

    nbytes: int
    itemsize: int
    gradients: Sequence[GradientSize]
    ready_bytes: int
    needed_bytes: int

    @property
    def entries(self) -> int:
        """The number of entries."""
        return self.nbytes // self.itemsize


@dataclass
class SentStep:
    """A step of a plan: what is sent of which gradients, over how many ranks.

    Parameters
    ----------
    sizes : of each parameter's gradient, in the order of the parameters.
    options : of the plan, by name.
    """

    sizes: Sequence[int]
    ranks: int
    options: Mapping[str, Any]
    _pieces: dict[Each, Sequence[Piece]] = field(default_factory=dict)
    _numbers: dict[tuple[Each, str], list[int]] = field(default_factory=dict)

    @property
    def ranks_on_a_node(self) -> int:
        """The ranks of a full node, as the plan's option says; without one, 1."""
        return min(self.options.get("ranks_per_node") or 1, self.ranks)

    def pieces(self, each: Each) -> Sequence[Piece]:
        """Return the pieces into which the gradients are cut, in order."""
        if each not in self._pieces:
            self._pieces[each] = _cut(
                each,
                _Same(self.sizes),
                self.options.get("bucket_mb"),
                kept_as_built=self.options.get("find_unused_parameters", False),
            )
        return self._pieces[each]

    def numbers(self, each: Each, name: str) -> list[int]:
        """Return a number of ``VALUES`` for each piece."""
        if (each, name) not in self._numbers:
            value = VALUES[name]
            self._numbers[each, name] = [value(piece, self) for piece in self.pieces(each)]
        return self._numbers[each, name]


class _Same(NamedTuple):
    """Sizes that equal only themselves: to compare each one takes as long as to cut them."""

    sizes: Sequence[int]

    def __hash__(self) -> int:
        return id(self.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.sizes is other.sizes


@lru_cache(maxsize=64)  # predictions ask for many numbers of ranks, which change no piece
def _cut(
    each: Each, same: _Same, bucket_mb: float | None, *, kept_as_built: bool
) -> Sequence[Piece]:
    sizes = [with_shape(size) for size in same.sizes]
    whole = sum(sizes)
    if each == "gradient":
        return _in_forward_order([[size] for size in sizes])
    if each == "layer":
        return _in_forward_order(layers_of(sizes))
    if each == "buffer":
        by_itemsize = grouped((size.itemsize, size) for size in sizes)
        return [
            Piece(sum(alike), itemsize, alike, whole, 0) for itemsize, alike in by_itemsize.items()
        ]
    if each == "bucket":
        buckets = bucket_sizes(sizes, bucket_mb, kept_as_built=kept_as_built)
        return [
            Piece(int(size), size.itemsize, [size], ready, whole - ready) for size, ready in buckets
        ]
    assert each == "model", each
    return [Piece(whole, sizes[0].itemsize if sizes else 4, sizes, whole, 0)]


def _in_forward_order(parts: Sequence[Sequence[GradientSize]]) -> list[Piece]:
    """Return pieces of consecutive gradients. Backward completes the last one first."""
    totals = [sum(part) for part in parts]
    needed = accumulate(totals, initial=0)
    whole = sum(totals)
    return [
        Piece(total, part[0].itemsize, part, whole - before, before)
        for part, total, before in zip(parts, totals, needed, strict=False)
    ]


def layers_of(sizes: Sequence[int]) -> list[list[GradientSize]]:
    """Return the parameters of each layer: one with two or more dimensions begins a layer.

    So a BatchNorm, which has vectors only, travels with the convolution before it.
    """
    layers: list[list[GradientSize]] = []
    for size in map(with_shape, sizes):
        if len(size.shape) > 1 or not layers:
            layers.append([])
        layers[-1].append(size)
    return layers


def rows_bytes(size: GradientSize, ranks: int) -> int:
    """Return the bytes of a rank's part of a parameter: 1/N of its rows, rounded up."""
    rows, *others = size.shape
    return -(-rows // ranks) * math.prod(others) * size.itemsize


def kept_entries(entries: int, ratio: float) -> int:
    """Return how many of ``entries`` top-k sends."""
    return min(entries, math.ceil(ratio * entries))


@lru_cache(maxsize=1024)  # predictions ask for the same shapes again and again
def is_compressed(shape: tuple[int, ...], rank: int) -> bool:
    """Return whether torch's PowerSGD hook sends a gradient of this shape as thin matrices.

    It does if they have less than half of the gradient's entries.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return (rows + columns) * min(rows, columns, rank) * POWERSGD_LEAST_GAIN < rows * columns


def thin_entries(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the entries of PowerSGD's P and Q for a gradient of that shape."""
    rows = shape[0]
    columns = math.prod(shape[1:])
    width = min(rows, columns, rank)
    return rows * width, columns * width


def _uncompressed_bytes(piece: Piece, step: SentStep) -> int:
    rank = step.options["powersgd_rank"]
    return sum(size for size in piece.gradients if not is_compressed(size.shape, rank))


def _thin_bytes(piece: Piece, step: SentStep, matrix: int) -> int:
    """Return the bytes of P (0) or Q (1) of all gradients that PowerSGD compresses."""
    rank = step.options["powersgd_rank"]
    thin = [size for size in piece.gradients if is_compressed(size.shape, rank)]
    return sum(thin_entries(size.shape, rank)[matrix] * size.itemsize for size in thin)


VALUES: dict[str, Callable[[Piece, SentStep], int]] = {
    # bytes of a piece
    "size": lambda piece, step: piece.nbytes,
    "part": lambda piece, step: -(-piece.entries // step.ranks) * piece.itemsize,
    "rows": lambda piece, step: sum(rows_bytes(size, step.ranks) for size in piece.gradients),
    "uncompressed": _uncompressed_bytes,
    "P": lambda piece, step: _thin_bytes(piece, step, 0),
    "Q": lambda piece, step: _thin_bytes(piece, step, 1),
    "itemsize": lambda piece, step: piece.itemsize,
    # numbers
    "entries": lambda piece, step: piece.entries,
    "kept entries": lambda piece, step: kept_entries(piece.entries, step.options["topk_ratio"]),
    "gradients": lambda piece, step: len(piece.gradients),
    "ranks": lambda piece, step: step.ranks,
    "other ranks": lambda piece, step: step.ranks - 1,
    "earlier micro-batches": lambda piece, step: step.options["accumulation_steps"] - 1,
}
"""The numbers by name; lines.py has an amount of each. lab/whatif/plans.js knows the same."""

CONDITIONS: dict[str, Callable[[Piece, SentStep], bool]] = {
    "several ranks": lambda piece, step: step.ranks > 1,
    "nodes of several ranks": lambda piece, step: step.ranks_on_a_node > 1,
    "several nodes of several ranks": lambda piece, step: step.ranks > step.ranks_on_a_node > 1,
    "several nodes of one rank": lambda piece, step: step.ranks > step.ranks_on_a_node == 1,
    "entries of 2 bytes": lambda piece, step: piece.itemsize == 2,
    "other entries": lambda piece, step: piece.itemsize != 2,
    "find_unused_parameters": lambda piece, step: step.options["find_unused_parameters"],
    "layer by layer": lambda piece, step: step.ranks > 1 and not step.options["fetches_ahead"],
    "fetched ahead": lambda piece, step: step.ranks > 1 and step.options["fetches_ahead"],
}
"""What a line may depend on; lab/whatif/plans.js knows the same."""
