"""``lab launch``: one command on several hosts. It lives as long as the command does, and nothing of it outlives it anywhere.

Order: read the flags, connect, ask the hosts what stands in the way, find the master's address, perhaps ``lab doctor``, start on
all, wait, and end with the status of what failed first.
"""

import argparse
import contextlib
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from rich.console import Console

from common.errors import INTERRUPTED, TO_BE_CONTINUED, UserError
from common.utils.paths import REPOSITORY, new_folder
from common.utils.processes import find_root_failure
from lab.processes.prefixed_output import PrefixedOutput
from lab.ssh.check import doctors_find_nothing
from lab.ssh.command import NodeCommands
from lab.ssh.connection import LOST
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import Host, SSHOptions, parse_hosts, remote_folder
from lab.ssh.master_address import find_master
from lab.ssh.probe import Facts, ask_facts, problems_of, refuse
from lab.ssh.record import SHOWN_HOSTS, Record

_GRACE_SECONDS = 8.0
_FAREWELL_SECONDS = 5.0
_SAVE_SECONDS = 120.0
_KILL_SECONDS = 12.0
_FAILURE_LINES = 20
_FILES_A_HOST = 4
_TERMINATED = 128 + signal.SIGTERM

console = Console(highlight=False)


class _Terminated(BaseException):
    """SIGTERM came."""


def launch(args: argparse.Namespace) -> int:
    """Run the command on all hosts; return 0, or the status of the host that failed first. UserError before anything starts."""
    hosts, way = parse_hosts(args.hosts, shares_a_port=args.master_port is not None), way_of(args)
    plan = NodeCommands.of(args.flags, nodes=len(hosts), port=args.master_port)
    _allow_open_files(_FILES_A_HOST * len(hosts))
    with HostConnections(hosts, way) as nodes:
        facts = ask_facts(nodes, way, script=plan.script)
        refuse(
            problems_of(hosts, facts, plan, shares_a_port=args.master_port is not None),
            of=len(hosts),
        )
        master = args.master_ip
        if master is None and (plan.meets or args.check):
            master = find_master(nodes, facts, port=plan.meeting_port)
        prefixed = PrefixedOutput(
            console, len(hosts), shown=lambda node: len(hosts) <= SHOWN_HOSTS or node == 0
        )
        record = Record(args.logs or new_folder(args.output_dir, "launch"), prefixed)
        record.begin(hosts, facts, way, plan, master=master)
        _say(_introduction(hosts, plan, master, record))
        status = 1
        try:
            if not args.check or doctors_find_nothing(nodes, facts, plan, master, prefixed):
                nodes.on_line = record.line
                status = _run(nodes, facts, plan, master or "", record)
        except KeyboardInterrupt:
            status = INTERRUPTED
            raise
        finally:
            record.ended(status)
        return status


def way_of(args: argparse.Namespace) -> SSHOptions:
    """Return how the flags say that the hosts are reached. UserError on what cannot be."""
    if args.silence < 1:
        raise UserError(f"--silence: got {args.silence:g}, give seconds, 1 or more")
    if args.ssh_config is not None and not args.ssh_config.is_file():
        raise UserError(f"--ssh-config: there is no file {args.ssh_config}")
    folder = str(REPOSITORY) if args.workdir is None else remote_folder(args.workdir)
    return SSHOptions(
        folder, args.user, args.python, args.ssh_config, tuple(args.ssh_option), args.silence
    )


