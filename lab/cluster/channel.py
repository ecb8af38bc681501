"""The supervisor process of a cluster, from outside: it has its own namespaces, answers lines of JSON, and ends with its input.

Order: ``Channel`` starts it, ``wait_until_ready``, ``ask``, ``close``. A thread of the channel calls two functions with what the
nodes write and how they end.
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
from lab.cluster.node_supervisor import SUPERVISOR_CODE

_READY_SECONDS = 180.0
_ANSWER_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class Channel:
    """A running supervisor.

    Parameters
    ----------
    spec : of the cluster, see ``lab.cluster.node_supervisor.main``.
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
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        # On loopback the supervisor must outlive this process for a moment, to end the nodes; elsewhere the kernel does.
        prefix: tuple[str, ...] = ()
        before_exec = None
        if not spec["loopback"]:
            unshare = tools.unshare_command()
            assert unshare is not None  # ``Cluster`` has asked ``namespaces_refused``
            prefix, before_exec = unshare, kill_on_parent_exit()
        self._in_namespaces = bool(prefix)
        self._process = subprocess.Popen(
            [
                *prefix,
                sys.executable,
                "-P",
                "-c",
                SUPERVISOR_CODE,
                str(REPOSITORY),
                json.dumps(spec),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            preexec_fn=before_exec,
            env=os.environ | {"PATH": tools.search_path(), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Wait for network and interpreter; GroupError where they do not come."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self.networks) or self.failure is not None, _READY_SECONDS
            )
        if not self.networks:
            raise GroupError(
                f"the cluster did not start: {self.failure or f'not ready within {_READY_SECONDS:g} s'}"
            )

    @property
    def host_pid(self) -> int:
        """The first process within the namespaces, as seen from outside; ``unshare`` has started it where there are any."""
        children = psutil.Process(self._process.pid).children()
        return children[0].pid if self._in_namespaces and children else self._process.pid

    def processes(self) -> list[int]:
        """Return the process ids, as seen from outside, of all that runs within."""
        return descendants(self._process.pid)

    def ask(self, what: str, **more: Any) -> Any:
        """Send a request and return its answer. UserError where it is refused, GroupError where the cluster has ended."""
        with self._changed:
            number = self._send(what, **more)
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

    def _send(self, what: str, **more: Any) -> int:
        self._requests += 1
        request = {"do": what, "id": self._requests, **more}
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
        except (OSError, ValueError) as error:
            raise GroupError(self._ended()) from error
        return self._requests

    def _ended(self) -> str:
        return f"the cluster has ended: {self.failure or 'it was closed'}"

    def _read(self) -> None:
        """Read the supervisor's messages until it ends; runs in a thread."""
        for line in self._stdout:
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
            self.failure = self.failure or self._last_error()
            self._changed.notify_all()

    def _last_error(self) -> str:
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            return "its first process is gone"
        return re.sub(r"^unshare: ", "unshare says: ", lines[-1])

    def close(self) -> None:
        """End the supervisor, and with it everything within; return when it is gone."""
        with contextlib.suppress(OSError):
            self._stdin.close()  # the supervisor ends when its input does, and the kernel ends all others
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in [*self.processes(), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(_CLOSE_SECONDS)
        self._reader.join(_CLOSE_SECONDS)
        self._stdout.close()
        self._stderr.close()
