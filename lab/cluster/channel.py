"""The host process of a cluster, from outside: started in namespaces of its own, asked by lines of JSON, ended with its input.

``Channel`` starts it; ``wait_until_ready``, then ``ask``; ``close``. What nodes write and how they end is told to two functions,
from a thread of the channel's own.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from common.errors import GroupError, UserError
from common.utils.paths import REPOSITORY
from common.utils.processes import descendants, kill_on_parent_exit
from lab.cluster import tools
from lab.cluster.host import HOST_CODE

_READY_SECONDS = 180.0
_ANSWER_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class Channel:
    """A running host.

    Parameters
    ----------
    spec : of the cluster, see ``lab.cluster.host.main``.
    on_line : called with a node's number and a line that it wrote.
    on_end : called with a node's number and its exit status, when its program has ended.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        on_line: Callable[[int, str], None],
        on_end: Callable[[int, int], None],
    ) -> None:
        self.networks: list[str] = []
        self.failure: str | None = None
        self._on_line, self._on_end = on_line, on_end
        self._changed = threading.Condition()
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._requests = 0
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        # On loopback the host itself must outlive this process for a moment, to end the nodes; elsewhere the kernel does.
        way, wish = (
            ((), None) if spec["loopback"] else (tools.unshare_command(), kill_on_parent_exit())
        )
        self._process = subprocess.Popen(
            [*way, sys.executable, "-P", "-c", HOST_CODE, str(REPOSITORY), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            start_new_session=True,
            preexec_fn=wish,
            env=os.environ | {"PATH": tools.search_path(), "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Wait for network and interpreter; GroupError where they do not come."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.networks or self.failure is not None, _READY_SECONDS
            )
        if not self.networks:
            raise GroupError(
                f"the cluster did not start: {self.failure or f'not ready within {_READY_SECONDS:g} s'}"
            )

    @property
    def host_pid(self) -> int:
        """The first process within the namespaces, as seen from outside; ``unshare`` has started it where there are any."""
        children = psutil.Process(self._process.pid).children()
        return children[0].pid if self._is_unshare() and children else self._process.pid

    def _is_unshare(self) -> bool:
        return os.path.basename(self._process.args[0]) == "unshare"

    def processes(self) -> list[int]:
        """Return the process ids, as seen from outside, of all that runs within."""
        return descendants(self._process.pid)

    def ask(self, what: str, **more: Any) -> Any:
        """Send a request and return its answer. UserError where it is refused, GroupError where the cluster has ended."""
        with self._changed:
            number = self._tell(what, **more)
            self._changed.wait_for(
                lambda: number in self._answers or self.failure is not None, _ANSWER_SECONDS
            )
            answer = self._answers.pop(number, None)
        if answer is None:
            raise GroupError(
                self._ended()
                if self.failure
                else f"the cluster has not answered within {_ANSWER_SECONDS:g} s"
            )
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["result"]

    def _tell(self, what: str, **more: Any) -> int:
        self._requests += 1
        try:
            self._process.stdin.write(
                json.dumps({"do": what, "id": self._requests, **more}).encode() + b"\n"
            )
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise GroupError(self._ended()) from error
        return self._requests

    def _ended(self) -> str:
        return f"the cluster has ended: {self.failure or 'it was closed'}"

    def _read(self) -> None:
        """In a thread of its own: take what the host says, until it ends."""
        for line in self._process.stdout:
            message = json.loads(line)
            if "line" in message:
                self._on_line(message["node"], message["line"])
                continue
            if "ended" in message:
                self._on_end(message["node"], message["ended"])
                continue
            with self._changed:
                if "ready" in message:
                    self.networks = message["ready"]
                elif "failed" in message:
                    self.failure = message["failed"]
                else:
                    self._answers[message["reply"]] = message
                self._changed.notify_all()
        with self._changed:
            self.failure = self.failure or self._last_complaint()
            self._changed.notify_all()

    def _last_complaint(self) -> str:
        self._complaints.seek(0)
        lines = [
            line
            for line in self._complaints.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
        return (
            re.sub(r"^unshare: ", "unshare says: ", lines[-1])
            if lines
            else "its first process is gone"
        )

    def close(self) -> None:
        """End the host, and with it everything within; return when it is gone."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # the host ends when its input does, and the kernel all others with it
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in [*self.processes(), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(_CLOSE_SECONDS)
        self._reader.join(_CLOSE_SECONDS)
        self._process.stdout.close()
        self._complaints.close()
