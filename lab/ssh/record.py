"""What a launch leaves here: a log for each node, and launch.json, from which ``lab collect`` reads
the hosts.

Create a ``Record`` when every host is ready, call ``line`` for each line that a node writes, and
``ended`` last. ``read_launch`` reads launch.json, which anybody may have written.
"""

import contextlib
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import Finite, check_version, encode, read_json
from lab.processes.prefixed_output import PrefixedOutput
from lab.ssh.command import NodeCommands
from lab.ssh.hosts import Host, SSHOptions
from lab.ssh.probe import Facts

FORMAT = 1
SHOWN_HOSTS = 8
"""With more hosts the terminal shows only rank 0 and the first failure."""

_FILE = "launch.json"
_WHAT = "lab launch"
# Without control characters, which a terminal would obey.
Plain = Annotated[str, Meta(max_length=10_000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


class LaunchedHost(msgspec.Struct):
    """A host as it was given, its own clock at the launch, its folder and interpreter."""

    given: Plain
    folder: Plain
    clock: Finite
    python: Plain = ""


class LaunchRecord(msgspec.Struct, kw_only=True):
    """The content of launch.json."""

    format: int = FORMAT
    what: str = _WHAT
    command: list[str] = []
    began: Plain = ""
    hosts: Annotated[list[LaunchedHost], Meta(min_length=1, max_length=65_536)]
    user: Plain | None = None
    workdir: Plain = "."
    python: Plain | None = None
    ssh_options: Annotated[list[Plain], Meta(max_length=1000)] = []
    ssh_config: Plain | None = None
    master: str | None = None
    port: int | None = None
    reports: Plain = "reports"
    status: int | None = None
    seconds: float | None = None


class _LaunchLabel(msgspec.Struct):
    format: int = 0
    what: str = ""


def launch_content(
    hosts: Sequence[Host],
    facts: Sequence[Facts],
    options: SSHOptions,
    commands: NodeCommands,
    *,
    master: str | None,
) -> LaunchRecord:
    """Return the content of launch.json before the start.

    master : the address of rank 0, if the command needs one.
    """
    return LaunchRecord(
        command=list(commands.words),
        began=f"{datetime.now():%Y-%m-%dT%H:%M:%S}",
        hosts=[
            LaunchedHost(host.given, own["folder"], own["clock"], own["python"])
            for host, own in zip(hosts, facts, strict=True)
        ],
        user=options.user,
        workdir=options.workdir,
        python=options.python,
        ssh_options=list(options.options),
        ssh_config=None if options.config is None else str(options.config.absolute()),
        master=master,
        port=commands.master_port,
        reports=commands.value("--output-dir") or "reports",
    )


class Record:
    """The folder of one launch: launch.json and a log for each node.

    prefixed : shows a node's line on the terminal. content : of launch.json.
    UserError if the folder cannot be written.
    """

    def __init__(self, folder: Path, prefixed: PrefixedOutput, content: LaunchRecord) -> None:
        self.folder, self.prefixed, self._began = folder, prefixed, time.monotonic()
        self._content = content
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = [
                self.log(node).open("a", encoding="utf-8", buffering=1)
                for node in range(len(content.hosts))
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
        self._content.status = status
        self._content.seconds = round(time.monotonic() - self._began, 1)
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        self._write()

    def _write(self) -> None:
        content = msgspec.json.format(encode(self._content), indent=1)
        write_atomically(self.folder / _FILE, content + b"\n")


def read_launch(folder: Path) -> LaunchRecord:
    """Return launch.json of a folder. UserError if it has none, or none of this format."""
    path = folder / _FILE
    try:
        label = read_json(path, _LaunchLabel)
        if label.what == _WHAT:
            check_version(label.format, FORMAT, name=str(path))
            return read_json(path, LaunchRecord)
    except FileNotFoundError:
        pass
    raise UserError(
        f"{folder} is not a folder of lab launch (no {_FILE} of format {FORMAT}): give one, "
        "reports/launch-<time>, or --hosts and names of runs"
    )


def newest_launch(reports: Path) -> Path:
    """Return the folder of the launch that began last, as each records it.

    UserError if there is none; one that cannot be read does not count.
    """
    began = {}
    for path in reports.glob(f"launch-*/{_FILE}"):
        with contextlib.suppress(UserError):
            began[path.parent] = read_launch(path.parent).began
    if not began:
        raise UserError(
            f"{reports} has no folder of lab launch: give one, or --hosts and names of runs"
        )
    return max(began, key=lambda folder: (began[folder], folder.name))
