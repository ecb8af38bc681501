"""``lab collect``: copy the run folders of several hosts into one local folder.

A run's folder has the same name on all hosts. Rank 0's is copied completely; the other hosts add
the files that it lacks, mainly logs. A local file is never replaced by a different one, unless it
has only grown since (a run that was collected while it was running).

Neither launch.json nor a host is trusted: what runs programs comes from the command line, and
nothing is written outside of the local folder.
"""

import argparse
import contextlib
import shlex
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from common.errors import UserError
from common.say import count, listed
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import calm
from lab.ssh.hosts import Host, SSHOptions, explain, parse_hosts, refuse_hosts
from lab.ssh.record import LaunchedHost, LaunchRecord, newest_launch, read_launch
from lab.ssh.remote import Remote
from lab.terminal import say

_MOST_BYTES = 2**32
# Why a file of a host is not copied.
_LEFT = {
    "kept": "different files with the same names are already here; to copy those of the hosts, "
    "give another --output-dir",
    "refused": "their names lead elsewhere, or they are hidden or no files",
}


def collect(args: argparse.Namespace) -> int:
    """Copy the runs here and print where they are.

    Returns 1 if a host was not reached, or a file was kept or refused, else 0.
    UserError if no host is reached, or none has any of the runs.
    """
    wanted = wanted_runs(args)
    remotes = [_ask_for_runs(rank, wanted, args) for rank in range(len(wanted.launch.hosts))]
    try:
        outcomes, sources = _copy(remotes, args.output_dir)
    finally:
        for remote in remotes:
            remote.kill()
    unreached = {
        remote.host: explain(remote.errors, remote.host) for remote in remotes if not remote.ready
    }
    if len(unreached) == len(remotes):
        refuse_hosts(unreached, of=len(remotes), what="cannot be reached; nothing was copied")
    if not sources:
        raise UserError(
            f"no run {', '.join(wanted.names) or 'of that launch'} in {wanted.launch.reports} on "
            f"{count(len(remotes), 'host')}: give other names, or --hosts, --workdir and "
            "--remote-reports"
        )
    _tell(args.output_dir, outcomes, sources)
    for host, why in unreached.items():
        say(f"warning: nothing was copied from {host}: {why}")
    incomplete = unreached or any(outcome in _LEFT for outcome in outcomes.values())
    return 1 if incomplete else 0


