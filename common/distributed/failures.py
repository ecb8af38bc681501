"""Why a collective broke: each rank leaves signs of life, and a survivor reads what they show.

A thread of each rank's ``FailureWatch`` writes a ``Beat`` to rank 0's store once a second. After a
collective broke, ``explain`` returns the message of the rank that failed. If there is none, that
rank was killed, stands still or waits elsewhere: ``find_culprit`` names it from two readings of all
beats. Under NCCL ``CollectiveGuard`` notices that the group broke.
"""

import contextlib
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import psutil
import torch
import torch.distributed as dist
from msgspec import Meta

from common.distributed.launch_env import LaunchSpec
from common.errors import GroupError, UserError, first_line
from common.utils.network import route_to
from common.utils.processes import INTERRUPT, in_thread
from common.utils.typed_json import Count, Seconds, decode, encode

T = TypeVar("T")
BEAT_SECONDS = 1.0
_COMPARE_SECONDS = 4.0
"""Between the two readings. A rank without a beat for so long has ended or stands still."""
_STILL_SECONDS = 3.0  # a rank that works in one place for longer may be what the others wait for
_APART_SECONDS = 1.5  # at most, the last beats of ranks that were killed together
_ANSWER_SECONDS = 3.0
_INTERRUPT_SECONDS = 2.0  # rank 0 keeps the store so long after Ctrl-C: for one beat of the others
_LEAVE_SECONDS = 8.0  # rank 0 keeps the store no longer for ranks that have not noticed yet
_POLL_SECONDS = 0.05
_JOIN_SECONDS = 0.5
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 2.0
# Keys in the store
_BEAT = "beat/{}"
_MESSAGE = "message"
_FOUND = "found"
_LEFT = "left"
# A question to the store fails with one of these if rank 0 is lost or does not answer in time.
_NO_ANSWER = (TimeoutError, dist.DistStoreError, dist.DistNetworkError)

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


# --- from torch's error ---

_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|connect failure|remote "
    r"process exited|communicator was aborted|"
    r"socket|peer",
    re.IGNORECASE,
)


def broken_collective(error: BaseException) -> str | None:
    """Return the collective's name if ``error`` is one that lost a rank, else None.

    The name comes from the traceback: torch's message has only the address of a neighbour, which
    often is not the rank that failed.
    """
    # Gloo's errors are plain RuntimeErrors, as a DataLoader's timeout is.
    of_the_group = isinstance(error, dist.DistError) or "/gloo/" in str(error)
    if isinstance(error, GroupError) or not of_the_group or not _LOST.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames:
        if frame.filename.endswith("distributed_c10d.py") and frame.name != "wrapper":
            return frame.name
    # DistributedDataParallel raises in autograd itself; a strategy's own hook adds frames.
    if frames and Path(frames[-1].filename).parent.name == "autograd":
        return "DistributedDataParallel's all_reduce in backward"
    return "a collective"


def timed_out(error: BaseException) -> bool:
    """Return whether a broken collective waited in vain, rather than lost its connection."""
    return re.search(r"timed? ?out", str(error), re.IGNORECASE) is not None


def explain_collective_failure(error: BaseException) -> str | None:
    """Return a message for the user if ``error`` is a collective that lost a rank, else None."""
    collective = broken_collective(error)
    if collective is None:
        return None
    return f"{explain_lost_rank(collective)} (torch: {cause_of(error)})"


def explain_lost_rank(collective: str) -> str:
    """Return a message for the user if nobody knows which rank ``collective`` lost."""
    return (
        f"{collective} broke: another rank has ended, or did not answer in time. Its output shows "
        "why; if it shows nothing, its process was killed or its machine was lost."
    )


def cause_of(error: BaseException) -> str:
    """Return the first line of an error; of NCCL's, the line under "Last error:", if any.

    NCCL's first line has only the kind of the error and a line of torch's source.
    """
    below = str(error).partition("\nLast error:\n")[2].partition("\n")[0].strip()
    return below or first_line(error)


# --- signs of life ---


