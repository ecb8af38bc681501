"""Why a collective broke: from torch's error, and from the failed rank's message in the store."""

import contextlib
import os
import re
import socket
import stat
import time
import traceback
from collections.abc import Callable, Collection
from typing import TypeVar

import torch.distributed as dist

from common.errors import first_line
from common.utils.processes import in_thread
from common.utils.system import open_descriptors

T = TypeVar("T")
_ANSWER_SECONDS = 3.0
_POLL_SECONDS = 0.05
_MESSAGE, _FETCHED = "message", "fetched"  # keys in the store
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|connect failure|remote "
    r"process exited|"
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
    in_backward = any(frame.name == "backward" for frame in frames)
    unnamed = "DistributedDataParallel's all_reduce in backward" if in_backward else "a collective"
    return next((name for name in calls if name != "wrapper"), unnamed)


def timed_out(error: BaseException) -> bool:
    """Return whether a broken collective waited in vain, rather than lost its connection."""
    return re.search(r"timed? ?out", str(error), re.IGNORECASE) is not None


def explain_collective_failure(error: BaseException) -> str | None:
    """Return a message for the user if ``error`` is a collective that lost a rank, else None."""
    if (collective := broken_collective(error)) is None:
        return None
    return (
        f"{collective} broke: another rank has ended, or did not answer in time. Its output shows "
        "why; if it shows nothing, its process was killed or its node was lost. (torch: "
        f"{first_line(error)})"
    )


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
        reason, name = first_line(error), type(error).__name__
        if not isinstance(error, ValueError | RuntimeError) and reason != name:
            reason = f"{name}: {reason}"
        message = f"rank {self._rank} stopped: {reason}"
        self._ask(lambda store: store.compare_set(_MESSAGE, "", message))

    def fetch(self) -> str | None:
        """Return the message of the rank that failed first; None if it was killed before."""
        message = self._ask(
            lambda store: store.get(_MESSAGE).decode() if store.check([_MESSAGE]) else None
        )
        self._published = message is not None
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
