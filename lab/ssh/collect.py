"""``lab collect``: the run folders of several hosts merged into one on this machine, as ``lab report`` reads them.

A run's folder has one name on all hosts. Rank 0's is taken whole; of the others comes what it has not, their logs above all.
A file of this machine is never replaced by another, but for one that has grown since (a run that was collected while it ran).
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
from lab.ssh.launch import way_of
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
    way: SSHOptions
    clocks: Sequence[float]
    folders: Sequence[str]
    reports: str
    names: Sequence[str]


@dataclass
class Outcome:
    """What has become of the files."""

    taken: int = 0
    same: int = 0
    kept: list[Path] = field(default_factory=list)
    runs: dict[str, list[int]] = field(default_factory=dict)
    unreached: Mapping[Host, str] = field(default_factory=dict)


def collect(args: argparse.Namespace) -> int:
    """Bring the runs here, say where they are; return 0, or 1 where a host was not reached, or a file here was another one and
    was left alone. UserError where no host is reached or has any of them."""
    request = _collect_request(args)
    with HostConnections(request.hosts, request.way) as nodes:
        unreached = unreached_hosts(nodes)
        if len(unreached) == len(nodes.hosts):
            refuse(unreached, of=len(nodes.hosts), what="cannot be reached; nothing was brought")
        outcome, wanted = Outcome(unreached=unreached), set()
        for node, listing in _listings(
            nodes, request, args.checkpoints, leave_out=unreached
        ).items():
            for run, files in listing["runs"].items():
                outcome.runs.setdefault(run, []).append(node)
                wanted_here = [
                    path
                    for path in (f"{run}/{name}" for name in files)
                    if _is_safe(path) and path not in wanted
                ]
                wanted |= set(wanted_here)
                digests = {f"{run}/{name}": digest for name, (_, digest) in files.items()}
                _take(
                    nodes,
                    node,
                    listing["reports"],
                    _differing(wanted_here, digests, args.output_dir, outcome),
                    args.output_dir,
                    outcome,
                )
    return _tell(request, outcome, args.output_dir)


def _collect_request(args: argparse.Namespace) -> CollectRequest:
    names = [name.rstrip("/") for name in args.things]
    if args.hosts is not None:
        if not names:
            raise UserError(
                "--hosts without runs: name them, <part>-<sync>/<time> or <part>-<sync>, or give the folder of a "
                "launch in place of --hosts"
            )
        hosts, way = parse_hosts(args.hosts, shares_a_port=False), way_of(args)
        return CollectRequest(
            hosts,
            way,
            [0.0] * len(hosts),
            [way.workdir] * len(hosts),
            args.remote_reports or "reports",
            [_run_name(name) for name in names],
        )
    for flag in ("user", "workdir", "python", "remote_reports"):
        if getattr(args, flag) is not None:
            raise UserError(
                f"--{flag.replace('_', '-')} goes with --hosts; a launch remembers its own"
            )
    folder = Path(names[0]) if names else _newest_launch(args.output_dir)
    told = read_launch(folder)
    hosts = [Host(rank, host["given"]) for rank, host in enumerate(told["hosts"])]
    config = args.ssh_config or (Path(told["ssh_config"]) if told["ssh_config"] else None)
    way = SSHOptions(
        told["workdir"],
        told["user"],
        told["python"],
        config,
        (*args.ssh_option, *told["ssh_options"]),
        args.silence,
    )
    return CollectRequest(
        hosts,
        way,
        [host["clock"] for host in told["hosts"]],
        [host["folder"] for host in told["hosts"]],
        told["reports"],
        [_run_name(name) for name in names[1:]],
    )


def _newest_launch(reports: Path) -> Path:
    launches = sorted(reports.glob("launch-*/launch.json"))
    if not launches:
        raise UserError(
            f"{reports} has no folder of lab launch: give one, or --hosts and the runs' names"
        )
    return launches[-1].parent


def _run_name(name: str) -> str:
    """Of reports/PartTwo-ring/2026-…, as a shell completes it, the last two."""
    return "/".join(part for part in PurePosixPath(name).parts[-2:] if part != "reports")


def _listings(
    nodes: HostConnections,
    request: CollectRequest,
    checkpoints: bool,
    *,
    leave_out: Collection[Host],
) -> dict[int, Mapping[str, Any]]:
    """The runs of each host that is reached; UserError where one has no answer, and where no host has any of them."""
    listings = {}
    for node, (folder, clock) in enumerate(zip(request.folders, request.clocks, strict=True)):
        if nodes.hosts[node] in leave_out:
            continue
        answer = nodes.ask(
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
                {nodes.hosts[node]: answer["error"]},
                of=len(nodes.hosts),
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
    """Whether a path that a host has told stays within the folder that receives it."""
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


def _take(
    nodes: HostConnections,
    node: int,
    reports: str,
    paths: Sequence[str],
    output_dir: Path,
    outcome: Outcome,
) -> None:
    """Bring these files of one host here."""
    if not paths:
        return
    with tempfile.TemporaryFile() as file:
        failures: list[OSError | ValueError] = []

        def take(piece: str) -> None:
            try:
                file.write(base64.b64decode(piece))
            except (
                OSError,
                ValueError,
            ) as error:  # a full disk must not end the thread that reads from the hosts
                failures.append(error)

        nodes.on_piece = take
        answer = nodes.ask(
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
                f"{nodes.hosts[node]}: its files did not come whole ({why}): collect again"
            )


def _unpack(file: IO[bytes], paths: Collection[str], output_dir: Path, outcome: Outcome) -> None:
    """Keep the files of an archive. What the host sends is its own affair, where it goes is ours: files alone, under the names
    that were asked for."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.isreg() and member.name in paths:
                _keep(output_dir / member.name, archive.extractfile(member).read(), outcome)


def _keep(path: Path, content: bytes, outcome: Outcome) -> None:
    if path.exists() and not (path.is_file() and content.startswith(path.read_bytes())):
        outcome.kept.append(path)
        return
    write_atomically(path, content)
    outcome.taken += 1


def _tell(request: CollectRequest, outcome: Outcome, output_dir: Path) -> int:
    folders = [output_dir / run for run in sorted(outcome.runs)]
    for run, folder in zip(sorted(outcome.runs), folders, strict=True):
        _say(
            f"{folder}: from {', '.join(request.hosts[node].name for node in outcome.runs[run][:_MOST_NAMED])}"
            + (
                f" and {len(outcome.runs[run]) - _MOST_NAMED} more"
                if len(outcome.runs[run]) > _MOST_NAMED
                else ""
            )
        )
    _say(
        f"{outcome.taken} files brought, {outcome.same} were here; next: lab report {' '.join(map(str, folders))}"
    )
    if outcome.kept:
        named = ", ".join(map(str, outcome.kept[:_MOST_NAMED])) + (
            " …" if len(outcome.kept) > _MOST_NAMED else ""
        )
        _say(
            f"warning: other files of the same names are here, and were left alone ({len(outcome.kept)}): {named}; give another "
            "--output-dir to have those of the hosts"
        )
    for host, why in list(outcome.unreached.items())[:_MOST_NAMED]:
        _say(f"warning: nothing came from {host}: {why}")
    return 1 if outcome.kept or outcome.unreached else 0


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
