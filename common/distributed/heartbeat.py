"""Signs of life: after a failure, the ranks know which one stood still, and where.

A thread of each rank writes a ``Beat`` to the store once a second. Rank 0's thread reads them all
and notes by its own clock when each rank's last one came; stalls.py decides which rank stalled.
The other threads read the decision, and notice if rank 0 itself falls silent.
"""

import sys
import threading
import time
from contextlib import suppress
from typing import Annotated

import msgspec
import torch.distributed as dist
from msgspec import Meta

from common.distributed.stalls import SILENT_SECONDS, Beat, Place, Seen, find_stall
from common.errors import UserError
from common.utils.typed_json import decode, encode

_BEAT_SECONDS, _URGENT_SECONDS = 1.0, 0.1
_POLL_SECONDS = 0.05
_WAKE_SECONDS = 0.5  # for the thread to read the store after the process was stopped
_DECISION_SECONDS = 8.0
_INFORM_SECONDS, _JOIN_SECONDS = 3.0, 0.5
_BEAT, _WATCH = "beat/{}", "watch"  # keys in the store


class Activity:
    """What this rank is doing: attributes to set where work begins, without a lock.

    step : the latest step begun. period : steps between two exchanges of the strategy.
    """

    __slots__ = ("changes", "period", "place", "step")

    def __init__(self) -> None:
        self.place: Place = "start"
        self.step, self.period, self.changes = 0, 1, 0

    def enter(self, place: Place) -> None:
        """Note that this rank comes to ``place``."""
        self.place = place
        self.changes += 1


class _Watch(msgspec.Struct, frozen=True):
    """What rank 0's thread writes: its own beat, and what ``find_stall`` returned."""

    rank0: Beat = Beat()
    stall: Annotated[str, Meta(max_length=2000)] | None = None


class _Sightings:
    """The last beat of some ranks, and when it came by this rank's clock."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Beat, float]] = {}

    def note(self, rank: int, beat: Beat) -> None:
        """Note the rank's beat if it is a new one."""
        if rank not in self._last or self._last[rank][0].number != beat.number:
            self._last[rank] = (beat, time.monotonic())

    def restart(self) -> None:
        """Count silence from now on: this rank itself did not look."""
        self._last = {rank: (beat, time.monotonic()) for rank, (beat, _) in self._last.items()}

    def seen(self) -> dict[int, Seen]:
        """Return each rank's last beat and its silence until now."""
        now = time.monotonic()
        return {rank: Seen(beat, now - came) for rank, (beat, came) in self._last.items()}


