"""``Remote``: a request that ``lab.ssh`` serves on a host, at the other end of an ssh process.

``served`` opens one on each of several hosts and leaves nothing behind, ``wait`` waits for them,
``ask`` returns their answers. A thread for each host reads what it writes, so that a slow terminal
delays no sign of life.
"""

import contextlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any, TypeVar, cast

from common.utils.processes import kill_group, start_child
from common.utils.typed_json import calm, decode
from lab.ssh.hosts import Host, SSHOptions, explain, refuse_hosts, ssh_command
from lab.ssh.node import READY, RESULT

OnLine = Callable[[int, str], object]
Answer = TypeVar("Answer")
_KEPT_LINES = 1000
_LONGEST_LINE = 1 << 16  # bytes, as the next two
_MOST_LOGIN = 1 << 24
_MOST_ERRORS = 1 << 24
_AT_ONCE = 64  # logins
_TURN_SECONDS = 20.0
BEAT_SECONDS = 0.2
"""From one sign of life to the next."""
_LOST = 255  # as ssh itself reports that its connection broke
_ANSWER_SECONDS = 60.0
_END_SECONDS = 15.0  # for commands to end after SIGKILL, and then for ssh
_SSH_SECONDS = 2.0  # from the end of ssh's output to its own


class Remote:
    """A request on a host.

    ready : whether the host serves it. lines : the last lines that it wrote. ended : when the
    connection ended; then result is the JSON that the host returned, None if the connection broke,
    and errors is what ssh and the login shell wrote.
    """

    def __init__(self, host: Host, request: Mapping[str, Any], options: SSHOptions) -> None:
        self.host = host
        self.ready = False
        self.ended = math.inf
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.result: bytes | None = None
        self.errors: list[str] = []
        self._login_is_endless = False
        self._stderr = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - ``finish`` closes it
        # Ctrl-C at the terminal reaches only lab, which then ends the hosts.
        self._ssh = start_child(
            ssh_command(host, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        # A host may send errors without end, and the disk is not its own.
        resource.prlimit(self._ssh.pid, resource.RLIMIT_FSIZE, (_MOST_ERRORS, _MOST_ERRORS))
        self._stdin = cast(IO[bytes], self._ssh.stdin)
        self.output = cast(IO[bytes], self._ssh.stdout)
        self.send(json.dumps(request).encode() + b"\n")

    def send(self, content: bytes) -> None:
        """Send bytes to the host, unless the connection has ended."""
        with contextlib.suppress(OSError, ValueError):
            os.write(self._stdin.fileno(), content)

    def skip_login(self) -> bool:
        """Read what the login shell prints; return whether the host then serves the request.

        A login that prints more than ``_MOST_LOGIN`` bytes ends the connection.
        """
        printed = 0
        while not self.ready and (line := self.output.readline(_LONGEST_LINE)):
            self.ready = line == READY
            printed += len(line)
            if printed > _MOST_LOGIN:
                self._login_is_endless = True
                self.kill()
                break
        return self.ready

    def read(self, on_line: OnLine) -> None:
        """Read lines until the connection ends; in a thread."""
        try:
            lines = iter(partial(self.output.readline, _LONGEST_LINE), b"")
            for line in lines if self.skip_login() else []:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                on_line(self.host.rank, self.lines[-1])
        finally:  # else the launch would wait for this host for ever
            self.finish()

    def finish(self) -> None:
        """Read the result and the errors, when the output has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ssh.wait(_SSH_SECONDS)
        with self._stderr, self.output, self._stdin:
            # ssh writes at the file's one offset, so a seek would let it write over what is there.
            text = os.pread(self._stderr.fileno(), _MOST_ERRORS, 0)
        lines = calm(text.decode(errors="replace")).splitlines()
        self.errors = [line.strip() for line in lines if line.strip()]
        if self._login_is_endless:
            self.errors.append(
                f"its login printed more than {_MOST_LOGIN:,} bytes before the command began: look "
                "at what ~/.bashrc prints there"
            )
        found = re.search(rb"^%b(.*)\n" % RESULT, text, re.MULTILINE)
        self.result = found[1] if found else None
        self.ended = time.monotonic()

    def poll(self) -> int | None:
        """Return its command's exit status, or -signal; None while it runs, 255 if it was lost."""
        if self.ended == math.inf:
            return None
        with contextlib.suppress(ValueError):  # what the host returned is no number
            return int(self.result or b"")
        return _LOST

    def kill(self) -> None:
        """Kill ssh with its ProxyCommand; a shared master connection that ssh left lives on."""
        kill_group(self._ssh)


@contextlib.contextmanager
def served(
    hosts: Sequence[Host],
    requests: Sequence[Mapping[str, Any]],
    options: SSHOptions,
    on_line: OnLine = lambda node, line: None,
) -> Iterator[list[Remote]]:
    """Serve a request on each host; end the commands, then the connections, and return then.

    At most ``_AT_ONCE`` logins are under way, unless one takes longer than ``_TURN_SECONDS``.

    on_line : called with a host's rank and each line that its command writes.
    """
    remotes: list[Remote] = []
    try:
        for host, request in zip(hosts, requests, strict=True):
            wait(
                remotes,
                lambda: sum(not remote.ready for remote in running(remotes)) < _AT_ONCE,
                _TURN_SECONDS,
            )
            remotes.append(Remote(host, request, options))
            threading.Thread(target=remotes[-1].read, args=[on_line], daemon=True).start()
        yield remotes
    finally:
        signal_all(remotes, signal.SIGKILL)
        wait(remotes, lambda: not any(remote.ready for remote in running(remotes)), _END_SECONDS)
        for remote in running(remotes):
            remote.kill()
        wait(remotes, lambda: not running(remotes), _END_SECONDS)


def running(remotes: Sequence[Remote]) -> list[Remote]:
    """Return those whose connection has not ended."""
    return [remote for remote in remotes if remote.ended == math.inf]


def signal_all(remotes: Sequence[Remote], number: int) -> None:
    """Send a signal to the commands that still run, as a terminal does; 0 is a sign of life."""
    for remote in running(remotes):
        remote.send(bytes([number]))


def wait(
    remotes: Sequence[Remote], condition: Callable[[], object], limit_seconds: float = math.inf
) -> None:
    """Wait until ``condition`` holds, for at most ``limit_seconds``, and send signs of life."""
    deadline = time.monotonic() + limit_seconds
    while not condition() and time.monotonic() < deadline:
        signal_all(remotes, 0)
        time.sleep(BEAT_SECONDS)


def ask(
    hosts: Sequence[Host],
    request: Mapping[str, Any],
    options: SSHOptions,
    *,
    schema: type[Answer],
) -> list[Answer]:
    """Return each host's answer to a request, a ``schema``.

    UserError, with a line for each host that does not answer.
    """
    with served(hosts, [request] * len(hosts), options) as remotes:
        wait(remotes, lambda: not running(remotes), _ANSWER_SECONDS)
    silent = {}
    answers = []
    for remote in remotes:
        if remote.result is None:
            silent[remote.host] = explain(remote.errors, remote.host)
        else:
            answers.append(decode(remote.result, schema, name=str(remote.host)))
    refuse_hosts(silent, of=len(hosts))
    return answers
