"""``lab collect``: copy the run folders of several hosts into one local folder.

A run's folder has the same name on all hosts. Rank 0's is copied completely; the other hosts add
the files that it lacks, mainly logs. A local file is never replaced by a different one, unless it
has only grown since (a run that was collected while it was running).
"""

import argparse
import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from lab.processes.prefixed_output import say
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import Host, SSHOptions, first_of, parse_hosts
from lab.ssh.launch import read_ssh_options
from lab.ssh.probe import refuse, unreached_hosts
from lab.ssh.record import read_launch

_ANSWER_SECONDS = 600.0
_MOST_NAMED = 8


@dataclass(frozen=True)
class CollectRequest:
    """Which hosts are asked for which runs.

    clocks : the time of each host's clock at the launch; its runs since then are copied.
    folders, reports : the project on each host, and the folder of runs in it.
    names : of runs or experiments; none: all runs of the launch.
    """

    hosts: Sequence[Host]
    options: SSHOptions
    clocks: Sequence[float]
    folders: Sequence[str]
    reports: str
    names: Sequence[str]


@dataclass
class Outcome:
    """What happened to the files.

    written, same : the number of files copied, and of files that were here already.
    kept : local files that differ and were left unchanged. runs : the nodes that have each run.
    """

    written: int = 0
    same: int = 0
    kept: list[Path] = field(default_factory=list)
    runs: dict[str, list[int]] = field(default_factory=dict)


def collect(args: argparse.Namespace) -> int:
    """Copy the runs here and print where they are.

    Returns 1 if a host was not reached or a different local file was kept, else 0.
    UserError if no host is reached, or none has any of the runs.
    """
    request = _collect_request(args)
    with HostConnections(request.hosts, request.options) as connections:
        unreached = unreached_hosts(connections)
        if len(unreached) == len(connections.hosts):
            refuse(
                unreached, of=len(connections.hosts), what="cannot be reached; nothing was copied"
            )
        listings = _listings(connections, request, args.checkpoints, leave_out=unreached)
        outcome = _copy_runs(connections, listings, args.output_dir)
    return _report(request, outcome, unreached, args.output_dir)


def _collect_request(args: argparse.Namespace) -> CollectRequest:
    names = [name.rstrip("/") for name in args.things]
    if args.hosts is not None:
        if not names:
            raise UserError(
                "--hosts needs the names of runs: <part>-<sync>/<time> or <part>-<sync>; or give "
                "the folder of a launch instead of --hosts"
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
                f"--{flag.replace('_', '-')} works only with --hosts: for a launch, remove it; the "
                "launch has recorded its own"
            )
    launch = read_launch(Path(names[0]) if names else _newest_launch(args.output_dir))
    config = args.ssh_config or (Path(launch["ssh_config"]) if launch["ssh_config"] else None)
    ssh_options = (*args.ssh_option, *launch["ssh_options"])
    return CollectRequest(
        [Host(rank, host["given"]) for rank, host in enumerate(launch["hosts"])],
        SSHOptions(
            launch["workdir"], launch["user"], launch["python"], config, ssh_options, args.silence
        ),
        clocks=[host["clock"] for host in launch["hosts"]],
        folders=[host["folder"] for host in launch["hosts"]],
        reports=launch["reports"],
        names=[_run_name(name) for name in names[1:]],
    )


def _newest_launch(reports: Path) -> Path:
    launches = sorted(reports.glob("launch-*/launch.json"))
    if not launches:
        raise UserError(
            f"{reports} has no folder of lab launch: give one, or --hosts and names of runs"
        )
    return launches[-1].parent


def _run_name(name: str) -> str:
    """Return the last two parts of reports/PartTwo-ring/2026-…, as a shell completes it."""
    return "/".join(part for part in PurePosixPath(name).parts[-2:] if part != "reports")


