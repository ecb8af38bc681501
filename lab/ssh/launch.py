"""``lab launch``: run one command on several hosts, and leave no process behind.

Order: read the flags, ask the hosts for problems, find the master's address, perhaps run ``lab
doctor``, start the command on all, wait, and end with the status of what failed first.
"""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from common.errors import INTERRUPTED, TO_BE_CONTINUED
from common.say import count, listed
from common.utils.environment import RUN_TOKEN
from common.utils.paths import new_folder
from common.utils.processes import on_signals, shell_status, wait_for_ranks
from common.utils.system import allow_most_descriptors
from lab.explain.diagnosis import first_to_fail
from lab.fleet.conclusion import STOPS, conclude
from lab.fleet.prefixed_output import PrefixedOutput, log_name, write_log
from lab.ssh.command import NodeCommand, read_command
from lab.ssh.hosts import Host, SSHOptions, parse_hosts, share_hosts, ssh_command
from lab.ssh.node import HostFacts
from lab.ssh.questions import (
    ENVIRONMENT,
    doctor_passes,
    find_master,
    refuse_differences,
    run_requests,
)
from lab.ssh.record import LaunchedHost, LaunchRecord, write_launch
from lab.ssh.remote import BEAT_SECONDS, OnLine, Remote, ask, running, served, signal_all
from lab.terminal import say

# With more hosts the terminal shows only rank 0 and the first failure.
_SHOWN_HOSTS = 8
_FAILURE_LINES = 20


def launch(args: argparse.Namespace) -> int:
    """Run the command on all hosts; return 0, or the status of the host that failed first.

    UserError if nothing can be started.
    """
    shares_a_port = args.master_port is not None
    named = parse_hosts(args.hosts, shares_a_port=shares_a_port)
    each = args.ranks_per_node
    hosts = share_hosts(named, each)
    shares_a_port |= each > 1
    options = SSHOptions.of(args)
    command = read_command(args.flags, nodes=len(hosts), port=args.master_port, ranks_per_node=each)
    if args.dry_run:
        say(_dry_text(hosts, options, command, args.master_ip))
        return 0
    allow_most_descriptors()
    question = {"do": "facts", "script": command.script}
    facts = ask(hosts, question, options, schema=HostFacts)
    refuse_differences(hosts, facts, command, shares_a_port=shares_a_port)
    master = args.master_ip
    if master is None and (args.check or "{master}" in " ".join(command.words)):
        master = find_master(hosts, facts, options, port=command.port)
    folder = args.logs or new_folder(args.output_dir, "launch")
    record = _record(hosts, facts, options, command) | {
        "command": args.flags,
        "began": f"{datetime.now():%Y-%m-%dT%H:%M:%S}",
        "master": master,
        "port": command.port,
        "status": None,
        "seconds": None,
    }
    write_launch(folder, record)
    say(_begin_text(hosts, master, command.port, folder))
    prefixed = PrefixedOutput(
        len(named),
        ranks_per_node=each,
        shown=lambda rank: len(hosts) <= _SHOWN_HOSTS or rank == 0,
    )

    def write_line(rank: int, line: str) -> None:
        write_log(folder / log_name(rank, each), line)
        prefixed(rank, line)

    began = time.monotonic()
    status = INTERRUPTED  # unless one of the lines below sets another
    try:
        if args.check and not doctor_passes(hosts, facts, options, command, master):
            status = 1
        else:
            requests = run_requests(command, facts, master, options)
            nodes, stopped_by = _run(hosts, requests, options, write_line)
            end = _End(
                nodes,
                stopped_by,
                time.monotonic() - began,
                folder,
                options.silence_seconds,
                each,
            )
            status = _conclude(end, prefixed)
    finally:
        seconds = round(time.monotonic() - began, 1)
        write_launch(folder, record | {"status": status, "seconds": seconds})
    return status


def _dry_text(
    hosts: Sequence[Host], options: SSHOptions, command: NodeCommand, master: str | None
) -> str:
    """Return what a launch would type on each host, for a person to read or to type by hand.

    master : the given address of rank 0; a launch finds another by testing, so here it has a name.
    """
    variables = [f"{name}={shlex.quote(value)}" for name, value in ENVIRONMENT.items()]
    python = options.python or ".venv/bin/python"
    lines = []
    for host in hosts:
        words = command.fill(
            master=master or "MASTER_IP", nodes=len(hosts), rank=host.rank, python=python
        )
        lines += [
            f"{host}, in {options.workdir}:",
            f"  {' '.join(variables)} {shlex.join(words)}",
            f"  over: {shlex.join(ssh_command(host, options))}",
        ]
    if master is None and "MASTER_IP" in "\n".join(lines):
        lines.append(f"MASTER_IP: an address of {hosts[0].name} that every other host reaches")
    lines.append(f"{RUN_TOKEN} is added, another one for each launch. Nothing was started.")
    return "\n".join(lines)


