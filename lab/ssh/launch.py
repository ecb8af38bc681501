"""``lab launch``: run one command on several hosts, and leave no process behind.

Order: read the flags, connect, ask the hosts for problems, find the master's address, perhaps run
``lab doctor``, start the command on all, wait, and end with the status of what failed first.
"""

import argparse
import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

from common.errors import INTERRUPTED, TO_BE_CONTINUED, UserError
from common.utils.environment import RUN_TOKEN, with_run_token
from common.utils.paths import BASE, new_folder
from common.utils.processes import shell_status
from lab.processes.first_failure import find_root_failure
from lab.processes.prefixed_output import PrefixedOutput, say
from lab.ssh.check import doctor_passes
from lab.ssh.command import NodeCommands
from lab.ssh.connection import LOST
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import Host, SSHOptions, parse_hosts, remote_folder
from lab.ssh.master_address import find_master
from lab.ssh.probe import Facts, ask_facts, problems_of, refuse
from lab.ssh.record import SHOWN_HOSTS, Record, launch_content

_GRACE_SECONDS = 8.0
_FAREWELL_SECONDS = 5.0
_SAVE_SECONDS = 120.0
_KILL_SECONDS = 12.0
_FAILURE_LINES = 20
_FILES_A_HOST = 4  # input, output and errors of ssh, and a log


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _raise_terminated(*_: object) -> None:
    raise _Terminated


