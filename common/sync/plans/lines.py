"""What a plan's messages are, as data: for each piece of the gradients, some lines.

    messages = for_each(
        "gradient",
        PlanLine("gather", SIZE, summed=OTHER_RANKS * SIZE, copied=3 * SIZE),
        PlanLine("scatter", SIZE),
    )

``operations_of`` turns them into the operations of a step; lab/whatif/plans.js does the same in a
page. pieces.py has the pieces, the numbers and the conditions. Imports no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from common.sync.message_cost import Among, Operation, Sends, with_shape
from common.sync.plans.patterns import PATTERNS, rounds_of
from common.sync.plans.pieces import CONDITIONS, VALUES, Each, Piece, SentStep, pieces_of

When = Literal["after backward", "in backward", "in forward"]
"""When an operation runs: after backward; as soon as backward has completed its piece; during the
next forward, which needs it before it reaches the piece."""


@dataclass(frozen=True)
class Amount:
    """A whole number times a product of named numbers, e.g. ``3 * SIZE``, ``RANKS * PART``.

    of : names of ``VALUES`` in pieces.py.
    """

    factor: int = 1
    of: tuple[str, ...] = ()

    def __mul__(self, other: "Amount") -> "Amount":
        """Return the product."""
        return Amount(self.factor * other.factor, self.of + other.of)

    def __rmul__(self, factor: int) -> "Amount":
        """Return a multiple."""
        return Amount(factor * self.factor, self.of)

    def value(self, piece: Piece, step: SentStep) -> int:
        """Return the number of a piece."""
        value = self.factor
        for name in self.of:
            value *= VALUES[name](piece, step)
        return value


NOTHING = Amount(0)
ONCE = Amount(1)

# Bytes of a piece: all of it, in 2-byte entries, and one of N equal parts, which padding rounds up.
SIZE = Amount(of=("size",))
HALF = Amount(of=("half",))
PART = Amount(of=("part",))
ROWS = Amount(of=("rows",))  # as PART, but each gradient by itself is padded to whole rows

# Bytes of what top-k and PowerSGD send.
KEPT_VALUES = Amount(of=("kept values",))
KEPT_INDICES = Amount(of=("kept indices",))
UNCOMPRESSED = Amount(of=("uncompressed",))
P = Amount(of=("P",))
Q = Amount(of=("Q",))

# Numbers.
GRADIENTS = Amount(of=("gradients",))
RANKS = Amount(of=("ranks",))
OTHER_RANKS = Amount(of=("other ranks",))
EARLIER_MICRO_BATCHES = Amount(of=("earlier micro-batches",))


@dataclass(frozen=True)
class PlanLine:
    """An operation for each piece; see ``Operation``, whose fields these amounts fill.

    Parameters
    ----------
    count : with 0 there is no operation.
    only_if : names of ``CONDITIONS`` in pieces.py that must all hold.
    ahead : it comes one piece early: before the lines of the piece that precedes its own.
    """

    kind: str
    nbytes: Amount
    count: Amount = ONCE
    summed: Amount = NOTHING
    copied: Amount = NOTHING
    when: When = "after backward"
    among: Among = "all"
    only_if: tuple[str, ...] = ()
    ahead: bool = False

    def operation(self, piece: Piece, step: SentStep) -> Operation | None:
        """Return the operation of a piece; None if there is none."""
        if not all(CONDITIONS[name](piece, step) for name in self.only_if):
            return None
        count = self.count.value(piece, step)
        if count == 0:
            return None
        return Operation(
            self.kind,
            self.nbytes.value(piece, step),
            count=count,
            summed_bytes=self.summed.value(piece, step),
            copied_bytes=self.copied.value(piece, step),
            ready_bytes=piece.ready_bytes if self.when == "in backward" else None,
            needed_bytes=piece.needed_bytes if self.when == "in forward" else None,
            among=self.among,
        )


@dataclass(frozen=True)
class LineGroup:
    """Lines that repeat for each piece; see ``for_each``."""

    each: Each
    lines: tuple[PlanLine, ...]
    reverse: bool
    pattern: str | None

    def in_order(self, pieces: Sequence[Piece]) -> Iterator[tuple[PlanLine, Piece]]:
        """Yield each line with each piece, in the order of the messages."""
        ahead = [line for line in self.lines if line.ahead]
        others = [line for line in self.lines if not line.ahead]
        for line in ahead:
            for first in pieces[:1]:
                yield line, first
        for place, piece in enumerate(pieces, start=1):
            for line in ahead:
                for following in pieces[place : place + 1]:
                    yield line, following
            for line in others:
                yield line, piece

    def operations(self, sizes: Sequence[int], step: SentStep) -> list[Operation]:
        """List the operations of a step, in order."""
        pieces = pieces_of(self.each, sizes, step)
        if self.reverse:
            pieces.reverse()
        found = []
        for line, piece in self.in_order(pieces):
            operation = line.operation(piece, step)
            if operation is not None:
                found.append(operation)
        if self.pattern:
            for piece in pieces:
                found += rounds_of(self.pattern, with_shape(piece.size), step.ranks)
        return found

    def sends(self, sizes: Sequence[int], rank: int, step: SentStep) -> list[Sends]:
        """List what a rank sends in the rounds of the pattern."""
        assert self.pattern
        sends = PATTERNS[self.pattern].sends
        return [
            send
            for piece in pieces_of(self.each, sizes, step)
            for send in sends(with_shape(piece.size), rank, step.ranks)
        ]


Messages = tuple[LineGroup, ...]


def for_each(
    each: Each, *lines: PlanLine, reverse: bool = False, pattern: str | None = None
) -> Messages:
    """Return the messages of each piece; join several with ``+``.

    Parameters
    ----------
    lines : what is sent of a piece, in order, before the next piece's turn.
    reverse : the last piece comes first.
    pattern : in place of lines, rounds of point-to-point messages, by a name of ``PATTERNS``
        (patterns.py).
    """
    return (LineGroup(each, lines, reverse, pattern),)


def operations_of(
    messages: Messages, sizes: Sequence[int], ranks: int, options: Mapping[str, Any]
) -> list[Operation]:
    """List what a step sends, in order; ``options`` are those of the plan, by name."""
    step = SentStep(ranks, options)
    return [operation for group in messages for operation in group.operations(sizes, step)]


def sends_of_patterns(
    messages: Messages, sizes: Sequence[int], rank: int, ranks: int, options: Mapping[str, Any]
) -> list[Sends]:
    """List what ``rank`` sends in a step whose messages are all rounds of patterns."""
    step = SentStep(ranks, options)
    return [send for group in messages for send in group.sends(sizes, rank, step)]