def _listings(
    connections: HostConnections,
    request: CollectRequest,
    checkpoints: bool,
    *,
    leave_out: Collection[Host],
) -> dict[int, Mapping[str, Any]]:
    """Return the runs of each host that is reached, by node.

    UserError if a host does not answer, or if none has any of the runs.
    """
    listings = {}
    for host, folder, clock in zip(request.hosts, request.folders, request.clocks, strict=True):
        if host in leave_out:
            continue
        answer = connections.ask(
            "runs",
            nodes=[host.rank],
            limit_seconds=_ANSWER_SECONDS,
            folder=folder,
            reports=request.reports,
            names=request.names,
            since=clock,
            checkpoints=checkpoints,
        )[host.rank]
        if "error" in answer:
            refuse(
                {host: answer["error"]},
                of=len(request.hosts),
                what="did not list its runs; nothing was copied",
            )
        listings[host.rank] = answer["result"]
    if not any(listing["runs"] for listing in listings.values()):
        which = f"run {', '.join(request.names)}" if request.names else "run of that launch"
        folders = ", ".join(dict.fromkeys(listing["reports"] for listing in listings.values()))
        hosts = f"{len(listings)} host{'s' * (len(listings) != 1)}"
        raise UserError(
            f"no {which} in {folders} on {hosts}: give other names, or --hosts, --workdir and "
            "--remote-reports"
        )
    return listings


def _copy_runs(
    connections: HostConnections,
    listings: Mapping[int, Mapping[str, Any]],
    output_dir: Path,
) -> Outcome:
    """Copy each file from the first host that lists it, unless the same file is here already."""
    outcome = Outcome()
    found: set[str] = set()
    for node, listing in listings.items():
        for run, files in listing["runs"].items():
            outcome.runs.setdefault(run, []).append(node)
            new = {f"{run}/{name}": facts for name, facts in files.items()}
            for path in filter(_is_safe, sorted(new.keys() - found)):
                size, digest = new[path]
                here = output_dir / path
                if here.is_file() and hashlib.sha256(here.read_bytes()).hexdigest() == digest:
                    outcome.same += 1
                else:
                    _write(here, _fetch(connections, node, listing["reports"], path, size), outcome)
            found |= new.keys()
    return outcome


def _is_safe(path: str) -> bool:
    """Whether a path that a host names stays within the folder that receives it."""
    parts = PurePosixPath(path).parts
    return not path.startswith("/") and ".." not in parts and len(parts) >= 3


def _fetch(connections: HostConnections, node: int, reports: str, path: str, size: int) -> bytes:
    """Return a file of one host. UserError if it does not arrive whole."""
    content, inode = bytearray(), None
    while len(content) < size:
        answer = connections.ask(
            "read",
            nodes=[node],
            limit_seconds=_ANSWER_SECONDS,
            reports=reports,
            path=path,
            offset=len(content),
        )[node]
        found, size, piece = answer.get("result", (None, 0, ""))
        if inode not in (None, found):
            content.clear()  # a training run has replaced the file: start again
        elif not piece:
            raise UserError(
                f"{connections.hosts[node]}: its files were not copied completely "
                f"({answer.get('error', f'{path} became shorter meanwhile')}): run lab collect "
                "again"
            )
        else:
            content += base64.b64decode(piece)
        inode = found
    return bytes(content)


def _write(path: Path, content: bytes, outcome: Outcome) -> None:
    if path.exists() and not (path.is_file() and content.startswith(path.read_bytes())):
        outcome.kept.append(path)
        return
    write_atomically(path, content)
    outcome.written += 1


def _report(
    request: CollectRequest, outcome: Outcome, unreached: Mapping[Host, str], output_dir: Path
) -> int:
    """Print what happened to the files; return the exit status."""
    for run, nodes in sorted(outcome.runs.items()):
        hosts = first_of([request.hosts[node].name for node in nodes], _MOST_NAMED)
        say(f"{output_dir / run}: from {hosts}")
    folders = " ".join(str(output_dir / run) for run in sorted(outcome.runs))
    copied = f"{outcome.written} file{'s' * (outcome.written != 1)} copied"
    say(f"{copied}, {outcome.same} already here; next: lab report {folders}")
    if outcome.kept:
        files = ", ".join(map(str, outcome.kept[:_MOST_NAMED]))
        more = " …" if len(outcome.kept) > _MOST_NAMED else ""
        say(
            "warning: different files with the same names are already here and were not replaced "
            f"({len(outcome.kept)}): {files}{more}; to copy those of the hosts, give another "
            "--output-dir"
        )
    for host, why in list(unreached.items())[:_MOST_NAMED]:
        say(f"warning: nothing was copied from {host}: {why}")
    return 1 if outcome.kept or unreached else 0