@dataclass(slots=True)
class Activity:
    """What this rank is doing: attributes to set where work begins, without a lock.

    step : the latest step begun. period : steps between two exchanges of the strategy.
    changes : how often the rank has come to another place.
    """

    place: Place = "start"
    step: int = 0
    period: int = 1
    changes: int = 0

    def enter(self, place: Place) -> None:
        """Note that this rank comes to ``place``."""
        self.place = place
        self.changes += 1


class Beat(msgspec.Struct, frozen=True):
    """A rank's sign of life.

    seconds : since the ranks started to give them, together. address : of its node.
    step : the latest step that it began. period : steps between two exchanges of its strategy.
    still_seconds : since it came to ``place``.
    collective : the one in which it waits, or that broke; empty: none.
    broken : whether the group broke for this rank; timed_out : because nobody answered in time.
    interrupted : by Ctrl-C.
    """

    seconds: Seconds = 0.0
    address: _Name = ""
    place: Place = "start"
    step: Count = 0
    period: Count = 1
    still_seconds: Seconds = 0.0
    collective: _Name = ""
    broken: bool = False
    timed_out: bool = False
    interrupted: bool = False

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

    @property
    def spot(self) -> str:
        """What this rank waits in, and where."""
        return f"{self.collective or 'a collective'} of {self.where}"

    @property
    def least_step(self) -> int:
        """A step that every rank has begun, since this one has come to where it waits."""
        has_exchanged = self.place not in _EXCHANGE and self.period == 1
        if has_exchanged:
            return self.step
        return max(0, self.step - self.period)


def find_culprit(beats: Mapping[int, Beat], silent: Mapping[int, float]) -> str | None:
    """Return who did what the others waited for; None if nobody stands out.

    beats : every rank's last sign of life. silent : the seconds since that of each rank that gives
    none any more, though the group did not break for it.
    """
    if silent:
        return _describe(_silent_ranks(beats, silent), beats)
    if not any(beat.timed_out for beat in beats.values()):
        return None
    if busy := _busy_ranks(beats):
        return _describe(busy, beats)
    if elsewhere := _ranks_elsewhere(beats):
        return f"{_describe(elsewhere, beats)}: the ranks did not call the same collective"
    return None


def _describe(named: Mapping[int, str], beats: Mapping[int, Beat]) -> str:
    """Return what each of the named ranks did, and in what the others wait."""
    parts = [f"{_name(rank, beats[rank])} {what}" for rank, what in named.items()]
    if len(parts) > 3:
        parts[3:] = [f"and {len(parts) - 3} more"]
    others = {rank: beat for rank, beat in beats.items() if rank not in named}
    spots = Counter(beat.spot for beat in others.values() if beat.waits)
    if spots:
        [(spot, _)] = spots.most_common(1)
        who = f"rank {min(others)} waits" if len(others) == 1 else "the others wait"
        parts.append(f"{who} in {spot}")
    return "; ".join(parts)


def _silent_ranks(beats: Mapping[int, Beat], silent: Mapping[int, float]) -> dict[int, str]:
    """Return what the silence of each of these ranks means."""
    # A stopped rank keeps its connections: the others then wait until the timeout, or until a rank
    # that fell silent later is killed.
    timed_out = any(beat.timed_out for beat in beats.values())
    killed_since = 0.0 if timed_out else min(silent.values()) + _APART_SECONDS
    least_step = max(beat.least_step for beat in beats.values() if beat.waits)
    found = {}
    for rank, seconds in silent.items():
        since = beats[rank].where
        if beats[rank].step < least_step:  # since its last beat it has come further
            since = f"step {least_step}"
        if seconds < killed_since:
            found[rank] = f"ended or was killed at {since} (no sign of life for {seconds:.1f} s)"
        else:
            found[rank] = f"has not moved since {since}, {seconds:.1f} s ago"
    return found