class Heartbeat:
    """This rank's signs of life, from ``start`` to ``close``; call both in the thread that trains.

    Call ``explain`` after a collective broke. All of it does nothing without a store.

    Parameters
    ----------
    activity : what the thread that trains is doing.
    address : of this node, for messages.
    timeout_seconds : how long the other ranks wait for this one in a collective.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        size: int,
        *,
        activity: Activity,
        address: str,
        timeout_seconds: float,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._activity, self._timeout_seconds = activity, timeout_seconds
        self._beat, self._sightings = Beat(address=address), _Sightings()
        self._stall: str | None = None
        self._broken: tuple[str, bool] | None = None  # the collective, whether it timed out
        self._first_broken: float | None = None
        self._all_informed = self._store_closed = False
        self._stood_still: tuple[str, float] | None = None  # a message, and when it was over
        self._place_since = (0, time.monotonic())
        self._wake, self._closing = threading.Event(), False
        self._training_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)

    def start(self) -> None:
        """Start the thread. Collective, since no rank may read what an earlier group left."""
        if self._store is None:
            return
        # A clone has its own connection: a request that blocks delays nobody else's.
        self._store = dist.PrefixStore("alive", self._store.clone())
        if self._rank == 0:
            self._store.set(_WATCH, encode(_Watch(self._beat)).decode())
        self._store.set(_BEAT.format(self._rank), encode(self._beat).decode())
        dist.barrier()
        self._thread.start()

    def explain(self, collective: str, *, timed_out: bool) -> str | None:
        """Return which rank this one waited for when ``collective`` broke; None if nobody knows.

        Takes a few seconds if a rank was killed, since its silence must show first.
        """
        if self._store is None:
            return None
        self._broken, began = (collective, timed_out), time.monotonic()
        self._wake.set()
        while (waited := time.monotonic() - began) < _DECISION_SECONDS:
            if self._stood_still and began - self._stood_still[1] < self._timeout_seconds:
                return self._stood_still[0]
            if self._stall is not None:
                return self._stall or None
            rank0 = self._sightings.seen().get(0)
            if self._rank and rank0 and waited > _WAKE_SECONDS and self._is_silent(rank0):
                # A rank 0 that stands still keeps its store's connections, one that ended does not.
                mine = msgspec.structs.replace(self._sample(), timed_out=not self._store_closed)
                ranks = {0: rank0, self._rank: Seen(mine)}
                if found := find_stall(ranks, broken_seconds=waited):
                    return found
            time.sleep(_POLL_SECONDS)
        return None

    def close(self) -> None:
        """End the thread; after a failure rank 0 first waits until the others know the stall."""
        if self._rank == 0 and self._broken:
            deadline = time.monotonic() + _INFORM_SECONDS
            while (
                self._thread.is_alive() and not self._all_informed and time.monotonic() < deadline
            ):
                time.sleep(_POLL_SECONDS)
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)  # it may wait for a rank 0 that stands still

    def _run(self) -> None:
        exchange = self._lead if self._rank == 0 else self._follow
        try:
            while True:
                exchange()
                if self._closing:
                    return
                self._pause()
        except dist.DistNetworkError:
            self._store_closed = True
        except dist.DistStoreError:  # rank 0 has not answered for the store's timeout
            pass

    def _lead(self) -> None:
        """Rank 0: read every rank's beat, and decide which one stalled if the group is broken."""
        assert self._store is not None
        self._beat = self._sample()
        for rank, content in enumerate(self._store.multi_get(self._keys)):
            with suppress(UserError):  # not from a rank
                self._sightings.note(rank, decode(content, Beat, name=f"beat of rank {rank}"))
        ranks = self._sightings.seen() | {0: Seen(self._beat)}
        if any(seen.beat.broken for seen in ranks.values()):
            self._first_broken = self._first_broken or time.monotonic()
            if self._stall is None:
                broken_seconds = time.monotonic() - self._first_broken
                self._stall = find_stall(ranks, broken_seconds=broken_seconds)
        self._store.set(_WATCH, encode(_Watch(self._beat, self._stall)).decode())
        self._all_informed = all(
            seen.beat.informed or self._is_silent(seen) for rank, seen in ranks.items() if rank
        )

    def _follow(self) -> None:
        """Any other rank: read rank 0's beat and decision, and write this rank's beat."""
        assert self._store is not None
        with suppress(UserError):  # not from rank 0
            watch = decode(self._store.get(_WATCH), _Watch, name="beat of rank 0")
            self._sightings.note(0, watch.rank0)
            self._stall = watch.stall
        self._beat = self._sample()
        self._store.set(_BEAT.format(self._rank), encode(self._beat).decode())

    def _pause(self) -> None:
        """Wait for the next beat, and notice if this process itself was stopped meanwhile."""
        began = time.monotonic()
        if self._broken or self._first_broken:
            time.sleep(_URGENT_SECONDS)
        else:
            self._wake.wait(_BEAT_SECONDS)
        seconds = time.monotonic() - began
        if seconds > SILENT_SECONDS:
            self._sightings.restart()
        if seconds > self._timeout_seconds:
            where = self._sample().where  # the last beat may be older
            message = (
                f"rank {self._rank} ({self._beat.address}), this one, stood still for "
                f"{seconds:.1f} s at {where}: it was stopped, or its machine swapped "
                "or slept"
            )
            self._stood_still = (message, time.monotonic())

    def _sample(self) -> Beat:
        """Return this rank's beat: what its training thread is doing now."""
        activity, now = self._activity, time.monotonic()
        if activity.changes != self._place_since[0]:
            self._place_since = (activity.changes, now)
        collective, timed_out = self._broken or (self._collective(), False)
        return Beat(
            self._beat.number + 1,
            self._beat.address,
            activity.place,
            activity.step,
            activity.period,
            now - self._place_since[1],
            collective,
            self._broken is not None,
            timed_out,
            self._stall is not None,
        )

    def _collective(self) -> str:
        """Return the collective in which the training thread is; "" if it is in none."""
        frame, name = sys._current_frames().get(self._training_thread), ""
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith("distributed_c10d.py") and code.co_name != "wrapper":
                name = code.co_name
            frame = frame.f_back
        return name

    @property
    def _keys(self) -> list[str]:
        return [_BEAT.format(rank) for rank in range(self._size)]

    @staticmethod
    def _is_silent(seen: Seen) -> bool:
        return seen.silent_seconds >= SILENT_SECONDS