def _allow_open_files(wanted: int) -> None:
    """Three streams and a log a host; the usual limit of 1,024 would do for 250 hosts."""
    wanted += 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UserError(
            f"so many hosts need {wanted} open files, and this machine allows {hard} a process: ulimit -Hn"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _introduction(
    hosts: Sequence[Host], plan: NodeCommands, master: str | None, record: Record
) -> str:
    names = hosts[0].name if len(hosts) == 1 else f"{hosts[0].name} to {hosts[-1].name}"
    place = f"; rank 0 at {master}:{plan.meeting_port}" if master is not None else ""
    quiet = "; rank 0's output, and the first failure's" if len(hosts) > SHOWN_HOSTS else ""
    return (
        f"{len(hosts)} host{'s' * (len(hosts) > 1)}, {names}{place}; logs: {record.folder}{quiet}"
    )


def _run(
    nodes: HostConnections, facts: Sequence[Facts], plan: NodeCommands, master: str, record: Record
) -> int:
    environment = {"PYTHONUNBUFFERED": "1"}
    if plan.way == "torchrun":  # restarted workers would read the addresses of those before them
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    began, interrupted = time.monotonic(), 0
    try:
        with _told_of_termination():
            for host, one in zip(nodes.hosts, facts, strict=True):
                command = plan.fill(master=master, rank=host.rank, python=one["python"])
                nodes.start(host.rank, command, environment=environment, folder=one["folder"])
            _wait(nodes, record)
    except KeyboardInterrupt:
        interrupted = INTERRUPTED
        _let_end(nodes, signal.SIGINT, _FAREWELL_SECONDS)
    except _Terminated:
        interrupted = _TERMINATED
        _say("SIGTERM: passed on to every node, which may save first; Ctrl-C ends them at once")
        _let_end(nodes, signal.SIGTERM, _SAVE_SECONDS)
    if nodes.running:
        nodes.kill()
        nodes.wait(lambda: not nodes.running, limit_seconds=_KILL_SECONDS)
    return _conclusion(nodes, time.monotonic() - began, record, interrupted)


def _wait(nodes: HostConnections, record: Record) -> None:
    """Return when all have ended, or when one has failed and the others have had time to say why they end, too."""
    nodes.wait(lambda: not nodes.running or bool(_ended_badly(nodes)))
    if not _failed(nodes):  # those that were stopped and saved; rank 0 may still write
        nodes.wait(lambda: not nodes.running or bool(_failed(nodes)), limit_seconds=_SAVE_SECONDS)
    if len(nodes.hosts) > SHOWN_HOSTS and _failed(nodes) and _failed(nodes)[0] != 0:
        record.show_failure(
            _failed(nodes)[0], list(nodes.nodes[_failed(nodes)[0]].lines)[-_FAILURE_LINES:]
        )
    nodes.wait(lambda: not nodes.running, limit_seconds=_GRACE_SECONDS)


def _let_end(nodes: HostConnections, number: int, limit_seconds: float) -> None:
    """Let the nodes say their last words; a second Ctrl-C does without."""
    with contextlib.suppress(KeyboardInterrupt):
        nodes.signal(number)
        nodes.wait(lambda: not nodes.running, limit_seconds=limit_seconds)


def _ended_badly(nodes: HostConnections) -> list[int]:
    """Those that ended, in that order, but for those that ended well."""
    return [node for node in nodes.ended if nodes.nodes[node].status]


def _failed(nodes: HostConnections) -> list[int]:
    return [node for node in _ended_badly(nodes) if nodes.nodes[node].status != TO_BE_CONTINUED]


def _conclusion(nodes: HostConnections, seconds: float, record: Record, interrupted: int) -> int:
    """Say how it ended, and return the exit status."""
    lost = [
        node.host for node in nodes.nodes if node.running or (node.status == LOST and node.closed)
    ]
    failed = _failed(nodes)
    if lost:
        if interrupted:
            return _tell_interrupted(nodes, lost, record, interrupted)
        return _tell_lost(nodes, lost[0], seconds, record)
    if len(_ended_badly(nodes)) > len(failed) and (interrupted or not failed):
        _say(
            f"stopped after {seconds:.1f} s, and saved: the same command with --resume auto goes on; output: {record.folder}"
        )
        return TO_BE_CONTINUED
    if interrupted and _ended_badly(nodes):
        return _tell_interrupted(nodes, lost, record, interrupted)
    if not failed:
        _say(f"all nodes ended well after {seconds:.1f} s; their output: {record.folder}")
        return 0
    statuses = {node: nodes.nodes[node].status for node in failed}
    outputs = {node: "\n".join(nodes.nodes[node].lines) for node in failed}
    culprit, message = find_root_failure(failed, statuses, outputs, name="node")
    print(
        f"error: {message} (host {nodes.hosts[culprit].name}; its output: {record.log(culprit)})",
        file=sys.stderr,
    )
    return statuses[culprit] if statuses[culprit] > 0 else 128 - statuses[culprit]


def _tell_interrupted(
    nodes: HostConnections, lost: Sequence[Host], record: Record, status: int
) -> int:
    left = (
        ""
        if not lost
        else (
            f"; {', '.join(map(str, lost[:SHOWN_HOSTS]))} did not answer: what runs there ends by itself "
            f"{nodes.silence_seconds:g} s after the connection broke"
        )
    )
    what = "interrupted" if status == INTERRUPTED else "ended by SIGTERM"
    _say(f"{what}: every process on every host is ended{left}; their output: {record.folder}")
    return status


def _tell_lost(nodes: HostConnections, host: Host, seconds: float, record: Record) -> int:
    node = nodes.nodes[host.rank]
    why = (
        f" ({node.complaints[-1][:200]})"
        if node.closed and node.complaints
        else ""
        if node.closed
        else " (no answer)"
    )
    print(
        f"error: the connection to {host} broke after {seconds:.1f} s{why}; the others are ended, and what runs there ends by "
        f"itself {nodes.silence_seconds:g} s after the break (its output: {record.log(host.rank)})",
        file=sys.stderr,
    )
    return LOST


@contextlib.contextmanager
def _told_of_termination() -> Iterator[None]:
    """SIGTERM raises in here, so that it can be passed on."""

    def tell(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
