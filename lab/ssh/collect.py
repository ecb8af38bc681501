"""``lab collect``: the run folders of several hosts merged into one on this machine, as ``lab report`` reads them.

A run's folder has one name on all hosts. Rank 0's is copied whole; of the others come the files that it lacks, above all logs.
A file of this machine is never replaced by a different one, except by one that has grown since (a run collected while it ran).
"""

import argparse
import base64
import hashlib
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rich.console import Console

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import Host, SSHOptions, parse_hosts
from lab.ssh.launch import read_ssh_options
from lab.ssh.probe import refuse, unreached_hosts
from lab.ssh.record import read_launch

_LIST_SECONDS = 600.0
_PACK_SECONDS = 3600.0
_MOST_NAMED = 8

console = Console(highlight=False)


@dataclass(frozen=True)
class CollectRequest:
    """Which hosts are asked for which runs.

    clocks : each host's own time at the launch, from which on its runs count; zeros where runs are named.
    folders, reports : the project there, and the runs' place in it. names : of runs or experiments; none: all of the launch.
    """

    hosts: Sequence[Host]
    options: SSHOptions
    clocks: Sequence[float]
    folders: Sequence[str]
    reports: str
    names: Sequence[str]


@dataclass
class Outcome:
    """What has become of the files: how many were written, were here already, and are kept because they differ."""

    written: int = 0
    same: int = 0
    kept: list[Path] = field(default_factory=list)
    runs: dict[str, list[int]] = field(default_factory=dict)
    unreached: Mapping[Host, str] = field(default_factory=dict)


def collect(args: argparse.Namespace) -> int:
    """Copy the runs here and print where they are; return 0, or 1 where a host was not reached, or a different file here was
    left alone. UserError where no host is reached or has any of them."""
    request = _collect_request(args)
    with HostConnections(request.hosts, request.options) as connections:
        unreached = unreached_hosts(connections)
        if len(unreached) == len(connections.hosts):
            refuse(
                unreached, of=len(connections.hosts), what="cannot be reached; nothing was brought"
            )
        outcome, wanted = Outcome(unreached=unreached), set()
        listings = _listings(connections, request, args.checkpoints, leave_out=unreached)
        for node, listing in listings.items():
            for run, files in listing["runs"].items():
                outcome.runs.setdefault(run, []).append(node)
                digests = {f"{run}/{name}": digest for name, (_, digest) in files.items()}
                new = [path for path in digests if _is_safe(path) and path not in wanted]
                wanted |= set(new)
                paths = _differing(new, digests, args.output_dir, outcome)
                _fetch(connections, node, listing["reports"], paths, args.output_dir, outcome)
    return _report(request, outcome, args.output_dir)


def _collect_request(args: argparse.Namespace) -> CollectRequest:
    names = [name.rstrip("/") for name in args.things]
    if args.hosts is not None:
        if not names:
            raise UserError(
                "--hosts without runs: name them, <part>-<sync>/<time> or <part>-<sync>, or give the folder of a "
                "launch in place of --hosts"
            )
        hosts, options = parse_hosts(args.hosts, shares_a_port=False), read_ssh_options(args)
        return CollectRequest(
            hosts,
            options,
            clocks=[0.0] * len(hosts),
            folders=[options.workdir] * len(hosts),
            reports=args.remote_reports or "reports",
            names=[_run_name(name) for name in names],
        )
    for flag in ("user", "workdir", "python", "remote_reports"):
        if getattr(args, flag) is not None:
            raise UserError(
                f"--{flag.replace('_', '-')} goes with --hosts; a launch remembers its own"
            )
    folder = Path(names[0]) if names else _newest_launch(args.output_dir)
    launch = read_launch(folder)
    hosts = [Host(rank, host["given"]) for rank, host in enumerate(launch["hosts"])]
    config = args.ssh_config or (Path(launch["ssh_config"]) if launch["ssh_config"] else None)
    options = SSHOptions(
        launch["workdir"],
        launch["user"],
        launch["python"],
        config,
        (*args.ssh_option, *launch["ssh_options"]),
        args.silence,
    )
    return CollectRequest(
        hosts,
        options,
        clocks=[host["clock"] for host in launch["hosts"]],
        folders=[host["folder"] for host in launch["hosts"]],
        reports=launch["reports"],
        names=[_run_name(name) for name in names[1:]],
    )


def _newest_launch(reports: Path) -> Path:
    launches = sorted(reports.glob("launch-*/launch.json"))
    if not launches:
        raise UserError(
            f"{reports} has no folder of lab launch: give one, or --hosts and the runs' names"
        )
    return launches[-1].parent


def _run_name(name: str) -> str:
    """The last two parts of reports/PartTwo-ring/2026-…, as a shell completes it."""
    return "/".join(part for part in PurePosixPath(name).parts[-2:] if part != "reports")


