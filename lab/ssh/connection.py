"""``HostConnection``: the connection to one host, a process of the system's ``ssh``, and what has come over it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError
from common.utils.processes import kill_on_parent_exit
from lab.ssh.hosts import Host, SSHOptions, ssh_command

LOST = 255
"""The status of a host whose connection broke, as ssh has it."""

_KEPT_LINES = 1000
_KEPT_BYTES = 1 << 14


@dataclass
class HostConnection:
    """One host.

    ready : its keeper has answered. closed : nothing more will come. running : a command does; status : how the last one ended.
    """

    host: Host
    ssh: subprocess.Popen
    ready: bool = False
    closed: bool = False
    hung_up: float | None = None
    running: bool = False
    status: int | None = None
    heard: float = field(default_factory=time.monotonic)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    rest: bytes = b""
    errors: bytes = b""

    @classmethod
    def open(cls, host: Host, way: SSHOptions, first: bytes) -> "HostConnection":
        """Start ``ssh``, and have it send ``first``. UserError where there is no ssh."""
        try:
            # A session of its own: Ctrl-C at the terminal is for lab alone, which lets the hosts say their last words.
            ssh = subprocess.Popen(
                ssh_command(host, way),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=kill_on_parent_exit(),
            )
        except FileNotFoundError:
            raise UserError(
                "there is no ssh on this machine: install it (package openssh-client)"
            ) from None
        with contextlib.suppress(OSError):  # it has ended already: its errors say why
            ssh.stdin.write(first)
            ssh.stdin.flush()
        return cls(host, ssh)

    def tell(self, **request: Any) -> None:
        """Send a request to the keeper."""
        with contextlib.suppress(OSError, ValueError):  # it has ended: the reader finds out
            self.ssh.stdin.write(json.dumps(request).encode() + b"\n")
            self.ssh.stdin.flush()

    def complain(self, text: bytes) -> None:
        """Take down what is no message of the keeper: of ssh, of the login shell."""
        self.errors = (self.errors + text)[-_KEPT_BYTES:]

    @property
    def complaints(self) -> list[str]:
        """What ssh and the login shell have said, its lines."""
        return [
            line.strip()
            for line in self.errors.decode(errors="replace").splitlines()
            if line.strip()
        ]

    def kill(self) -> None:
        """End ssh, with a ProxyCommand of its own; one that has ended may have left a master to others, which lives on."""
        if self.ssh.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ssh.pid, signal.SIGKILL)
