"""The hosts of a launch, and the command that reaches each.

``ssh`` is the system's own, so that ~/.ssh/config, agents and jump hosts work as at the prompt.
``parse_hosts`` reads ``--hosts``, ``ssh_command`` makes the command, ``program`` is the text that
runs on the hosts (remote_agent.py).
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.utils.typed_json import shown

CONNECT_SECONDS = 10
_REMOTE = ("remote_handlers.py", "remote_agent.py")
# Reads the length of the program in the first line, then the program and not a byte more: what
# follows is its input. Has only double quotes and no newline, so that no login shell changes it.
_BOOTSTRAP = (
    "import os, sys; sys.path[:] = [p for p in sys.path if p]; "
    'f = os.fdopen(0, "rb", 0, closefd=False); '
    "n = int(f.readline()); t = bytearray(); "
    '[t.extend(f.read(n - len(t)) or sys.exit("cut")) for _ in iter(lambda: len(t) < n, False)]; '
    'exec(compile(bytes(t), "lab/ssh/remote_agent.py", "exec"), {"__name__": "lab_remote_agent"})'
)
# user@name, ssh://user@name:port, [address%interface]. A dash would begin an option of ssh, and
# ProxyCommand and Match of ~/.ssh/config pass a name to a shell.
_NAME = re.compile(r"(?:ssh://)?(?:[\w.+][\w.+-]*@)?[\w.:\[][\w.:%\[\]-]*/?")
_OWN_PYTHON = (
    'cd -- "$0" 2>/dev/null && test -x .venv/bin/python && exec .venv/bin/python -c "$1"; '
    'exec python3 -c "$1"'
)
_GIVEN_PYTHON = 'cd -- "$0" 2>/dev/null; exec "$2" -c "$1"'


@dataclass(frozen=True)
class Host:
    """One host.

    given : as ssh gets it: a name, an alias of ~/.ssh/config, user@name, ssh://user@name:port.
    """

    rank: int
    given: str

    @property
    def name(self) -> str:
        """Without user and port."""
        url = re.fullmatch(r"ssh://(?:.*@)?(.*?)(?::\d+)?/?", self.given)
        return url[1] if url is not None else self.given.rpartition("@")[2]

    def __str__(self) -> str:
        return f"node {self.rank} ({self.name})"


def parse_hosts(text: str, *, shares_a_port: bool) -> list[Host]:
    """Return the hosts of ``--hosts``, rank 0 first.

    UserError if there are none, if a name is empty or impossible, or if a host is named twice.
    ``shares_a_port`` allows that: the user has given a port for the ranks that share a host.
    """
    names = [name.strip() for name in text.split(",")]
    if names == [""]:
        raise UserError(
            "--hosts is empty: give host names as ssh knows them, separated by commas: "
            "--hosts node0,node1"
        )
    for name in names:
        if not name:
            raise UserError(
                f"--hosts: got {text!r}, which has an empty name: remove the comma before or after "
                "it"
            )
        if not _NAME.fullmatch(name):
            raise UserError(
                f"--hosts: {shown(name)} is not a host name: give names as ssh knows them, "
                "separated by commas"
            )
        if names.count(name) > 1 and not shares_a_port:
            raise UserError(
                f"--hosts: {name} is named twice, so two ranks would share one host: if you want "
                "that, give --master-port, the port that they share; otherwise name each host once "
                "and let torchrun start several ranks on each: "
                "-- torchrun --nproc-per-node 2 PartThree/main.py"
            )
    return [Host(rank, name) for rank, name in enumerate(names)]


def first_of(names: Sequence[str], most: int, *, noun: str = "") -> str:
    """Return at most ``most`` names with commas between, and how many more there are.

    noun : follows the number of further names, e.g. " files".
    """
    more = f" and {len(names) - most} more{noun}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def program(token: str, silence_seconds: float) -> bytes:
    """Return the first input of each host: the length of the remote agent's text, then the text.

    token : the prefix of each message from the agent. silence_seconds : after this long without a
    request, the agent ends everything.
    """
    files = "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _REMOTE)
    text = f"{files}main(HANDLERS, {token!r}, {silence_seconds!r})\n".encode()
    return b"%d\n" % len(text) + text


@dataclass(frozen=True)
class SSHOptions:
    """How hosts are reached, the same for all of them.

    workdir : the project's folder there, relative to the home folder unless absolute.
    user : on hosts that are given without one.
    python : the interpreter there; None: WORKDIR/.venv/bin/python if it exists, else python3.
    config, options : of ssh (-F, -o).
    """

    workdir: str
    user: str | None = None
    python: str | None = None
    config: Path | None = None
    options: Sequence[str] = ()
    silence_seconds: float = 30.0


def ssh_command(host: Host, options: SSHOptions) -> list[str]:
    """Return the command that starts the remote agent on a host.

    It never asks for a password, since nobody can type passwords for many hosts at once.
    """
    alive = max(1, round(options.silence_seconds / 3))
    defaults = [
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_SECONDS}",
        f"ServerAliveInterval={alive}",
        "ServerAliveCountMax=2",
        "LogLevel=INFO",
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
        "EscapeChar=none",
    ]
    given = () if options.python is None else (options.python,)
    script = _GIVEN_PYTHON if given else _OWN_PYTHON
    remote = shlex.join(["exec", "sh", "-c", script, options.workdir, _BOOTSTRAP, *given])
    config = ["-F", str(options.config)] if options.config is not None else []
    user = ["-l", options.user] if options.user is not None and "@" not in host.given else []
    # The user's options come first: if an option is given twice, ssh takes the first.
    words = [word for option in (*options.options, *defaults) for word in ("-o", option)]
    return ["ssh", "-T", *config, *words, *user, "--", host.given, remote]


def remote_folder(text: str) -> str:
    """Return ``--workdir`` without "~": it is relative to the home folder unless absolute.

    UserError if it is empty.
    """
    if not text:
        raise UserError("--workdir: got '', give the folder of the project on the hosts")
    return re.sub(r"^~/?", "", text) or "."