def _copy(
    remotes: Sequence[Remote], output_dir: Path
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Store what the hosts send; return what became of each file, and the hosts of each run."""
    outcomes: dict[str, str] = {}
    sources: dict[str, dict[str, None]] = {}
    for remote in remotes:
        for name, content in _received(remote):
            # Rank 0 comes first, and of several hosts with a file the first counts.
            if name not in outcomes:
                outcomes[name] = _store(output_dir, name, content)
            if outcomes[name] != "refused":
                run = "/".join(name.split("/")[:2])
                sources.setdefault(run, {})[remote.host.name] = None
    return outcomes, {run: [*hosts] for run, hosts in sources.items()}


def _ask_for_runs(rank: int, wanted: "Wanted", args: argparse.Namespace) -> Remote:
    """Ask a host for its runs."""
    host = wanted.launch.hosts[rank]
    request = {
        "do": "send_runs",
        "reports": wanted.launch.reports,
        "names": wanted.names,
        "folder": host.folder,
        "since": host.clock,
        "checkpoints": args.checkpoints,
    }
    return Remote(Host(rank, host.given), request, wanted.options)


def _tell(
    output_dir: Path, outcomes: Mapping[str, str], sources: Mapping[str, Sequence[str]]
) -> None:
    """Print what was copied, from where, and what was not."""
    for run, hosts in sorted(sources.items()):
        say(f"{output_dir / run}: from {listed(hosts)}")
    report = shlex.join(["lab", "report", *(str(output_dir / run) for run in sorted(sources))])
    kinds = Counter(outcomes.values())
    say(
        f"copied {count(kinds['copied'], 'file')}, {kinds['same']} were already here; "
        f"next: {report}"
    )
    for kind, why in _LEFT.items():
        left = [calm(name) for name, outcome in outcomes.items() if outcome == kind]
        if left:
            say(f"warning: {count(len(left), 'file')} not copied: {listed(left)}: {why}")


class Wanted(NamedTuple):
    """The hosts with their folders, how to reach them, and the names of runs; none: all."""

    launch: LaunchRecord
    options: SSHOptions
    names: list[str]


def wanted_runs(args: argparse.Namespace) -> Wanted:
    """Return which runs of which hosts the flags name.

    What launch.json says may name hosts, a user and folders of runs. What could run programs, here
    or there, is never taken from it, but named.
    """
    options = SSHOptions.of(args)
    if args.hosts is not None:
        things = args.things
        if not things:
            raise UserError(
                "--hosts needs the names of runs: <part>-<sync>/<time> or <part>-<sync>; or give "
                "the folder of a launch instead of --hosts"
            )
        hosts = parse_hosts(args.hosts, shares_a_port=False)
        launch = LaunchRecord(hosts=[LaunchedHost(host.given, options.workdir) for host in hosts])
    else:
        folder, *things = args.things or [newest_launch(args.output_dir)]
        launch = read_launch(Path(folder))
        options.user = args.user or launch.user
        if missing := _flags_not_repeated(launch, options):
            say(
                "warning: the launch was given flags that can run programs, and these are not "
                "taken from its launch.json. If it is your launch and its hosts need them, add: "
                f"{shlex.join(missing)}"
            )
    launch.reports = args.remote_reports or launch.reports
    return Wanted(launch, options, [_run_name(thing) for thing in things])


def _flags_not_repeated(launch: LaunchRecord, options: SSHOptions) -> list[str]:
    """Return the flags of the launch that can run programs and were not given again."""
    words = []
    for option in launch.ssh_options:
        if option not in options.ssh_options:
            words += ["--ssh-option", option]
    for flag, recorded, given in (
        ("--ssh-config", launch.ssh_config, options.ssh_config),
        ("--python", launch.python, options.python),
        ("--workdir", launch.workdir, options.workdir),
    ):
        if recorded is not None and recorded != given:
            words += [flag, recorded]
    return words


def _run_name(path: str) -> str:
    """Return the last two parts of reports/PartTwo-ring/2026-…, as a shell completes it."""
    parts = PurePosixPath(path).parts[-2:]
    return "/".join(part for part in parts if part != "reports")


def _received(remote: Remote) -> Iterator[tuple[str, bytes | None]]:
    """Yield name and content of each file that a host sends, None for what is no regular file.

    UserError if they do not all arrive. Nothing if the host is not reached.
    """
    whole = False  # whether the archive was read to its end
    if remote.skip_login():
        with (
            contextlib.suppress(tarfile.TarError),
            tarfile.open(fileobj=remote.output, mode="r|") as archive,
        ):
            for member in archive:
                if member.size > _MOST_BYTES:
                    raise UserError(
                        f"{remote.host}: {calm(member.name)} has {member.size:,} bytes: copy it by "
                        "hand, e.g. with scp"
                    )
                is_file = member.isreg() and not member.issparse()
                file = archive.extractfile(member) if is_file else None
                yield member.name, file.read() if file else None
            whole = True
    remote.finish()
    if remote.ready and (remote.result is None or not whole):
        raise UserError(
            f"{remote.host}: its files were not copied completely "
            f"({listed(remote.errors[-1:])}): run lab collect again"
        )


def _store(folder: Path, name: str, content: bytes | None) -> str:
    """Write a host's file in the folder; return "copied", "same", or why not, a key of ``_LEFT``.

    The name may be any text: it must stay in the folder, also if links on its way are followed.
    """
    path = folder / name
    parts = PurePosixPath(name).parts
    hidden = any(part.startswith(".") for part in parts)  # among them ".."
    is_name = name.isprintable() and len(parts) >= 3 and not hidden
    if not is_name or content is None or not path.resolve().is_relative_to(folder.resolve()):
        return "refused"
    old = path.read_bytes() if path.is_file() else None
    if old == content:
        return "same"
    if path.exists():
        has_only_grown = old is not None and content.startswith(old)
        if not has_only_grown:
            return "kept"
    write_atomically(path, content)
    return "copied"
