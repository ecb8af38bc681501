"""Why a collective broke: what torch's error says, and what the rank that failed tells the others through the store."""

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

from common.errors import GroupError
from common.utils.processes import in_thread

_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|connect failure|remote process exited|"
    r"socket|peer",
    re.IGNORECASE,
)


def explain_collective_failure(error: BaseException) -> str | None:
    """Return what to tell the user where ``error`` is a collective that lost a rank, else None.

    The collective's name is read from the traceback: torch's message has only the address of a neighbour, often not
    the culprit's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]
    if not _LOST.search(str(error)):
        return None
    collective = next((name for name in calls if name != "wrapper"), None)
    if collective is None:
        in_backward = any(frame.name == "backward" for frame in frames)
        collective = (
            "DistributedDataParallel's all_reduce in backward" if in_backward else "a collective"
        )
    return (
        f"{collective} broke: another rank has ended, or did not answer in time. Its own output says why; where "
        f"it has none, its process was killed or its node lost. Finished checkpoints are kept. "
        f"(torch says: {first_line(error)})"
    )


def is_torchs(error: BaseException) -> bool:
    """Whether an error was raised by torch, or by code that this project does not know, not by this project."""
    return isinstance(error, RuntimeError) and not isinstance(error, GroupError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says anything, else its type."""
    lines = [line for line in str(error).strip().split("\n") if line.strip()]
    return lines[0] if lines else type(error).__name__


T = TypeVar("T")
_ANSWER_SECONDS = 3.0
_POLL_SECONDS = 0.05
_WORDS, _PARTED = "words", "parted"


class FailureReport:
    """The words of one rank. Without a store (under torchrun, which tells itself who failed first) nothing is told.

    Parameters
    ----------
    patience_seconds : how long rank 0 holds the store for those who still compute and have not noticed.
    others_sockets : of this process, which are not the group's: ``open_sockets`` before it was formed.
    """

    def __init__(
        self,
        store: dist.TCPStore | None,
        rank: int,
        size: int,
        *,
        patience_seconds: float,
        others_sockets: Collection[int],
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._patience_seconds, self._others_sockets = patience_seconds, others_sockets
        self._words_exist = False

    def publish(self, error: BaseException) -> None:
        """Tell the others that ``error`` ends this rank."""
        self._words_exist = True
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        name = (
            ""
            if isinstance(error, ValueError | RuntimeError) and first_line
            else type(error).__name__
        )
        words = ": ".join(part for part in (name, first_line) if part)
        self._ask(
            lambda store: store.compare_set(_WORDS, "", f"rank {self._rank} stopped: {words}")
        )

    def fetch(self) -> str | None:
        """Return why the group broke, in the words of the first rank that left some; None where there are none: it was killed."""
        words = self._ask(
            lambda store: store.get(_WORDS).decode() if store.check([_WORDS]) else None
        )
        self._words_exist = words is not None
        return words

    def close(self) -> None:
        """Leave the store; where there are words to read, rank 0 stays until the others have parted, or its patience ends.

        The process must end after it.
        """
        if not self._words_exist:
            return
        self._ask(lambda store: store.add(_PARTED, 1))
        if self._rank > 0 or self._size == 1 or self._store is None:
            return
        _hang_up(self._store.port, self._others_sockets)
        deadline = time.monotonic() + self._patience_seconds
        while (
            time.monotonic() < deadline and self._store.add(_PARTED, 0) < self._size
        ):  # in this process: it answers
            time.sleep(_POLL_SECONDS)

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        """Return the store's answer, None where there is none soon: its own operations wait for as long as TCP hopes."""
        if self._store is None:
            return None
        try:
            return in_thread(lambda: question(self._store)).result(_ANSWER_SECONDS)
        except (TimeoutError, dist.DistStoreError, dist.DistNetworkError):
            return None


def open_sockets() -> set[int]:
    """Return the sockets that this process has open, by inode."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return found


def _hang_up(store_port: int, others_sockets: Collection[int]) -> None:
    """Close the group's connections but the store's, as this process's end would, so that the others notice now.

    torch closes them only when nothing refers to the group any more, and the model and the error in flight do.
    """
    for name in os.listdir("/dev/fd"):
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(int(name))) as one,
        ):  # OSError: no socket, not connected
            if (
                os.fstat(one.fileno()).st_ino not in others_sockets
                and one.family != socket.AF_UNIX
                and store_port not in (one.getsockname()[1], one.getpeername()[1])
            ):
                one.shutdown(socket.SHUT_RDWR)