def _busy_ranks(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Return what the ranks do that work in one place for long, in no collective."""
    backward = {beat.where for beat in beats.values() if beat.broken and beat.place in _STEP}
    found = {}
    for rank, beat in beats.items():
        # DistributedDataParallel waits within backward, which looks like computing.
        in_backward = beat.place == "backward" and beat.where in backward
        if not beat.waits and not in_backward and beat.still_seconds >= _STILL_SECONDS:
            what = f"{beat.place} of {beat.where}" if beat.place in _STEP else beat.where
            found[rank] = f"has been in {what} for {beat.still_seconds:.1f} s"
    return found


def _ranks_elsewhere(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Return where the ranks wait that wait in another collective than most."""
    spots = Counter(beat.spot for beat in beats.values() if beat.waits)
    if len(spots) < 2:
        return {}
    rarest = spots.most_common()[-1][0]
    return {
        rank: f"waits in {rarest}"
        for rank, beat in beats.items()
        if beat.waits and beat.spot == rarest
    }


def _name(rank: int, beat: Beat) -> str:
    return f"rank {rank} ({beat.address})" if beat.address else f"rank {rank}"


# --- the watch ---


class FailureWatch:
    """This rank's signs of life, and its question which rank failed: ``start``, then ``close``.

    Call ``explain`` when the error of the thread that trains is caught. Without a store, that is,
    under torchrun, which itself reports which rank failed first, all methods do nothing.

    Parameters
    ----------
    activity : what the thread that trains is doing; that thread creates this object.
    timeout_seconds : how long the other ranks wait for this one in a collective.
    others : connections that are not the group's: ``open_connections`` before it was opened.
    """

    def __init__(
        self,
        store: dist.Store | None,
        launch: LaunchSpec,
        *,
        activity: Activity,
        timeout_seconds: float,
        others: Collection[int] = (),
    ) -> None:
        self._store = store
        self._rank = launch.rank
        self._size = launch.world_size
        self._store_port = launch.master_port
        self._others = others
        self._activity = activity
        self._timeout = timeout_seconds
        self._address = _own_address(launch)
        self._rank0 = Beat()  # its last one that this rank has read
        self._broken: tuple[str, bool] | None = None  # the collective, whether it timed out
        self._keep_store_seconds = 0.0  # at most, once this rank has failed
        self._is_interrupted = False
        self._ended_ranks = 0
        self._began = self._arrived = time.monotonic()
        self._changes = 0
        self._long_pause = (-math.inf, 0.0)  # when it ended, how long this process stood still
        self._closing = threading.Event()
        self._training_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)

    def start(self) -> None:
        """Start to give signs of life. Collective: the ranks' clocks of beats start together."""
        if self._store is None:
            return
        self._store.set(_BEAT.format(self._rank), self._beat())
        dist.barrier()
        self._began = time.monotonic()
        self._thread.start()

    def explain(self, error: BaseException) -> str | None:
        """Return which rank broke the collective that raised ``error``; None if nobody knows.

        Any other error is this rank's own: then the others are told, and the result is None.
        """
        if (collective := broken_collective(error)) is not None:
            return self.explain_broken(collective, timed_out=timed_out(error))
        if self._store is None:
            return None
        reason = cause_of(error)
        name = type(error).__name__
        if not isinstance(error, UserError | GroupError) and reason != name:
            reason = f"{name}: {reason}"
        self._keep_store_seconds = self._timeout  # one of the others may still compute
        self._tell(_MESSAGE, f"rank {self._rank} stopped: {reason}")
        return None

    def interrupted(self) -> None:
        """Tell the other ranks that Ctrl-C ends this one; again without effect."""
        if self._store is None or self._is_interrupted:
            return
        self._is_interrupted = True
        self._keep_store_seconds = _INTERRUPT_SECONDS
        with contextlib.suppress(*_NO_ANSWER):
            self._ask(lambda store: store.set(_BEAT.format(self._rank), self._beat()))
        self._tell(_MESSAGE, _was_interrupted(self._rank))

    def explain_broken(self, collective: str, *, timed_out: bool) -> str | None:
        """Return which rank this one waited for when ``collective`` broke; None if nobody knows.

        Takes four seconds unless a rank has told why it failed: if one was killed, its silence
        must show first.
        """
        if self._store is None:
            return None
        self._broken = (collective, timed_out)
        self._keep_store_seconds = _LEAVE_SECONDS
        broke_here = f"({collective} broke here"
        time.sleep(_POLL_SECONDS)  # for the thread to notice that this process itself stood still
        ended, pause = self._long_pause
        if time.monotonic() - ended < self._timeout:
            return (
                f"rank {self._rank} ({self._address}), this one, stood still for {pause:.1f} s at "
                f"{self._sample().where}: it was stopped, or its machine swapped or slept. "
                f"{broke_here})"
            )
        another_ended = f"{broke_here}: another rank has ended)"
        if self._rank0.interrupted:  # and its store may have ended with it
            return f"{_was_interrupted(0)}. {another_ended}"
        try:
            before = self._read_beats()
            deadline = time.monotonic() + _COMPARE_SECONDS
            while time.monotonic() < deadline:
                if message := self._ask(_told):
                    self._keep_store_seconds = self._timeout
                    return f"{message}. {another_ended}"
                time.sleep(_POLL_SECONDS)
            beats = self._read_beats()
        except _NO_ANSWER as error:
            # A rank 0 that stands still keeps its store's connections, one that ended does not.
            rank0_ended = isinstance(error, dist.DistNetworkError)
            mine = msgspec.structs.replace(self._sample(), timed_out=not rank0_ended)
            beats = before = {0: self._rank0, self._rank: mine}
        silent = self._silent_seconds(before, beats)
        self._ended_ranks = len(silent)
        culprit = find_culprit(beats, silent)
        if culprit is None:
            return None
        return f"{self._tell(_FOUND, culprit)}. {broke_here})"

    def _silent_seconds(
        self, before: Mapping[int, Beat], beats: Mapping[int, Beat]
    ) -> dict[int, float]:
        """Return for how long each rank has been silent that gave no beat between two readings."""
        now = time.monotonic() - self._began
        silent = {}
        for rank, beat in beats.items():
            if beat.seconds == before[rank].seconds and not beat.broken:
                silent[rank] = now - beat.seconds
        return silent

    def message(self) -> str | None:
        """Return what the rank that failed first has told, if any."""
        with contextlib.suppress(*_NO_ANSWER):
            return self._ask(_told) or None
        return None

    def close(self) -> None:
        """Give no more signs of life. After a failure the process must end afterwards.

        Then rank 0 closes the group's connections, so that all ranks notice, and keeps the store
        until the living ones know why: for at most 8 s, or the timeout if a rank has told it.
        """
        if self._keep_store_seconds and self._store is not None:
            with contextlib.suppress(*_NO_ANSWER):
                self._ask(lambda store: store.add(_LEFT, 1))
            if self._rank == 0:
                _close_connections(self._store_port, self._others)
                deadline = time.monotonic() + self._keep_store_seconds
                living = self._size - self._ended_ranks
                while time.monotonic() < deadline and self._store.add(_LEFT, 0) < living:
                    time.sleep(_POLL_SECONDS)
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)  # it may wait for a rank 0 that stands still

    def _run(self) -> None:
        assert self._store is not None
        store = self._store.clone()  # with a connection of its own: a request may block
        key = _BEAT.format(self._rank)
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):  # rank 0 is lost
            while not self._closing.is_set():
                store.set(key, self._beat())
                if self._rank > 0:
                    self._rank0 = decode(store.get(_BEAT.format(0)), Beat, name="a beat")
                elif _told(store):  # Gloo often notices a lost rank only at its timeout
                    _close_connections(self._store_port, self._others)
                    break
                began = time.monotonic()
                self._closing.wait(BEAT_SECONDS)
                if INTERRUPT.is_set():
                    self.interrupted()
                pause = time.monotonic() - began
                if pause > self._timeout:
                    self._long_pause = (time.monotonic(), pause)

    def _sample(self) -> Beat:
        """Return this rank's beat: what its training thread is doing now."""
        activity = self._activity
        now = time.monotonic()
        if activity.changes != self._changes:
            self._changes = activity.changes
            self._arrived = now
        collective, timed_out = self._broken or (self._collective(), False)
        return Beat(
            now - self._began,
            self._address,
            activity.place,
            activity.step,
            activity.period,
            now - self._arrived,
            collective,
            self._broken is not None,
            timed_out,
            self._is_interrupted,
        )

    def _beat(self) -> str:
        return encode(self._sample()).decode()

    def _collective(self) -> str:
        """Return the collective in which the training thread is; "" if it is in none."""
        name = ""
        frame = sys._current_frames().get(self._training_thread)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith("distributed_c10d.py") and code.co_name != "wrapper":
                name = code.co_name
            frame = frame.f_back
        return name

    def _read_beats(self) -> dict[int, Beat]:
        """Write this rank's beat, and return every rank's last one."""

        def ask(store: dist.Store) -> list[bytes]:
            store.set(_BEAT.format(self._rank), self._beat())
            return store.multi_get([_BEAT.format(rank) for rank in range(self._size)])

        beats = [decode(content, Beat, name="a beat") for content in self._ask(ask)]
        return dict(enumerate(beats))

    def _tell(self, key: str, text: str) -> str:
        """Tell the other ranks why this one ends; return what the first one told that did so."""
        with contextlib.suppress(*_NO_ANSWER):
            return self._ask(lambda store: store.compare_set(key, "", text)).decode()
        return text

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        """Return the store's answer; raise TimeoutError if it does not come soon.

        The store's own operations block until TCP times out.
        """
        store = self._store
        assert store is not None
        return in_thread(lambda: question(store)).result(_ANSWER_SECONDS)


