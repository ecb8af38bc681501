"""``lab collect``: copy the run folders of several hosts into one local folder.

A run's folder has the same name on all hosts. Rank 0's is copied completely; the other hosts add
the files that it lacks, mainly logs. A local file is never replaced by a different one, unless it
has only grown since (a run that was collected while it was running).

Neither launch.json nor a host is trusted: what runs programs comes from the command line, and
nothing is written outside of the local folder.
"""

import argparse
import hashlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from lab.processes.prefixed_output import say
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import Host, SSHOptions, first_of, parse_hosts
from lab.ssh.launch import read_ssh_options
from lab.ssh.probe import refuse, unreached_hosts
from lab.ssh.record import LaunchRecord, Plain, newest_launch, read_launch

_ANSWER_SECONDS = 600.0
_MOST_NAMED = 8
_MOST_BYTES = 2**32
_MOST_RESTARTS = 10


class Listing(msgspec.Struct):
    """What a host has: its folder of reports, and the size and SHA-256 of each file by run."""

    reports: Plain
    runs: dict[
        Plain, dict[Plain, tuple[Annotated[int, Meta(ge=0)], Annotated[str, Meta(max_length=64)]]]
    ]


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
    kept : local files that differ and were left unchanged. refused : files that a host lists under
    a name that leads elsewhere. runs : the nodes that have each run.
    """

    written: int = 0
    same: int = 0
    kept: list[Path] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    runs: dict[str, list[int]] = field(default_factory=dict)


def collect(args: argparse.Namespace) -> int:
    """Copy the runs here and print where they are.

    Returns 1 if a host was not reached, or a file was kept or refused, else 0.
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
    for flag in ("workdir", "remote_reports"):
        if getattr(args, flag) is not None:
            raise UserError(
                f"--{flag.replace('_', '-')} works only with --hosts: for a launch, remove it; the "
                "launch has recorded its own"
            )
    folder = Path(names[0]) if names else newest_launch(args.output_dir)
    launch = read_launch(folder)
    _name_flags_to_repeat(launch, args)
    # Not the project's own interpreter: launch.json would choose the folder in which it lies.
    options = replace(
        read_ssh_options(args),
        workdir=".",
        user=args.user or launch.user,
        python=args.python or "python3",
    )
    return CollectRequest(
        _recorded_hosts(launch, folder),
        options,
        clocks=[host.clock for host in launch.hosts],
        folders=[host.folder for host in launch.hosts],
        reports=launch.reports,
        names=[_run_name(name) for name in names[1:]],
    )


def _recorded_hosts(launch: LaunchRecord, folder: Path) -> list[Host]:
    """Return the hosts of a launch, after the same check as those of --hosts."""
    given = [host.given for host in launch.hosts]
    try:
        hosts = parse_hosts(",".join(given), shares_a_port=True)
        parse_hosts(f"{launch.user or 'user'}@host", shares_a_port=False)
    except UserError as error:
        raise UserError(f"{folder / 'launch.json'} names an impossible host: {error}") from error
    if [host.given for host in hosts] != given:
        raise UserError(f"{folder / 'launch.json'} has a comma in the name of a host: remove it")
    return hosts


def _name_flags_to_repeat(launch: LaunchRecord, args: argparse.Namespace) -> None:
    """Name the recorded flags that run programs and that the user has not given again."""
    flags = [("--ssh-option", one) for one in launch.ssh_options if one not in args.ssh_option]
    if launch.ssh_config and args.ssh_config is None:
        flags.append(("--ssh-config", launch.ssh_config))
    if launch.python and args.python is None:
        flags.append(("--python", launch.python))
    if flags:
        words = shlex.join([word for flag in flags for word in flag])
        say(
            "warning: the launch was given flags that can run programs, and these are not taken "
            f"from its launch.json. If it is your launch and its hosts need them, add: {words}"
        )


def _run_name(name: str) -> str:
    """Return the last two parts of reports/PartTwo-ring/2026-…, as a shell completes it."""
    return "/".join(part for part in PurePosixPath(name).parts[-2:] if part != "reports")