def _record(
    hosts: Sequence[Host], facts: Sequence[HostFacts], options: SSHOptions, command: NodeCommand
) -> dict[str, Any]:
    """Return what ``lab collect`` reads again."""
    launched = [
        LaunchedHost(host.given, own.folder, own.clock, own.python)
        for host, own in zip(hosts, facts, strict=True)
    ]
    reports = command.flags.get("--output-dir") or "reports"
    return asdict(LaunchRecord(**asdict(options), hosts=launched, reports=reports))


def _begin_text(hosts: Sequence[Host], master: str | None, port: int, folder: Path) -> str:
    """Return which hosts begin, and where their output is."""
    names = hosts[0].name
    if hosts[-1].name != names:
        names += f" to {hosts[-1].name}"
    different = len({host.given for host in hosts})
    text = f"{count(different, 'host')}, {names}"
    if hosts[0].shared:
        text += f", {len(hosts) // different} ranks on each"
    if master is not None:
        text += f"; rank 0 at {master}:{port}"
    text += f"; logs: {folder}"
    if len(hosts) > _SHOWN_HOSTS:
        text += "; showing only rank 0's output and the first failure's"
    return text


def _run(
    hosts: Sequence[Host],
    requests: Sequence[Mapping[str, Any]],
    options: SSHOptions,
    on_line: OnLine,
) -> tuple[Sequence[Remote], int]:
    """Run the commands until all have ended; return them, and the signal that stopped them.

    The signal is 0 if none did.
    """
    got: list[int] = []
    with (
        on_signals(STOPS, lambda number, _frame: got.append(number)),
        served(hosts, requests, options, on_line) as nodes,
    ):

        def statuses() -> list[int | None]:
            signal_all(nodes, 0)
            return [node.poll() for node in nodes]

        def pass_on(number: int) -> None:
            name = signal.Signals(number).name
            say(f"{name}: sent to every node; Ctrl-C ends all at once")
            signal_all(nodes, number)

        wait_for_ranks(statuses, received=lambda: got, pass_on=pass_on, poll_seconds=BEAT_SECONDS)
    return nodes, got[0] if got else 0


def _failed(nodes: Sequence[Remote], *good: int) -> list[Remote]:
    """Return the nodes that ended with no ``good`` status, in the order in which they ended."""
    ended = sorted(set(nodes) - set(running(nodes)), key=lambda node: node.ended)
    return [node for node in ended if node.poll() not in good]


@dataclass(frozen=True)
class _End:
    """How a launch ended, by rank. stopped_by : the signal that stopped it, or 0."""

    nodes: Sequence[Remote]
    stopped_by: int
    seconds: float
    folder: Path
    silence_seconds: float
    ranks_per_node: int


def _conclude(end: _End, prefixed: PrefixedOutput) -> int:
    """Print how the launch ended, and return the exit status."""
    failures = {node.host.rank: node.poll() or 0 for node in _failed(end.nodes, 0)}
    lost = [node for node in _failed(end.nodes, 0) if node.result is None]
    ended = "all processes on all nodes have ended"
    if lost:
        ended = f"all processes on the other hosts have ended; {_left_text(lost, end)}"
    status = conclude(
        failures, stopped_by=end.stopped_by, seconds=end.seconds, logs=end.folder, ended=ended
    )
    if status is None:
        failed = _failed(end.nodes, 0, TO_BE_CONTINUED)
        status = _report_failure(failed, lost, end, prefixed)
    return status


def _report_failure(
    failed: Sequence[Remote], lost: Sequence[Remote], end: _End, prefixed: PrefixedOutput
) -> int:
    """Print which host failed first and why; return its exit status.

    lost : those of the failed hosts whose connection broke.
    """
    outputs = {node.host.rank: "\n".join(node.lines) for node in failed}
    statuses = {node.host.rank: node.poll() or 0 for node in failed}
    name = "node" if end.ranks_per_node == 1 else "rank"
    culprit, message, _ = first_to_fail(statuses, outputs, name=name)
    if lost:
        culprit = lost[0].host.rank
        message = (
            f"the connection to {lost[0].host} broke after {end.seconds:.1f} s "
            f"({listed(lost[0].errors[-1:])[:200]}); the other hosts were stopped, and "
            f"{_left_text(lost, end)}"
        )
    if not prefixed.shows(culprit):
        for line in [*end.nodes[culprit].lines][-_FAILURE_LINES:]:
            prefixed.show(culprit, line)
    log = end.folder / log_name(culprit, end.ranks_per_node)
    host = end.nodes[culprit].host.name
    print(f"error: {message} (host {host}; output: {log})", file=sys.stderr)
    return shell_status(statuses[culprit])


def _left_text(lost: Sequence[Remote], end: _End) -> str:
    """Return what becomes of the processes on hosts whose connection broke."""
    return (
        f"processes on {listed([node.host for node in lost])} end by themselves "
        f"{end.silence_seconds:g} s after the connection broke"
    )
