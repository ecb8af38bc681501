"""Which rank the others waited for, from every rank's sign of life. No torch here.

heartbeat.py gathers the signs of life. ``find_stall`` finds the rank that stands still, or has
ended, or called a collective that the others did not call, and says so in a sentence.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.utils.typed_json import Count, Seconds

SILENT_SECONDS = 3.0
"""Without a sign of life for this long, a rank has ended or stands still."""
_SETTLE_SECONDS = 4.0  # after a rank was killed, its silence takes this long to show
_REPORT_SECONDS = 1.5  # until all ranks whose collective broke have said how
_NOTICED_SECONDS = 8.0  # at most this long before the others noticed, a rank was killed
_APART_SECONDS = 1.5  # at most, the last beats of ranks that were killed together

Place = Literal[
    "start",
    "dataset",
    "data",
    "forward",
    "backward",
    "sync",
    "update",
    "end of the epoch",
    "checkpoint",
    "evaluation",
    "end of the run",
]
_EXCHANGE = ("forward", "backward", "sync")  # of a step whose gradients are not yet exchanged
_STEP = (*_EXCHANGE, "data", "update")
_NAMES = {"start": "the start", "dataset": "reading the dataset"}
_Name = Annotated[str, Meta(max_length=100, pattern=r"^[\w.:'% -]*$")]


class Beat(msgspec.Struct, frozen=True):
    """A rank's sign of life.

    number : counts the rank's beats. address : of its node.
    step : the latest step that it began. period : steps between two exchanges of its strategy.
    still_seconds : since it came to ``place``, by its own clock.
    collective : the one in which it waits, or that broke; empty: none.
    broken : whether the group broke for this rank; timed_out : because nobody answered in time.
    informed : whether it knows which rank stalled.
    """

    number: Count = 0
    address: _Name = ""
    place: Place = "start"
    step: Count = 0
    period: Count = 1
    still_seconds: Seconds = 0.0
    collective: _Name = ""
    broken: bool = False
    timed_out: bool = False
    informed: bool = False

    @property
    def waits(self) -> bool:
        """Whether this rank waits for the others."""
        return self.broken or bool(self.collective) or self.place == "sync"

    @property
    def where(self) -> str:
        """Where this rank is, for a message."""
        if self.place in _STEP:
            return f"step {self.step}"
        name = _NAMES.get(self.place, f"the {self.place}")
        return f"{name} at step {self.step}" if self.step else name


@dataclass(frozen=True)
class Seen:
    """A rank's last sign of life, and how long ago it came by the reader's clock."""

    beat: Beat
    silent_seconds: float = 0.0


def find_stall(ranks: Mapping[int, Seen], *, broken_seconds: float) -> str | None:
    """Return who did what the others waited for; "" if nobody stands out, None if it is too early.

    ``broken_seconds`` : since the first rank found the group broken.
    """
    beats = {rank: seen.beat for rank, seen in ranks.items()}
    silent = {
        rank: seen.silent_seconds
        for rank, seen in ranks.items()
        if seen.silent_seconds >= SILENT_SECONDS and not seen.beat.broken
    }
    if any(
        broken_seconds < seen.silent_seconds < SILENT_SECONDS and not seen.beat.broken
        for seen in ranks.values()
    ):
        return None  # such a rank may have been killed, or its next beat may still come
    timed_out = any(beat.timed_out for beat in beats.values())
    # A rank that times out closes its connections: another may report that before it.
    if silent and (timed_out or broken_seconds >= _REPORT_SECONDS):
        # A stopped rank keeps its connections: the others then wait until the timeout, or until
        # a rank that fell silent later is killed.
        killed_since = (
            0.0
            if timed_out
            else min(min(silent.values()) + _APART_SECONDS, broken_seconds + _NOTICED_SECONDS)
        )
        found = [_silence(rank, seconds, beats, killed_since) for rank, seconds in silent.items()]
        return _sentence(found, silent, beats)
    if timed_out:
        backward = {beat.where for beat in beats.values() if beat.broken and beat.place in _STEP}
        busy = {
            rank: beat
            for rank, beat in beats.items()
            if not beat.waits
            and beat.still_seconds >= SILENT_SECONDS
            # DistributedDataParallel waits within backward, which looks like computing.
            and not (beat.place == "backward" and beat.where in backward)
        }
        if busy:
            found = [f"{_name(rank, beat)} {_business(beat)}" for rank, beat in busy.items()]
            return _sentence(found, busy, beats)
        if broken_seconds >= _SETTLE_SECONDS:
            return _different_collectives(beats)
    return "" if not silent and broken_seconds >= _SETTLE_SECONDS else None


def _silence(rank: int, seconds: float, beats: Mapping[int, Beat], killed_since: float) -> str:
    """Return what a silence of ``seconds`` says: the rank was killed, unless it is too long."""
    beat = beats[rank]
    step = max([beat.step, *(_least_step(other) for other in beats.values() if other.waits)])
    # Between two beats the rank may have come further than it said.
    since = beat.where if step == beat.step else f"step {step}"
    if seconds < killed_since:
        return (
            f"{_name(rank, beat)} ended or was killed at {since} "
            f"(no sign of life for {seconds:.1f} s)"
        )
    return f"{_name(rank, beat)} has not moved since {since}, {seconds:.1f} s ago"


def _least_step(waiting: Beat) -> int:
    """Return a step that every rank has begun, since this one has come to where it waits."""
    exchanged = waiting.place not in _EXCHANGE and waiting.period == 1
    return waiting.step if exchanged else max(0, waiting.step - waiting.period)


def _business(beat: Beat) -> str:
    what = f"{beat.place} of {beat.where}" if beat.place in _STEP else beat.where
    return f"has been in {what} for {beat.still_seconds:.1f} s"


def _sentence(found: list[str], named: Iterable[int], beats: Mapping[int, Beat]) -> str:
    """Return what was found about the named ranks, and where the others wait."""
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    others = {rank: beat for rank, beat in beats.items() if rank not in named}
    spots = Counter(_spot(beat) for beat in others.values() if beat.waits)
    who = "the others wait" if len(others) > 1 else f"rank {next(iter(others), '')} waits"
    waiting = f"; {who} in {spots.most_common(1)[0][0]}" if spots else ""
    return f"{'; '.join(found[:3])}{more}{waiting}"


def _spot(beat: Beat) -> str:
    return f"{beat.collective or 'a collective'} of {beat.where}"


def _different_collectives(beats: Mapping[int, Beat]) -> str:
    """Return which ranks wait in another collective than most, if some do."""
    spots = Counter(_spot(beat) for beat in beats.values() if beat.waits)
    if len(spots) < 2:
        return ""
    rarest = spots.most_common()[-1][0]
    named = {rank: beat for rank, beat in beats.items() if beat.waits and _spot(beat) == rarest}
    found = [f"{_name(rank, beat)} waits in {rarest}" for rank, beat in named.items()]
    return f"{_sentence(found, named, beats)}: the ranks did not call the same collective"


def _name(rank: int, beat: Beat) -> str:
    return f"rank {rank} ({beat.address})" if beat.address else f"rank {rank}"
