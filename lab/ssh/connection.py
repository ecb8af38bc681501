"""``HostConnection``: the connection to one host, a process of the system's ``ssh``, and what arrived over it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from common.errors import UserError
from common.utils.processes import kill_on_parent_exit
from lab.ssh.hosts import Host, SSHOptions, ssh_command

LOST = 255
"""The status of a host whose connection broke; ssh's own exit status then."""

_KEPT_LINES = 1000
_KEPT_BYTES = 1 << 14


@dataclass
class HostConnection:
    """One host.

    ready : its remote agent has answered. closed : nothing more will come. running : a command is; status : how the last one
    ended. heard, hung_up : when the last message arrived, and when one of ssh's output streams last ended.
    """

    host: Host
    ssh: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    ready: bool = False
    closed: bool = False
    running: bool = False
    status: int | None = None
    heard: float = field(default_factory=time.monotonic)
    hung_up: float = 0.0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    rest: bytes = b""
    errors: bytes = b""

    @classmethod
    def open(cls, host: Host, options: SSHOptions, first: bytes) -> "HostConnection":
        """Start ``ssh``, and have it send ``first``. UserError where there is no ssh."""
        try:
            # A session of its own: Ctrl-C at the terminal is for lab alone, which lets the hosts end by themselves.
            ssh = subprocess.Popen(
                ssh_command(host, options),
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
        assert ssh.stdin is not None  # these are pipes, all three
        assert ssh.stdout is not None
        assert ssh.stderr is not None
        with contextlib.suppress(OSError):  # it has ended already: its errors say why
            ssh.stdin.write(first)
            ssh.stdin.flush()
        return cls(host, ssh, ssh.stdin, ssh.stdout, ssh.stderr)

    def send(self, **request: Any) -> None:
        """Send a request to the remote agent."""
        with contextlib.suppress(OSError, ValueError):  # it has ended: the reader finds out
            self.stdin.write(json.dumps(request).encode() + b"\n")
            self.stdin.flush()

    def add_error(self, text: bytes) -> None:
        """Keep text that is no message of the remote agent: of ssh, or of the login shell."""
        self.errors = (self.errors + text)[-_KEPT_BYTES:]

    @property
    def error_lines(self) -> list[str]:
        """The lines that ssh and the login shell printed, without empty ones."""
        lines = self.errors.decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()]

    def kill(self) -> None:
        """Kill ssh with its ProxyCommand. Where ssh has ended already, a shared master connection that it left lives on."""
        if self.ssh.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ssh.pid, signal.SIGKILL)