def _own_address(launch: LaunchSpec) -> str:
    """Return this node's address as the others see it, else its name."""
    try:
        return route_to(launch.master_ip or "")
    except OSError:
        return socket.gethostname()


def _was_interrupted(rank: int) -> str:
    return f"rank {rank} was interrupted (Ctrl-C)"


def _told(store: dist.Store) -> str:
    """Return the message of the rank that failed first; "" if there is none."""
    if not store.check([_MESSAGE]):
        return ""
    return store.get(_MESSAGE).decode(errors="replace")


def open_connections() -> dict[int, set[int]]:
    """Return the ports of each TCP connection of this process, by its descriptor."""
    try:
        connections = psutil.Process().net_connections(kind="tcp")
    except psutil.Error:  # a system that keeps them secret
        return {}
    return {
        connection.fd: {connection.laddr.port, connection.raddr.port}
        for connection in connections
        if connection.raddr  # else it only listens
    }


def _close_connections(store_port: int, others: Collection[int]) -> None:
    """Close the connections opened since the group, but not the store's: all ranks then notice.

    torch closes them only when nothing refers to the group any more, but the model and the error
    still do.
    """
    for descriptor, ports in open_connections().items():
        if descriptor not in others and store_port not in ports:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.shutdown(socket.SHUT_RDWR)


