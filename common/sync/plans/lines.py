"""What a plan's messages are, as data: for each piece of the gradients, some lines.

    messages = for_each(
        "gradient",
        PlanLine("gather", SIZE, summed=OTHER_RANKS * SIZE, copied=3 * SIZE),
        PlanLine("scatter", SIZE),
    )

``operations_of`` turns them into the operations of a step; lab/whatif/plans.js does the same in a
page. pieces.py has the pieces, the numbers and the conditions. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from common.errors import UserError
from common.sync.message_cost import COLLECTIVES, Among, Compressor, GradientSize, Operation, Sends
from common.sync.plans.patterns import PATTERNS, rounds_of
from common.sync.plans.pieces import CONDITIONS, Each, Piece, SentStep
from common.utils import registry

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

    def of_each(self, each: Each, step: SentStep) -> list[int]:
        """Return the number of each piece."""
        found = [self.factor] * len(step.pieces(each))
        for name in self.of:
            numbers = step.numbers(each, name)
            found = [number * other for number, other in zip(found, numbers, strict=True)]
        return found


NOTHING = Amount(0)
ONCE = Amount(1)

# Bytes of a piece.
SIZE = Amount(of=("size",))
PART = Amount(of=("part",))  # one of N equal parts, which padding rounds up
ROWS = Amount(of=("rows",))  # as PART, but of each gradient by itself, in whole rows
UNCOMPRESSED = Amount(of=("uncompressed",))  # what PowerSGD does not compress
P = Amount(of=("P",))  # of the thin matrices of all others
Q = Amount(of=("Q",))
ITEMSIZE = Amount(of=("itemsize",))  # of an entry

# Numbers.
ENTRIES = Amount(of=("entries",))
KEPT_ENTRIES = Amount(of=("kept entries",))  # of top-k
GRADIENTS = Amount(of=("gradients",))
RANKS = Amount(of=("ranks",))
OTHER_RANKS = Amount(of=("other ranks",))
EARLIER_MICRO_BATCHES = Amount(of=("earlier micro-batches",))


@dataclass(frozen=True)
class PlanLine:
    """An operation for each piece; see ``Operation``, whose fields these amounts fill.

    Parameters
    ----------
    kind : of ``COLLECTIVES``; a pattern has the rounds of point-to-point messages.
    count : with 0 there is no operation.
    only_if : a name of ``CONDITIONS`` in pieces.py; None: always.
    ahead : it comes one piece early: before the lines of the piece that precedes its own. In
        backward it leaves as soon as the piece before that is complete.
    """

    kind: str
    nbytes: Amount
    count: Amount = ONCE
    summed: Amount = NOTHING
    copied: Amount = NOTHING
    compressor: Compressor = ""
    compressed: Amount = NOTHING
    when: When = "after backward"
    among: Among = "all"
    only_if: str | None = None
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            choices = registry.choices_text(self.kind, COLLECTIVES)
            raise UserError(
                f"a line sends a collective, got {self.kind!r}: {choices}; messages between pairs "
                "of ranks go into operations() and sends() (CONTRIBUTING.md says how)"
            )
        if self.only_if is not None:
            registry.find(CONDITIONS, self.only_if, kind="condition")

    def operations(self, each: Each, step: SentStep) -> list[Operation | None]:
        """Return the operation of each piece; None where there is none."""
        found: list[Operation | None] = []
        pieces = step.pieces(each)
        rows = zip(
            pieces,
            self.nbytes.of_each(each, step),
            self.count.of_each(each, step),
            self.summed.of_each(each, step),
            self.copied.of_each(each, step),
            self.compressed.of_each(each, step),
            strict=True,
        )
        for index, (piece, nbytes, count, summed, copied, compressed) in enumerate(rows):
            if count == 0 or not self.applies(piece, step):
                found.append(None)
                continue
            ready = self._ready(pieces, index) if self.when == "in backward" else None
            needed = piece.needed_bytes if self.when == "in forward" else None
            found.append(
                Operation(
                    *(self.kind, nbytes, count, summed, copied, ready, needed, self.among),
                    compressor=self.compressor,
                    compressed_bytes=compressed,
                )
            )
        return found

    def _ready(self, pieces: Sequence[Piece], index: int) -> int:
        """Return the bytes of gradients that backward has computed when the line may leave."""
        if not self.ahead:
            return pieces[index].ready_bytes
        return pieces[index - 2].ready_bytes if index >= 2 else 0

    def applies(self, piece: Piece, step: SentStep) -> bool:
        """Return whether its condition holds."""
        return self.only_if is None or CONDITIONS[self.only_if](piece, step)


@dataclass(frozen=True)
class LineGroup:
    """Lines that repeat for each piece; see ``for_each``."""

    each: Each
    lines: tuple[PlanLine, ...]
    reverse: bool
    pattern: str | None

    def operations(self, step: SentStep) -> list[Operation]:
        """List the operations of a step, in order."""
        if self.pattern:
            return [
                operation
                for size in self.flat_pieces(step)
                for operation in rounds_of(self.pattern, size, step.ranks)
            ]
        columns = []
        for line in self.lines:
            column = line.operations(self.each, step)
            if self.reverse:
                column.reverse()
            columns.append([*column, None] if line.ahead else [None, *column])
        in_order = chain.from_iterable(zip(*columns, strict=True))
        return [operation for operation in in_order if operation is not None]

    def sends(self, rank: int, step: SentStep) -> list[Sends]:
        """List what a rank sends in the rounds of the pattern."""
        assert self.pattern, "a plan of rounds has no lines"
        sends = PATTERNS[self.pattern].sends
        return [send for size in self.flat_pieces(step) for send in sends(size, rank, step.ranks)]

    def flat_pieces(self, step: SentStep) -> list[GradientSize]:
        """Return the pieces as flat vectors, which a pattern cuts further."""
        flat = [GradientSize((piece.entries,), piece.itemsize) for piece in step.pieces(self.each)]
        return flat[::-1] if self.reverse else flat


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


def operations_of(messages: Messages, step: SentStep) -> list[Operation]:
    """List what a step sends, in order."""
    return [operation for group in messages for operation in group.operations(step)]


def sends_of_patterns(messages: Messages, rank: int, step: SentStep) -> list[Sends]:
    """List what ``rank`` sends in a step whose messages are all rounds of patterns."""
    return [send for group in messages for send in group.sends(rank, step)]
