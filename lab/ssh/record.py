"""What a launch leaves here: a log for each node, and launch.json, from which ``lab collect`` reads
the hosts.

Create a ``Record`` when every host is ready, call ``line`` for each line that a node writes, and
``ended`` last. ``read_launch`` reads launch.json.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from lab.processes.prefixed_output import PrefixedOutput
from lab.ssh.command import NodeCommands
from lab.ssh.hosts import Host, SSHOptions
from lab.ssh.probe import Facts

FORMAT = 1
SHOWN_HOSTS = 8
"""With more hosts the terminal shows only rank 0 and the first failure."""

_FILE = "launch.json"


def launch_content(
    hosts: Sequence[Host],
    facts: Sequence[Facts],
    options: SSHOptions,
    commands: NodeCommands,
    *,
    master: str | None,
) -> dict[str, Any]:
    """Return the content of launch.json before the start.

    master : the address of rank 0, if the command needs one.
    """
    return {
        "format": FORMAT,
        "what": "lab launch",
        "command": list(commands.words),
        "began": f"{datetime.now():%Y-%m-%dT%H:%M:%S}",
        "hosts": [
            {"given": host.given} | {key: own[key] for key in ("folder", "python", "clock")}
            for host, own in zip(hosts, facts, strict=True)
        ],
        "user": options.user,
        "workdir": options.workdir,
        "python": options.python,
        "ssh_options": list(options.options),
        "ssh_config": None if options.config is None else str(options.config.absolute()),
        "master": master,
        "port": commands.master_port,
        "reports": commands.value("--output-dir") or "reports",
        "status": None,
        "seconds": None,
    }


class Record:
    """The folder of one launch: launch.json and a log for each node.

    prefixed : shows a node's line on the terminal. content : of launch.json.
    UserError if the folder cannot be written.
    """

    def __init__(self, folder: Path, prefixed: PrefixedOutput, content: dict[str, Any]) -> None:
        self.folder, self.prefixed, self._began = folder, prefixed, time.monotonic()
        self._content = content
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = [
                self.log(node).open("a", encoding="utf-8", buffering=1)
                for node in range(len(content["hosts"]))
            ]
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}): give another --logs"
            ) from error
        self._write()

    def log(self, node: int) -> Path:
        """Return the file that a node's output goes to."""
        return self.folder / f"node{node}.log"

    def line(self, node: int, line: str) -> None:
        """Write a line of a node's output to its log, and show it."""
        with contextlib.suppress(ValueError, OSError):  # a full disk must not end the run
            self._files[node].write(line + "\n")
        self.prefixed(node, line)

    def ended(self, status: int) -> None:
        """Write the exit status of the launch, and close the logs."""
        self._content |= {"status": status, "seconds": round(time.monotonic() - self._began, 1)}
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        self._write()

    def _write(self) -> None:
        write_atomically(self.folder / _FILE, (json.dumps(self._content, indent=1) + "\n").encode())


def read_launch(folder: Path) -> dict[str, Any]:
    """Return launch.json of a folder. UserError if it has none, or none of this format."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        if content["format"] == FORMAT and content["what"] == "lab launch":
            return content
    raise UserError(
        f"{folder} is not a folder of lab launch (no {_FILE} of format {FORMAT}): give one, "
        "reports/launch-<time>, or --hosts and names of runs"
    )