# --- under NCCL ---


def nccl_failure() -> bool | None:
    """Return True if NCCL's watchdog saw a timeout, False if another error, None if none.

    A strategy may have groups of its own; a broken one shows there alone.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) == dist.Backend.NCCL:
            error = group._get_backend(torch.device("cuda")).get_error().name
            if error != "SUCCESS":
                return error == "TIMEOUT"
    return None


class CollectiveGuard:
    """Ends this rank after the group broke, if the thread that trains cannot notice.

    NCCL's collectives return before they are done. If a rank is lost, the thread that trains waits
    for its GPU for ever, and no exception reaches it. So a thread asks the watchdog instead, and
    whether another rank has told why it stopped. From ``start`` to ``close``.

    Parameters
    ----------
    failure : as ``nccl_failure``.
    watch : of this rank.
    end : called with ``timed_out``, to say what happened and end the process.
    """

    def __init__(
        self,
        failure: Callable[[], bool | None],
        watch: FailureWatch,
        end: Callable[[bool], object],
    ) -> None:
        self._failure = failure
        self._watch = watch
        self._end = end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collective guard", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread: the group is about to close, or the thread that trains has noticed."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            timed_out = self._failure()
            if timed_out is None and self._watch.message() is None:
                continue
            if not self._closed.wait(_GRACE_SECONDS):  # the training thread's own message is better
                self._end(bool(timed_out))
            return