def _listings(
    connections: HostConnections,
    request: CollectRequest,
    checkpoints: bool,
    *,
    leave_out: Collection[Host],
) -> dict[int, Listing]:
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
        listings[host.rank] = _checked(answer["result"], Listing, host)
    if not any(listing.runs for listing in listings.values()):
        which = f"run {', '.join(request.names)}" if request.names else "run of that launch"
        folders = ", ".join(dict.fromkeys(listing.reports for listing in listings.values()))
        hosts = f"{len(listings)} host{'s' * (len(listings) != 1)}"
        raise UserError(
            f"no {which} in {folders} on {hosts}: give other names, or --hosts, --workdir and "
            "--remote-reports"
        )
    return listings


def _checked(result: Any, schema: Any, host: Host) -> Any:
    """Return what a host answered as a ``schema``."""
    try:
        return msgspec.convert(result, schema, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{host} sent another answer than lab collect expects: {error}") from error


def _copy_runs(
    connections: HostConnections, listings: Mapping[int, Listing], output_dir: Path
) -> Outcome:
    """Copy each file from the first host that lists it, unless the same file is here already."""
    outcome = Outcome()
    found: set[str] = set()
    for node, listing in listings.items():
        for run, files in listing.runs.items():
            outcome.runs.setdefault(run, []).append(node)
            new = {f"{run}/{name}": facts for name, facts in files.items()}
            for path in sorted(new.keys() - found):
                size, digest = new[path]
                here = output_dir / path
                if not _is_safe(path) or not _is_within(here, output_dir):
                    outcome.refused.append(path)
                elif here.is_file() and hashlib.sha256(here.read_bytes()).hexdigest() == digest:
                    outcome.same += 1
                else:
                    content = _fetch(connections, node, listing.reports, path, size)
                    if content is not None:
                        _write(here, content, outcome)
            found |= new.keys()
    return outcome


def _is_safe(path: str) -> bool:
    """Whether a path that a host names is a run's file within the folder that receives it."""
    parts = PurePosixPath(path).parts
    hidden = any(part.startswith(".") for part in parts)  # among them ".."
    return not path.startswith("/") and not hidden and len(parts) >= 3


def _is_within(path: Path, folder: Path) -> bool:
    """Whether a path stays in a folder when the symbolic links on its way are followed."""
    return path.resolve().is_relative_to(folder.resolve())


def _fetch(
    connections: HostConnections, node: int, reports: str, path: str, size: int
) -> bytes | None:
    """Return a file of one host; None if the run has deleted it meanwhile.

    UserError if it does not arrive whole.
    """
    host, content, inode, restarts = connections.hosts[node], bytearray(), None, 0
    while len(content) < size:
        if size > _MOST_BYTES or restarts > _MOST_RESTARTS:
            what = f"has {size:,} bytes" if size > _MOST_BYTES else "changes all the time"
            raise UserError(f"{host}: {path} {what}: copy it by hand, e.g. with scp")
        answer = connections.ask(
            "read",
            nodes=[node],
            limit_seconds=_ANSWER_SECONDS,
            reports=reports,
            path=path,
            offset=len(content),
        )[node]
        if "error" in answer:
            raise UserError(
                f"{host}: its files were not copied completely ({answer['error']}): run lab "
                "collect again"
            )
        facts = _checked(answer["result"], tuple[int, int, bytes] | None, host)
        if facts is None:
            return None
        found, size, piece = facts
        if inode not in (None, found) or not piece:
            content.clear()  # a training run has replaced or cut the file: start again
            restarts += 1
        else:
            content += piece
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
    if outcome.refused:
        say(
            f"warning: {len(outcome.refused)} files were not copied, since their names lead "
            f"outside of {output_dir} or are hidden: {first_of(outcome.refused, _MOST_NAMED)}"
        )
    for host, why in list(unreached.items())[:_MOST_NAMED]:
        say(f"warning: nothing was copied from {host}: {why}")
    return 1 if outcome.kept or outcome.refused or unreached else 0
