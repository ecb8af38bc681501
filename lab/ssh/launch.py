"""``lab launch``: run one command on several hosts, and end every process on every host when it ends.

Order: read the flags, connect, ask the hosts for problems, find the master's address, perhaps run ``lab doctor``, start the
command on all, wait, and end with the status of what failed first.
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
from common.utils.paths import BASE, new_folder
from common.utils.processes import find_root_failure
from lab.processes.prefixed_output import PrefixedOutput
from lab.ssh.check import doctor_passes
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
    """SIGTERM arrived."""


def launch(args: argparse.Namespace) -> int:
    """Run the command on all hosts; return 0, or the status of the host that failed first. UserError before anything starts."""
    shares_a_port = args.master_port is not None
    hosts, options = parse_hosts(args.hosts, shares_a_port=shares_a_port), read_ssh_options(args)
    commands = NodeCommands.of(args.flags, nodes=len(hosts), port=args.master_port)
    _allow_open_files(_FILES_A_HOST * len(hosts))
    with HostConnections(hosts, options) as connections:
        facts = ask_facts(connections, options, script=commands.script)
        refuse(problems_of(hosts, facts, commands, shares_a_port=shares_a_port), of=len(hosts))
        master = args.master_ip
        if master is None and (commands.needs_master or args.check):
            master = find_master(connections, facts, port=commands.master_port)
        prefixed = PrefixedOutput(
            console, len(hosts), shown=lambda node: len(hosts) <= SHOWN_HOSTS or node == 0
        )
        record = Record(args.logs or new_folder(args.output_dir, "launch"), prefixed)
        record.begin(hosts, facts, options, commands, master=master)
        _say(_introduction(hosts, commands, master, record))
        status = 1
        try:
            if not args.check or doctor_passes(connections, facts, commands, master, prefixed):
                connections.on_line = record.line
                status = _run(connections, facts, commands, master or "", record)
        except KeyboardInterrupt:
            status = INTERRUPTED
            raise
        finally:
            record.ended(status)
        return status


def read_ssh_options(args: argparse.Namespace) -> SSHOptions:
    """Return what the flags say about reaching the hosts. UserError on impossible values."""
    if args.silence < 1:
        raise UserError(f"--silence: got {args.silence:g}, give seconds, 1 or more")
    if args.ssh_config is not None and not args.ssh_config.is_file():
        raise UserError(f"--ssh-config: there is no file {args.ssh_config}")
    folder = str(BASE) if args.workdir is None else remote_folder(args.workdir)
    return SSHOptions(
        folder, args.user, args.python, args.ssh_config, tuple(args.ssh_option), args.silence
    )


def _allow_open_files(wanted: int) -> None:
    """Raise the limit of open files: three streams and a log a host; the usual 1,024 suffice for 250 hosts."""
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
    hosts: Sequence[Host], commands: NodeCommands, master: str | None, record: Record
) -> str:
    names = hosts[0].name if len(hosts) == 1 else f"{hosts[0].name} to {hosts[-1].name}"
    address = f"; rank 0 at {master}:{commands.master_port}" if master is not None else ""
    quiet = "; rank 0's output, and the first failure's" if len(hosts) > SHOWN_HOSTS else ""
    return (
        f"{len(hosts)} host{'s' * (len(hosts) > 1)}, {names}{address}; logs: {record.folder}{quiet}"
    )


def _run(
    connections: HostConnections,
    facts: Sequence[Facts],
    commands: NodeCommands,
    master: str,
    record: Record,
) -> int:
    environment = {"PYTHONUNBUFFERED": "1"}
    if (
        commands.kind == "torchrun"
    ):  # restarted workers would read the addresses of those before them
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    began, interrupted = time.monotonic(), 0
    try:
        with _raising_on_sigterm():
            for host, one in zip(connections.hosts, facts, strict=True):
                command = commands.fill(master=master, rank=host.rank, python=one["python"])
                connections.start(host.rank, command, environment=environment, folder=one["folder"])
            _wait(connections, record)
    except KeyboardInterrupt:
        interrupted = INTERRUPTED
        _let_end(connections, signal.SIGINT, _FAREWELL_SECONDS)
    except _Terminated:
        interrupted = _TERMINATED
        _say("SIGTERM: passed on to every node, which may save first; Ctrl-C ends them at once")
        _let_end(connections, signal.SIGTERM, _SAVE_SECONDS)
    if connections.running:
        connections.kill()
        connections.wait(lambda: not connections.running, limit_seconds=_KILL_SECONDS)
    return _conclude(connections, time.monotonic() - began, record, interrupted)


def _wait(connections: HostConnections, record: Record) -> None:
    """Return when all have ended, or when one has failed and the others have had time to say why they end, too."""
    connections.wait(lambda: not connections.running or bool(_ended_badly(connections)))
    if not _failed(connections):  # those that were stopped and saved; rank 0 may still write
        connections.wait(
            lambda: not connections.running or bool(_failed(connections)),
            limit_seconds=_SAVE_SECONDS,
        )
    first = next(iter(_failed(connections)), 0)
    if len(connections.hosts) > SHOWN_HOSTS and first != 0:
        record.show_failure(first, list(connections.by_rank[first].lines)[-_FAILURE_LINES:])
    connections.wait(lambda: not connections.running, limit_seconds=_GRACE_SECONDS)


def _let_end(connections: HostConnections, number: int, limit_seconds: float) -> None:
    """Pass the signal on and let the nodes end by themselves; a second Ctrl-C stops waiting."""
    with contextlib.suppress(KeyboardInterrupt):
        connections.signal(number)
        connections.wait(lambda: not connections.running, limit_seconds=limit_seconds)


def _ended_badly(connections: HostConnections) -> dict[int, int]:
    """The status by node, in the order of their ends, of those that did not end well."""
    statuses = ((node, connections.by_rank[node].status) for node in connections.ended)
    return {node: status for node, status in statuses if status}


def _failed(connections: HostConnections) -> dict[int, int]:
    """Those of them that did not stop in order to be resumed."""
    ended_badly = _ended_badly(connections).items()
    return {node: status for node, status in ended_badly if status != TO_BE_CONTINUED}


def _conclude(
    connections: HostConnections, seconds: float, record: Record, interrupted: int
) -> int:
    """Print how the launch ended, and return the exit status."""
    lost = [
        connection.host
        for connection in connections.by_rank
        if connection.running or (connection.status == LOST and connection.closed)
    ]
    failed = _failed(connections)
    if lost and interrupted:
        return _report_interrupted(connections, lost, record, interrupted)
    if lost:
        return _report_lost(connections, lost[0], seconds, record)
    if len(_ended_badly(connections)) > len(failed) and (interrupted or not failed):
        _say(
            f"stopped after {seconds:.1f} s, and saved: the same command with --resume auto goes on; output: {record.folder}"
        )
        return TO_BE_CONTINUED
    if interrupted and _ended_badly(connections):
        return _report_interrupted(connections, lost, record, interrupted)
    if not failed:
        _say(f"all nodes ended well after {seconds:.1f} s; their output: {record.folder}")
        return 0
    outputs = {node: "\n".join(connections.by_rank[node].lines) for node in failed}
    culprit, message = find_root_failure(list(failed), failed, outputs, name="node")
    print(
        f"error: {message} (host {connections.hosts[culprit].name}; its output: {record.log(culprit)})",
        file=sys.stderr,
    )
    return failed[culprit] if failed[culprit] > 0 else 128 - failed[culprit]


def _report_interrupted(
    connections: HostConnections, lost: Sequence[Host], record: Record, status: int
) -> int:
    left = ""
    if lost:
        left = (
            f"; {', '.join(map(str, lost[:SHOWN_HOSTS]))} did not answer: what runs there ends by itself "
            f"{connections.silence_seconds:g} s after the connection broke"
        )
    what = "interrupted" if status == INTERRUPTED else "ended by SIGTERM"
    _say(f"{what}: every process on every host is ended{left}; their output: {record.folder}")
    return status


def _report_lost(connections: HostConnections, host: Host, seconds: float, record: Record) -> int:
    connection = connections.by_rank[host.rank]
    why = "" if connection.closed else " (no answer)"
    if connection.closed and connection.error_lines:
        why = f" ({connection.error_lines[-1][:200]})"
    print(
        f"error: the connection to {host} broke after {seconds:.1f} s{why}; the others are ended, and what runs there ends by "
        f"itself {connections.silence_seconds:g} s after the break (its output: {record.log(host.rank)})",
        file=sys.stderr,
    )
    return LOST


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """Within the ``with``, SIGTERM raises ``_Terminated``, so that it can be passed on."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
