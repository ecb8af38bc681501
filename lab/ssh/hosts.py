"""The hosts of a launch, and the ``ssh`` command that reaches each: the system's own, so that ~/.ssh/config, agents and jump
hosts work as at the prompt.

``parse_hosts`` reads ``--hosts``, ``ssh_command`` makes the command, ``program`` is the text that runs there (remote_agent.py).
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

CONNECT_SECONDS = 10
_HERE = Path(__file__).resolve().parent
_REMOTE = ("remote_handlers.py", "remote_agent.py")
_ENTRY = "main(ANSWERS)\n"
# Reads the program whose length stands in the first line, byte by byte: what follows it is for the program itself. No quotes but
# double ones and no newline, so that every login shell passes it on as it is.
_BOOTSTRAP = (
    'import os, sys; sys.path[:] = [p for p in sys.path if p]; f = os.fdopen(0, "rb", 0, closefd=False); '
    "n = int(f.readline()); t = bytearray(); "
    '[t.extend(f.read(n - len(t)) or sys.exit("cut")) for _ in iter(lambda: len(t) < n, False)]; '
    'exec(compile(bytes(t), "lab/ssh/remote_agent.py", "exec"), {"__name__": "lab_keeper"})'
)
_OWN_PYTHON = 'cd -- "$0" 2>/dev/null && test -x .venv/bin/python && exec .venv/bin/python -c "$1"; exec python3 -c "$1"'
_GIVEN_PYTHON = 'cd -- "$0" 2>/dev/null; exec "$2" -c "$1"'


@dataclass(frozen=True)
class Host:
    """``given`` as ssh gets it (a name, an alias of ~/.ssh/config, user@name, ssh://user@name:port); ``name`` without user and
    port; ``rank`` its place."""

    rank: int
    given: str

    @property
    def name(self) -> str:
        """Without user and port."""
        place = re.fullmatch(r"ssh://(?:.*@)?(.*?)(?::\d+)?/?", self.given)
        return place[1] if place is not None else self.given.rpartition("@")[2]

    def __str__(self) -> str:
        return f"node {self.rank} ({self.name})"


def parse_hosts(text: str, *, shares_a_port: bool) -> list[Host]:
    """Return the hosts of ``--hosts``, rank 0 first. UserError on none, an empty or impossible name, and a host that stands
    there twice unless ``shares_a_port``: the user has said at which port all ranks meet."""
    names = [name.strip() for name in text.split(",")]
    if names == [""]:
        raise UserError(
            "--hosts: no hosts; give their names, as ssh knows them, with commas between: --hosts node0,node1"
        )
    for name in names:
        if not name:
            raise UserError(
                f"--hosts: got {text!r}, which has an empty name: leave out the comma before or after it"
            )
        if name.startswith("-") or re.search(r"\s", name):
            raise UserError(
                f"--hosts: {name!r} is no name of a host: give names as ssh knows them, with commas between"
            )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None and not shares_a_port:
        raise UserError(
            f"--hosts: {twice} stands there twice, so that two ranks would share one host: give --master-port, the "
            "port that they share, if you mean it; or name each host once and let torchrun start several ranks on "
            "each: -- torchrun --nproc-per-node 2 PartThree/main.py"
        )
    return [Host(rank, name) for rank, name in enumerate(names)]


def program() -> bytes:
    """Return what is sent to each host first: its length in a line, and the keeper with its answers as one text."""
    text = "".join((_HERE / name).read_text(encoding="utf-8") for name in _REMOTE) + _ENTRY
    return b"%d\n" % len(text.encode()) + text.encode()


@dataclass(frozen=True)
class SSHOptions:
    """How hosts are reached, the same for all of them.

    user : of hosts given without one; workdir : there, relative to the home folder unless absolute; python : the interpreter
    there, None: WORKDIR/.venv/bin/python where there is one, else python3; config, options : of ssh (-F, -o).
    """

    workdir: str
    user: str | None = None
    python: str | None = None
    config: Path | None = None
    options: Sequence[str] = ()
    silence_seconds: float = 30.0


def ssh_command(host: Host, way: SSHOptions) -> list[str]:
    """Return the command that starts the keeper on a host. It never asks for a password: many cannot be typed at once."""
    alive = max(1, round(way.silence_seconds / 3))
    options = [
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_SECONDS}",
        f"ServerAliveInterval={alive}",
        "ServerAliveCountMax=2",
        "LogLevel=INFO",
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
        "EscapeChar=none",
    ]
    there = shlex.join(
        [
            "exec",
            "sh",
            "-c",
            _OWN_PYTHON if way.python is None else _GIVEN_PYTHON,
            way.workdir,
            _BOOTSTRAP,
            *([] if way.python is None else [way.python]),
        ]
    )
    # What the user gives stands first: of options that stand twice, ssh takes the first.
    return [
        "ssh",
        "-T",
        *(["-F", str(way.config)] if way.config is not None else []),
        *(word for option in (*way.options, *options) for word in ("-o", option)),
        *(["-l", way.user] if way.user is not None and "@" not in host.given else []),
        "--",
        host.given,
        there,
    ]


def remote_folder(text: str) -> str:
    """Return ``--workdir`` as the hosts understand it: relative to the home folder unless absolute. UserError where empty."""
    if not text:
        raise UserError("--workdir: got '', give the folder of the project on the hosts")
    return re.sub(r"^~/?", "", text) or "."
