"""Why a collective broke: from torch's error, and from the failed rank's message in the store.

``FailureReport`` sends that message. Under NCCL ``CollectiveGuard`` notices what broke.
"""

import contextlib
import os
import re
import socket
import stat
import threading
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from common.errors import first_line
from common.utils.processes import in_thread
from common.utils.system import open_descriptors

T = TypeVar("T")
_ANSWER_SECONDS = 3.0
_POLL_SECONDS = 0.05
_LOOK_SECONDS, _GRACE_SECONDS = 1.0, 2.0
_MESSAGE, _FETCHED = "message", "fetched"  # keys in the store
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
    if not isinstance(error, RuntimeError) or not _LOST.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]
    # DistributedDataParallel raises in autograd itself; a strategy's own hook adds frames.
    in_autograd = bool(frames) and Path(frames[-1].filename).parent.name == "autograd"
    unnamed = "DistributedDataParallel's all_reduce in backward" if in_autograd else "a collective"
    return next((name for name in calls if name != "wrapper"), unnamed)


def timed_out(error: BaseException) -> bool:
    """Return whether a broken collective waited in vain, rather than lost its connection."""
    return re.search(r"timed? ?out", str(error), re.IGNORECASE) is not None


def explain_collective_failure(error: BaseException) -> str | None:
    """Return a message for the user if ``error`` is a collective that lost a rank, else None."""
    if (collective := broken_collective(error)) is None:
        return None
    return f"{explain_lost_rank(collective)} (torch: {cause_of(error)})"


def explain_lost_rank(collective: str) -> str:
    """Return a message for the user if nobody knows which rank ``collective`` lost."""
    return (
        f"{collective} broke: another rank has ended, or did not answer in time. Its output shows "
        "why; if it shows nothing, its process was killed or its node was lost."
    )


def cause_of(error: BaseException) -> str:
    """Return the first line of an error; of NCCL's, the line under "Last error:", if any.

    NCCL's first line has only the kind of the error and a line of torch's source.
    """
    below = str(error).partition("\nLast error:\n")[2].partition("\n")[0].strip()
    return below or first_line(error)


def nccl_failure() -> bool | None:
    """Return True if NCCL's watchdog saw a timeout, False if another error, None if none."""
    group = dist.distributed_c10d._get_default_group()
    error = group._get_backend(torch.device("cuda")).get_error().name
    return None if error == "SUCCESS" else error == "TIMEOUT"


class CollectiveGuard:
    """Ends this rank after the group broke, if the thread that trains cannot notice.

    NCCL's collectives return before they are done. If a rank is lost, the thread that trains waits
    for its GPU for ever, and no exception reaches it. So a thread asks the watchdog instead, and
    whether another rank has published why it stopped. From ``start`` to ``close``.

    Parameters
    ----------
    failure : as ``nccl_failure``.
    report : of this rank.
    end : called with ``timed_out``, to say what happened and end the process.
    """

    def __init__(
        self,
        failure: Callable[[], bool | None],
        report: "FailureReport",
        end: Callable[[bool], object],
    ) -> None:
        self._failure, self._report, self._end = failure, report, end
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
            if timed_out is None and self._report.fetch() is None:
                continue
            if not self._closed.wait(_GRACE_SECONDS):  # the training thread's own message is better
                self._end(bool(timed_out))
            return


class FailureReport:
    """Tells the other ranks why this one failed.

    Call ``publish`` or ``fetch`` where the failure is caught, then ``close``. All three do nothing
    without a store, that is, under torchrun, which itself reports which rank failed first.

    Parameters
    ----------
    patience_seconds : how long rank 0 keeps the store alive for ranks that have not noticed yet.
    other_sockets : what ``open_sockets`` returned before the group was opened; these stay open.
    """

    def __init__(
        self,
        store: dist.TCPStore | None,
        rank: int,
        size: int,
        *,
        patience_seconds: float,
        other_sockets: Collection[int],
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._patience_seconds, self._other_sockets = patience_seconds, other_sockets
        self._published = False

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that ``error`` ends this one, unless another has published first."""
        self._published = True
        reason, name = cause_of(error), type(error).__name__
        if not isinstance(error, ValueError | RuntimeError) and reason != name:
            reason = f"{name}: {reason}"
        message = f"rank {self._rank} stopped: {reason}"
        self._ask(lambda store: store.compare_set(_MESSAGE, "", message))

    def fetch(self) -> str | None:
        """Return the message of the rank that failed first; None if it was killed before."""
        message = self._ask(
            lambda store: store.get(_MESSAGE).decode() if store.check([_MESSAGE]) else None
        )
        self._published |= message is not None
        return message

    def close(self) -> None:
        """Disconnect from the store; the process must end afterwards.

        If there is a message, rank 0 closes the group's connections, then waits until every rank
        has fetched the message.
        """
        if not self._published:
            return
        self._ask(lambda store: store.add(_FETCHED, 1))
        if self._rank > 0 or self._size == 1 or self._store is None:
            return
        _close_connections(self._store.port, self._other_sockets)
        deadline = time.monotonic() + self._patience_seconds
        # Rank 0's own store answers at once, so it needs no thread.
        while time.monotonic() < deadline and self._store.add(_FETCHED, 0) < self._size:
            time.sleep(_POLL_SECONDS)

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        """Return the store's answer; None if it does not come soon.

        The store's own operations block until TCP times out.
        """
        store = self._store
        if store is None:
            return None
        try:
            return in_thread(lambda: question(store)).result(_ANSWER_SECONDS)
        except (TimeoutError, dist.DistStoreError, dist.DistNetworkError):
            return None


def open_sockets() -> set[int]:
    """Return the inodes of the sockets that this process has open."""
    found = set()
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return found


def _close_connections(store_port: int, other_sockets: Collection[int]) -> None:
    """Close the group's connections, but not the store's: the other ranks then notice at once.

    torch closes them only when nothing refers to the group any more, but the model and the error
    still do.
    """
    for descriptor in open_descriptors():
        # OSError: not a socket, or not connected
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if (
                os.fstat(connection.fileno()).st_ino not in other_sockets
                and connection.family != socket.AF_UNIX
                and store_port not in (connection.getsockname()[1], connection.getpeername()[1])
            ):
                connection.shutdown(socket.SHUT_RDWR)