def _listings(
    connections: HostConnections,
    request: CollectRequest,
    checkpoints: bool,
    *,
    leave_out: Collection[Host],
) -> dict[int, Mapping[str, Any]]:
    """The runs of each host that is reached; UserError where one does not answer, and where no host has any of them."""
    listings = {}
    for node, (folder, clock) in enumerate(zip(request.folders, request.clocks, strict=True)):
        if connections.hosts[node] in leave_out:
            continue
        answer = connections.ask(
            "runs",
            nodes=[node],
            limit_seconds=_LIST_SECONDS,
            folder=folder,
            reports=request.reports,
            names=request.names,
            since=clock,
            checkpoints=checkpoints,
        )[node]
        if "error" in answer:
            refuse(
                {connections.hosts[node]: answer["error"]},
                of=len(connections.hosts),
                what="did not list its runs; nothing was brought",
            )
        listings[node] = answer["result"]
    if not any(listing["runs"] for listing in listings.values()):
        which = f"run {', '.join(request.names)}" if request.names else "run of that launch"
        places = ", ".join(dict.fromkeys(f"{listing['reports']}" for listing in listings.values()))
        raise UserError(
            f"no {which} on any of {len(listings)} hosts in {places}: name others, or give --hosts, --workdir and "
            "--remote-reports"
        )
    return listings


def _is_safe(path: str) -> bool:
    """Whether a path that a host has named stays within the folder that receives it."""
    parts = PurePosixPath(path).parts
    return not path.startswith("/") and ".." not in parts and len(parts) >= 3


def _differing(
    paths: Sequence[str], digests: Mapping[str, str], output_dir: Path, outcome: Outcome
) -> list[str]:
    """Those that are not here already."""
    differing = []
    for path in paths:
        here = output_dir / path
        if here.is_file() and hashlib.sha256(here.read_bytes()).hexdigest() == digests[path]:
            outcome.same += 1
        else:
            differing.append(path)
    return differing


def _fetch(
    connections: HostConnections,
    node: int,
    reports: str,
    paths: Sequence[str],
    output_dir: Path,
    outcome: Outcome,
) -> None:
    """Copy these files of one host here."""
    if not paths:
        return
    with tempfile.TemporaryFile() as file:
        failures: list[OSError | ValueError] = []

        def write(piece: str) -> None:
            try:
                file.write(base64.b64decode(piece))
            except (OSError, ValueError) as error:
                failures.append(error)  # a full disk must not end the thread that reads from hosts

        connections.on_piece = write
        answer = connections.ask(
            "pack", nodes=[node], limit_seconds=_PACK_SECONDS, reports=reports, files=list(paths)
        )[node]
        why = answer.get("error") or (str(failures[0]) if failures else "")
        file.seek(0)
        try:
            if not why:
                _unpack(file, set(paths), output_dir, outcome)
        except tarfile.TarError as error:
            why = str(error)
        if why:
            raise UserError(
                f"{connections.hosts[node]}: its files did not come whole ({why}): collect again"
            )


def _unpack(file: IO[bytes], paths: Collection[str], output_dir: Path, outcome: Outcome) -> None:
    """Write the regular files of an archive that were asked for; whatever else a host sends is ignored."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.isreg() and member.name in paths:
                content = archive.extractfile(member)
                assert content is not None  # a regular file
                _write(output_dir / member.name, content.read(), outcome)


def _write(path: Path, content: bytes, outcome: Outcome) -> None:
    if path.exists() and not (path.is_file() and content.startswith(path.read_bytes())):
        outcome.kept.append(path)
        return
    write_atomically(path, content)
    outcome.written += 1


def _report(request: CollectRequest, outcome: Outcome, output_dir: Path) -> int:
    """Print what has become of the files; return the exit status."""
    for run, nodes in sorted(outcome.runs.items()):
        names = ", ".join(request.hosts[node].name for node in nodes[:_MOST_NAMED])
        more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
        _say(f"{output_dir / run}: from {names}{more}")
    folders = " ".join(str(output_dir / run) for run in sorted(outcome.runs))
    _say(f"{outcome.written} files brought, {outcome.same} were here; next: lab report {folders}")
    if outcome.kept:
        files = ", ".join(map(str, outcome.kept[:_MOST_NAMED]))
        more = " …" if len(outcome.kept) > _MOST_NAMED else ""
        _say(
            f"warning: other files of the same names are here, and were left alone ({len(outcome.kept)}): {files}{more}; give "
            "another --output-dir to have those of the hosts"
        )
    for host, why in list(outcome.unreached.items())[:_MOST_NAMED]:
        _say(f"warning: nothing came from {host}: {why}")
    return 1 if outcome.kept or outcome.unreached else 0


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
