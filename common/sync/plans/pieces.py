"""What one message carries (``Piece``), and the numbers of a piece that a plan's lines name.

``pieces_of`` cuts a model's gradients into pieces. ``VALUES`` has the numbers by name,
``CONDITIONS`` what a line may depend on. Imports no torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from common.sync.bucketing import bucket_sizes
from common.sync.message_cost import GradientSize, buffers, with_shape
from common.utils.grouping import grouped

INDEX_BYTES = 4  # an int32 finds any entry of a flat buffer up to 8 GB
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
    size : bytes of all its gradients; of a bucket or a buffer, as one flat vector.
    gradients : their sizes.
    ready_bytes : of all gradients that backward has computed once the piece is complete.
    needed_bytes : of the parameters that the next forward uses before it needs the piece.
    """

    size: int
    gradients: Sequence[int]
    ready_bytes: int
    needed_bytes: int


@dataclass(frozen=True)
class SentStep:
    """What else decides the numbers of a piece: the ranks, and the options of the plan by name."""

    ranks: int
    options: Mapping[str, Any]

    @property
    def ranks_on_a_node(self) -> int:
        """The ranks of a full node, as the plan's option says; without one, 1."""
        return min(self.options.get("ranks_per_node") or 1, self.ranks)


def pieces_of(each: Each, sizes: Sequence[int], step: SentStep) -> list[Piece]:
    """Return the pieces into which gradients of these ``sizes`` are cut, in order."""
    whole = sum(sizes)
    if each == "gradient":
        befores = accumulate(sizes, initial=0)
        return [
            Piece(size, (size,), whole - before, before)
            for size, before in zip(sizes, befores, strict=False)
        ]
    if each == "layer":
        layers = layers_of(sizes)
        befores = accumulate(map(sum, layers), initial=0)
        return [
            Piece(sum(layer), layer, whole - before, before)
            for layer, before in zip(layers, befores, strict=False)
        ]
    if each == "buffer":
        alike = grouped((size.itemsize, size) for size in map(with_shape, sizes))
        return [Piece(buffer, alike[buffer.itemsize], whole, 0) for buffer in buffers(sizes)]
    if each == "bucket":
        kept_as_built = step.options.get("find_unused_parameters", False)
        found = bucket_sizes(sizes, step.options["bucket_mb"], kept_as_built=kept_as_built)
        return [Piece(bucket, (bucket,), ready, whole - ready) for bucket, ready in found]
    assert each == "model", each
    return [Piece(whole, sizes, whole, 0)]


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


def padded_part(size: int, ranks: int) -> int:
    """Return the bytes of one of N equal parts of a flat buffer; padding rounds up."""
    flat = with_shape(size)
    return -(-flat.entries // ranks) * flat.itemsize


def rows_bytes(size: int, ranks: int) -> int:
    """Return the bytes of a rank's part of a parameter: 1/N of its rows, rounded up."""
    shaped = with_shape(size)
    rows, *others = shaped.shape
    return -(-rows // ranks) * math.prod(others) * shaped.itemsize


def kept_entries(entries: int, ratio: float) -> int:
    """Return how many of ``entries`` top-k sends."""
    return min(entries, math.ceil(ratio * entries))


def is_compressed(shape: Sequence[int], rank: int) -> bool:
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


def _kept(piece: Piece, step: SentStep) -> int:
    return kept_entries(with_shape(piece.size).entries, step.options["topk_ratio"])


def _uncompressed_bytes(piece: Piece, step: SentStep) -> int:
    rank = step.options["powersgd_rank"]
    shaped = map(with_shape, piece.gradients)
    return sum(size for size in shaped if not is_compressed(size.shape, rank))


def _thin_bytes(piece: Piece, step: SentStep, matrix: int) -> int:
    """Return the bytes of P (0) or Q (1) of all gradients that PowerSGD compresses."""
    rank = step.options["powersgd_rank"]
    shaped = map(with_shape, piece.gradients)
    thin = [size for size in shaped if is_compressed(size.shape, rank)]
    return sum(thin_entries(size.shape, rank)[matrix] * size.itemsize for size in thin)


VALUES: dict[str, Callable[[Piece, SentStep], int]] = {
    "size": lambda piece, step: piece.size,
    "half": lambda piece, step: 2 * with_shape(piece.size).entries,
    "part": lambda piece, step: padded_part(piece.size, step.ranks),
    "rows": lambda piece, step: sum(rows_bytes(size, step.ranks) for size in piece.gradients),
    "kept values": lambda piece, step: _kept(piece, step) * with_shape(piece.size).itemsize,
    "kept indices": lambda piece, step: _kept(piece, step) * INDEX_BYTES,
    "uncompressed": _uncompressed_bytes,
    "P": lambda piece, step: _thin_bytes(piece, step, 0),
    "Q": lambda piece, step: _thin_bytes(piece, step, 1),
    "gradients": lambda piece, step: len(piece.gradients),
    "ranks": lambda piece, step: step.ranks,
    "other ranks": lambda piece, step: step.ranks - 1,
    "earlier micro-batches": lambda piece, step: step.options["accumulation_steps"] - 1,
}
"""What an amount may be a product of: see the constants of lines.py."""

CONDITIONS: dict[str, Callable[[Piece, SentStep], bool]] = {
    "several ranks": lambda piece, step: step.ranks > 1,
    "several nodes": lambda piece, step: step.ranks > step.ranks_on_a_node,
    "several ranks on a node": lambda piece, step: step.ranks_on_a_node > 1,
    "one rank on a node": lambda piece, step: step.ranks_on_a_node == 1,
    "entries of 2 bytes": lambda piece, step: with_shape(piece.size).itemsize == 2,
    "other entries": lambda piece, step: with_shape(piece.size).itemsize != 2,
    "find_unused_parameters": lambda piece, step: step.options["find_unused_parameters"],
}
"""What a line may depend on."""
