"""``HostConnection``: the connection to one host, a process of the system's ``ssh``."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any, cast

from common.errors import UserError
from common.utils.processes import kill_on_parent_exit
from common.utils.typed_json import calm
from lab.ssh.hosts import Host, SSHOptions, ssh_command

LOST = 255
"""The status of a host whose connection broke, as ssh itself reports it."""

_KEPT_LINES = 1000


@dataclass
class HostConnection:
    """The connection to one host.

    errors : the file that receives what ssh and the login shell print.
    ready : whether the remote agent has answered. closed : whether the connection has ended.
    heard : when the host last sent something.
    lines : the last lines that its command wrote. answers : the last answer to each request.
    """

    host: Host
    ssh: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]
    errors: IO[bytes]
    ready: bool = False
    closed: bool = False
    heard: float = field(default_factory=time.monotonic)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, host: Host, options: SSHOptions, program: bytes) -> "HostConnection":
        """Start ``ssh`` and send it ``program``. UserError if there is no ssh."""
        errors = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - HostConnections closes it
        try:
            # In its own session: Ctrl-C at the terminal reaches only lab, which then ends the
            # hosts in order.
            ssh = subprocess.Popen(
                ssh_command(host, options),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=kill_on_parent_exit(),
            )
        except FileNotFoundError:
            raise UserError(
                "there is no ssh on this machine: install it (package openssh-client)"
            ) from None
        connection = cls(host, ssh, cast(IO[bytes], ssh.stdin), cast(IO[bytes], ssh.stdout), errors)
        connection.write(program)
        return connection

    def write(self, content: bytes) -> None:
        """Send bytes to the remote program."""
        with contextlib.suppress(OSError, ValueError):  # it has ended: the reading thread finds out
            self.stdin.write(content)
            self.stdin.flush()

    def send(self, **request: Any) -> None:
        """Send a request to the remote agent."""
        self.write(json.dumps(request).encode() + b"\n")

    @property
    def connecting(self) -> bool:
        """Whether the remote agent may still answer for the first time."""
        return not self.ready and not self.closed

    @property
    def error_lines(self) -> list[str]:
        """The lines that ssh and the login shell printed, without empty ones."""
        written = os.fstat(self.errors.fileno()).st_size
        # ssh writes at the file's one offset, so a seek would let it write over what is there.
        text = os.pread(self.errors.fileno(), written, 0)
        lines = text.decode(errors="replace").splitlines()
        return [calm(line.strip()) for line in lines if line.strip()]

    def end_input(self) -> None:
        """Close the remote agent's input, so that it ends everything."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def kill(self) -> None:
        """Kill ssh with its ProxyCommand; a shared master connection that ssh left lives on."""
        if self.ssh.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ssh.pid, signal.SIGKILL)
