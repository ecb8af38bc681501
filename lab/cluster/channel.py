"""Start the supervisor process of a cluster, send it requests, and receive what nodes do.

Order: ``Channel`` starts it, then ``build``, ``ask`` and ``close``.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from common.errors import GroupError, UserError
from common.utils.paths import REPOSITORY
from common.utils.processes import descendants, kill_on_parent_exit
from lab.cluster import tools
from lab.cluster.network import Link, pids_in

SUPERVISOR_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lab.cluster.node_supervisor import main; main()"
)
"""For ``python -P -c``, with the repository as argument, so that it need not be installed."""

_READY_SECONDS = 180.0
_ANSWER_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class Channel:
    """A running supervisor.

    Parameters
    ----------
    loopback : start it without namespaces.
    on_event : called in a thread with a node's number and a line that it wrote, or the exit status
        of its program.

    ``failure`` is None until the supervisor has ended, then the reason.
    """

    def __init__(self, *, loopback: bool, on_event: Callable[[int, str | int], None]) -> None:
        self.failure: str | None = None
        self._networks: list[str] = []
        self._on_event, self._loopback = on_event, loopback
        self._lock, self._number = threading.Lock(), 0
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (``close`` closes it)
        unshare = () if loopback else tools.unshare_command() or ()
        self._requests, requests = Pipe()
        self._events, events = Pipe(duplex=False)
        with requests, events:
            self._process = subprocess.Popen(
                [*unshare, sys.executable, "-P", "-c", SUPERVISOR_CODE, str(REPOSITORY)],
                stdin=requests.fileno(),
                stdout=events.fileno(),
                stderr=self._stderr,
                start_new_session=True,
                # On loopback the supervisor outlives this process for a moment, to end the nodes.
                preexec_fn=None if loopback else kill_on_parent_exit(),
                env=os.environ | {"PATH": tools.search_path(), "OMP_NUM_THREADS": "1"},
            )
        self._reader = threading.Thread(target=self._read_events, daemon=True)
        self._reader.start()

    def build(self, nodes: int, link: Link | None, *, preload: bool) -> None:
        """Make the network, see ``NodeSupervisor.build``. Raises GroupError if that fails."""
        failed = "the cluster did not start"
        late = f"{failed}: not ready within {_READY_SECONDS:g} s"
        try:
            self._networks = self.ask(
                "build", nodes, link, preload, limit_seconds=_READY_SECONDS, ended=failed, late=late
            )
        except UserError as error:
            raise GroupError(f"{failed}: {error}") from error

    @property
    def host_pid(self) -> int:
        """The first process in the namespaces, as seen from outside; ``unshare`` has started it."""
        started = [] if self._loopback else descendants(self._process.pid)  # parents come first
        return [*started, self._process.pid][0]

    def pids(self, node: int) -> list[int]:
        """Return the process ids of what runs on a node, as seen from outside."""
        return pids_in(self._networks[node], descendants(self._process.pid))

    def ask(
        self,
        name: str,
        *arguments: Any,
        limit_seconds: float = _ANSWER_SECONDS,
        ended: str = "the cluster has ended",
        late: str = f"the cluster has not answered within {_ANSWER_SECONDS:g} s",
    ) -> Any:
        """Call a method of the supervisor and return its result.

        Raises UserError if the supervisor refuses, GroupError with ``ended`` and the reason if it
        has ended, or with ``late`` after ``limit_seconds``.
        """
        with self._lock:
            self._number += 1
            number = None
            try:
                self._requests.send((self._number, name, arguments))
                while number != self._number:  # skip the answer to a call that was interrupted
                    if not self._requests.poll(limit_seconds):
                        raise GroupError(late)
                    number, answer = self._requests.recv()
            except (EOFError, OSError) as error:
                self._reader.join(_CLOSE_SECONDS)  # it sets ``failure``
                raise GroupError(f"{ended}: {self.failure}") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _read_events(self) -> None:
        """Pass events on until the supervisor ends, then set ``failure``; runs in a thread."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._on_event(*self._events.recv())
        self._stderr.seek(0)
        errors = self._stderr.read().decode(errors="replace").strip().splitlines()
        last = ["its first process has ended", *errors][-1]
        self.failure = re.sub(r"^unshare: ", "unshare says: ", last)

    def close(self) -> None:
        """End the supervisor and with it the whole cluster; return when every process has ended."""
        self._requests.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in [*descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(_CLOSE_SECONDS)
        self._reader.join(_CLOSE_SECONDS)
        self._events.close()
        self._stderr.close()
