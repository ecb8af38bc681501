"""launch.json, which ``lab launch`` writes, and from which ``lab collect`` reads the hosts.

Anybody may have written it, so ``read_launch`` accepts only plain values and possible hosts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import Finite, encode, read_json
from lab.ssh.hosts import HOST, Plain, SSHOptions


class LaunchedHost(msgspec.Struct):
    """A host as it was given, its own clock at the launch, its folder and interpreter."""

    given: Annotated[str, Meta(pattern=HOST)]
    folder: Plain
    clock: Finite = 0.0
    python: Plain = ""


class LaunchRecord(SSHOptions, kw_only=True):
    """What ``lab collect`` reads in launch.json; the rest of it is for a person."""

    format: Literal[1] = 1
    what: Literal["lab launch"] = "lab launch"
    hosts: Annotated[list[LaunchedHost], Meta(min_length=1, max_length=65_536)]
    reports: Plain = "reports"


def write_launch(folder: Path, record: Mapping[str, Any]) -> None:
    """Write launch.json. UserError if that fails."""
    write_atomically(folder / "launch.json", encode(record, indent=1) + b"\n")


def read_launch(folder: Path) -> LaunchRecord:
    """Return launch.json of a folder. UserError if it has none, or one that does not fit."""
    try:
        return read_json(folder / "launch.json", LaunchRecord)
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a folder of lab launch (no launch.json): give one, "
            "reports/launch-<time>, or --hosts and names of runs"
        ) from None


def newest_launch(reports: Path) -> Path:
    """Return the folder of the launch that began last, by its name. UserError if there is none."""
    folders = sorted(path.parent for path in reports.glob("launch-*/launch.json"))
    if not folders:
        raise UserError(
            f"{reports} has no folder of lab launch: give one, or --hosts and names of runs"
        )
    return folders[-1]