def launch(args: argparse.Namespace) -> int:
    """Run the command on all hosts; return 0, or the status of the host that failed first.

    UserError if nothing can be started.
    """
    shares_a_port = args.master_port is not None
    hosts, options = parse_hosts(args.hosts, shares_a_port=shares_a_port), read_ssh_options(args)
    commands = NodeCommands.of(args.flags, nodes=len(hosts), port=args.master_port)
    _allow_open_files(64 + _FILES_A_HOST * len(hosts))
    with HostConnections(hosts, options) as connections:
        facts = ask_facts(connections, options, script=commands.script)
        refuse(problems_of(hosts, facts, commands, shares_a_port=shares_a_port), of=len(hosts))
        master = args.master_ip
        if master is None and (commands.kind != "plain" or args.check):
            master = find_master(connections, facts, port=commands.master_port)
        prefixed = PrefixedOutput(
            len(hosts), shown=lambda node: len(hosts) <= SHOWN_HOSTS or node == 0
        )
        folder = args.logs or new_folder(args.output_dir, "launch")
        content = launch_content(hosts, facts, options, commands, master=master)
        record = Record(folder, prefixed, content)
        say(_introduction(hosts, commands, master, record))
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
    """Raise the limit of open files if it is too low; the usual 1,024 suffice for 240 hosts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except ValueError:
            raise UserError(
                f"--hosts names too many hosts: they need {wanted} open files, and this machine "
                f"allows {hard} per process (ulimit -Hn): raise that limit, or give fewer hosts"
            ) from None


def _introduction(
    hosts: Sequence[Host], commands: NodeCommands, master: str | None, record: Record
) -> str:
    names = hosts[0].name if len(hosts) == 1 else f"{hosts[0].name} to {hosts[-1].name}"
    address = f"; rank 0 at {master}:{commands.master_port}" if master is not None else ""
    quiet = (
        "; showing only rank 0's output and the first failure's" if len(hosts) > SHOWN_HOSTS else ""
    )
    plural = "s" * (len(hosts) > 1)
    return f"{len(hosts)} host{plural}, {names}{address}; logs: {record.folder}{quiet}"


def _run(
    connections: HostConnections,
    facts: Sequence[Facts],
    commands: NodeCommands,
    master: str,
    record: Record,
) -> int:
    # The agents get the token through ssh, where no process list and no file shows it.
    token = with_run_token(os.environ)[RUN_TOKEN]
    environment = {"PYTHONUNBUFFERED": "1", RUN_TOKEN: token}
    if commands.kind == "torchrun":
        # Otherwise restarted workers would read the addresses of their predecessors.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    began, interrupted = time.monotonic(), 0
    try:
        with contextlib.ExitStack() as stack:
            before = signal.signal(signal.SIGTERM, _raise_terminated)
            stack.callback(signal.signal, signal.SIGTERM, before)
            for host, one in zip(connections.hosts, facts, strict=True):
                command = commands.fill(master=master, rank=host.rank, python=one["python"])
                connections.start(host.rank, command, environment=environment, folder=one["folder"])
            _wait(connections, record)
    except KeyboardInterrupt:
        interrupted = INTERRUPTED
        _let_end(connections, signal.SIGINT, _FAREWELL_SECONDS)
    except _Terminated:
        interrupted = 128 + signal.SIGTERM
        say("SIGTERM: sent to every node, which may save a checkpoint; Ctrl-C ends them at once")
        _let_end(connections, signal.SIGTERM, _SAVE_SECONDS)
    if connections.running:
        connections.kill()
        connections.wait(lambda: not connections.running, limit_seconds=_KILL_SECONDS)
    return _conclude(connections, time.monotonic() - began, record, interrupted)


def _wait(connections: HostConnections, record: Record) -> None:
    """Wait until all nodes end; after a failure give the others a short time to report why."""
    connections.wait(lambda: not connections.running or bool(_failed(connections, or_stopped=True)))
    if not _failed(connections):  # the nodes were stopped and have saved; rank 0 may still write
        connections.wait(
            lambda: not connections.running or bool(_failed(connections)),
            limit_seconds=_SAVE_SECONDS,
        )
    first = next(iter(_failed(connections)), 0)
    if len(connections.hosts) > SHOWN_HOSTS and first != 0:
        for line in list(connections.by_rank[first].lines)[-_FAILURE_LINES:]:
            record.prefixed.show(first, line)
    connections.wait(lambda: not connections.running, limit_seconds=_GRACE_SECONDS)


def _let_end(connections: HostConnections, number: int, limit_seconds: float) -> None:
    """Pass a signal on, and wait until the nodes end; a second Ctrl-C ends the wait."""
    with contextlib.suppress(KeyboardInterrupt):
        connections.signal(number)
        connections.wait(lambda: not connections.running, limit_seconds=limit_seconds)


def _failed(connections: HostConnections, *, or_stopped: bool = False) -> dict[int, int]:
    """Return the status of each node that failed, in the order in which they ended.

    or_stopped : include the nodes that stopped after saving a checkpoint.
    """
    good = (0,) if or_stopped else (0, TO_BE_CONTINUED)
    return {node: status for node, status in connections.ended.copy().items() if status not in good}


def _conclude(
    connections: HostConnections, seconds: float, record: Record, interrupted: int
) -> int:
    """Print how the launch ended, and return the exit status.

    interrupted : the exit status if a signal ended the launch, else 0.
    """
    lost = [
        one.host
        for one in connections.by_rank
        if one.host.rank in connections.running
        or (connections.ended.get(one.host.rank) == LOST and one.closed)
    ]
    failed, ended_badly = _failed(connections), _failed(connections, or_stopped=True)
    if lost and not interrupted:
        return _report_lost(connections, lost[0], seconds, record)
    if not lost and len(ended_badly) > len(failed) and (interrupted or not failed):
        say(
            f"stopped after {seconds:.1f} s, after saving a checkpoint; resume with the same "
            f"command and --resume auto; output: {record.folder}"
        )
        return TO_BE_CONTINUED
    if interrupted and (lost or ended_badly):
        return _report_interrupted(connections, lost, record, interrupted)
    if not failed:
        say(f"all nodes finished without errors after {seconds:.1f} s; output: {record.folder}")
        return 0
    outputs = {node: "\n".join(connections.by_rank[node].lines) for node in failed}
    culprit, message = find_root_failure(list(failed), failed, outputs, name="node")
    host = connections.hosts[culprit].name
    print(f"error: {message} (host {host}; output: {record.log(culprit)})", file=sys.stderr)
    return shell_status(failed[culprit])


def _report_interrupted(
    connections: HostConnections, lost: Sequence[Host], record: Record, status: int
) -> int:
    left = (
        f"; {', '.join(map(str, lost[:SHOWN_HOSTS]))} did not answer: processes there end by "
        f"themselves {connections.silence_seconds:g} s after the connection broke"
    )
    what = "interrupted" if status == INTERRUPTED else "ended by SIGTERM"
    say(
        f"{what}: all processes on {'the other' if lost else 'all'} hosts have ended"
        f"{left if lost else ''}; output: {record.folder}"
    )
    return status


def _report_lost(connections: HostConnections, host: Host, seconds: float, record: Record) -> int:
    connection = connections.by_rank[host.rank]
    errors = connection.error_lines if connection.closed else ["no answer"]
    why = f" ({errors[-1][:200]})" if errors else ""
    print(
        f"error: the connection to {host} broke after {seconds:.1f} s{why}; the other hosts were "
        f"stopped, and processes there end by themselves {connections.silence_seconds:g} s after "
        f"the break (output: {record.log(host.rank)})",
        file=sys.stderr,
    )
    return LOST
