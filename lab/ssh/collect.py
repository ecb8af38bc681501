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
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from common.errors import UserError, count, first_of
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
    launch, options, names = wanted_runs(args)
    remotes = []
    for rank, launched in enumerate(launch.hosts):
        request = {
            "do": "send_runs",
            "reports": launch.reports,
            "names": names,
            "folder": launched.folder,
            "since": launched.clock,
            "checkpoints": args.checkpoints,
        }
        remotes.append(Remote(Host(rank, launched.given), request, options))
    outcome, runs = _store_all(remotes, args.output_dir)
    unreached = {}
    for remote in remotes:
        if not remote.ready:
            unreached[remote.host] = explain(remote.errors, remote.host)
    if len(unreached) == len(remotes):
        refuse_hosts(unreached, of=len(remotes), what="cannot be reached; nothing was copied")
    if not runs:
        raise UserError(
            f"no run {', '.join(names) or 'of that launch'} in {launch.reports} on "
            f"{count(len(remotes), 'host')}: give other names, or --hosts, --workdir and "
            "--remote-reports"
        )
    for run, hosts in sorted(runs.items()):
        say(f"{args.output_dir / run}: from {first_of(hosts)}")
    folders = " ".join(str(args.output_dir / run) for run in sorted(runs))
    kinds = list(outcome.values())
    say(
        f"copied {count(kinds.count('copied'), 'file')}, {kinds.count('same')} were already here; "
        f"next: lab report {folders}"
    )
    for kind, why in _LEFT.items():
        if left := [calm(name) for name in outcome if outcome[name] == kind]:
            say(f"warning: {count(len(left), 'file')} not copied: {first_of(left)}: {why}")
    for host, why in unreached.items():
        say(f"warning: nothing was copied from {host}: {why}")
    if unreached or _LEFT.keys() & kinds:
        return 1
    return 0


def _store_all(
    remotes: Sequence[Remote], folder: Path
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Write what the hosts send; return what became of each file, and the hosts of each run."""
    outcome: dict[str, str] = {}
    runs: dict[str, list[str]] = {}
    try:
        for remote in remotes:
            for name, content in _received(remote):
                if name not in outcome:
                    outcome[name] = _store(folder, name, content)
                if outcome[name] == "refused":
                    continue
                run = "/".join(name.split("/")[:2])
                hosts = runs.setdefault(run, [])
                if remote.host.name not in hosts:
                    hosts.append(remote.host.name)
    finally:
        for remote in remotes:
            remote.kill()
    return outcome, runs


def wanted_runs(args: argparse.Namespace) -> tuple[LaunchRecord, SSHOptions, list[str]]:
    """Return the hosts and their folders, how to reach them, and the names of runs; none: all.

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
        _warn_of_flags_not_taken(launch, options)
    launch.reports = args.remote_reports or launch.reports
    names = []
    for name in things:  # such as reports/PartTwo-ring/2026-…, as a shell completes it
        last_parts = PurePosixPath(name).parts[-2:]
        names.append("/".join(part for part in last_parts if part != "reports"))
    return launch, options, names


def _warn_of_flags_not_taken(launch: LaunchRecord, options: SSHOptions) -> None:
    recorded = [
        *(("--ssh-option", option) for option in launch.ssh_options),
        ("--ssh-config", launch.ssh_config),
        ("--python", launch.python),
        ("--workdir", launch.workdir),
    ]
    given = {*options.ssh_options, options.ssh_config, options.python, options.workdir}
    missing: list[str] = []
    for flag, value in recorded:
        if value is not None and value not in given:
            missing += [flag, value]
    if missing:
        say(
            "warning: the launch was given flags that can run programs, and these are not "
            "taken from its launch.json. If it is your launch and its hosts need them, add: "
            f"{shlex.join(missing)}"
        )


def _received(remote: Remote) -> Iterator[tuple[str, bytes | None]]:
    """Yield name and content of each file that a host sends, None for what is no regular file.

    UserError if they do not all arrive. Nothing if the host is not reached.
    """
    whole = False
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
                content = None
                if member.isreg() and not member.issparse():
                    file = archive.extractfile(member)
                    content = file.read() if file else None
                yield member.name, content
            whole = True
    remote.finish()
    if remote.ready and (remote.result is None or not whole):
        raise UserError(
            f"{remote.host}: its files were not copied completely "
            f"({first_of(remote.errors[-1:])}): run lab collect again"
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
    if path.exists() and (old is None or not content.startswith(old)):
        return "kept"
    write_atomically(path, content)
    return "copied"
