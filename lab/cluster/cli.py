"""``lab cluster``: run a command on emulated nodes, open a shell on a node, disturb a node."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.say import count
from common.utils.environment import RUN_TOKEN, setting
from common.utils.paths import REPORTS, new_folder
from common.utils.processes import GRACE_SECONDS, on_signals, shell_status
from lab.cluster.cluster import Cluster
from lab.cluster.nodes import FAULTS, Nodes, find_nodes
from lab.cluster.program import NOT_FOUND, check_placeholders, node_environment, parse_python
from lab.explain.diagnosis import first_to_fail
from lab.flags import add_command, add_flags
from lab.fleet.conclusion import STOPS, conclude
from lab.fleet.prefixed_output import PrefixedOutput, log_name, write_log
from lab.terminal import say
from lab.units import parse_rate

_DONE = {
    "cut": "link disconnected",
    "slow": "link limited to ",
    "pause": "processes stopped",
    "kill": "processes killed",
    "restore": "restored",
}


_NODE_FLAGS: dict[str, dict[str, Any]] = {
    "--node": {"type": int, "required": True, "help": "number of the node, from 0"},
    "--cluster": {
        "type": int,
        "metavar": "PID",
        "help": "process id of lab cluster run, if several are running",
    },
}
_RUN_FLAGS: dict[str, dict[str, Any]] = {
    "--nodes": {"type": int, "default": 4, "help": "number of nodes"},
    "--ranks-per-node": {
        "type": int,
        "default": 1,
        "metavar": "K",
        "help": "start the command K times on each node, as ranks that share its address and link",
    },
    "--rate": {
        "help": "rate of each link in both directions, e.g. 1gbit or 200mbit (default: as fast as "
        "this machine)",
    },
    "--latency": {"help": "delay from node to node, e.g. 0.5ms (the kernel must have netem)"},
    "--loopback": {
        "action": "store_true",
        "help": "nodes are plain processes on 127.0.0.1, without namespaces and links",
    },
    "--fresh": {
        "action": "store_true",
        "help": "start a new Python on each node, not a fork of one that has imported torch "
        "(slower)",
    },
    "--logs": {
        "type": Path,
        "help": "folder for node<r>.log, with several ranks on a node node<n>-rank<r>.log "
        "(default: reports/cluster-<time>)",
    },
    "--output-dir": {"type": Path, "default": REPORTS, "help": "folder for cluster-<time>/"},
}
_FAULT_FLAGS: dict[str, dict[str, Any]] = {
    "--cut": {"action": "store_true", "help": "disconnect its link"},
    "--slow": {"metavar": "RATE", "help": "change the rate of its link, e.g. 10mbit"},
    "--pause": {"action": "store_true", "help": "stop all its processes (SIGSTOP)"},
    "--kill": {"action": "store_true", "help": "kill all its processes (SIGKILL)"},
    "--restore": {"action": "store_true", "help": "undo --cut, --slow and --pause"},
}


def add_cluster(commands: argparse._SubParsersAction) -> None:
    """Add ``cluster run``, ``cluster shell`` and ``cluster fault`` to the commands of ``lab``."""
    about = "emulate a cluster here: nodes with their own addresses and links of a chosen speed"
    cluster = commands.add_parser("cluster", help=about, description=about, allow_abbrev=False)
    actions = cluster.add_subparsers(required=True, metavar="ACTION", parser_class=type(cluster))
    add_command(
        actions,
        "run",
        run=run,
        passes_flags=True,
        flags=_RUN_FLAGS,
        help="run the command after -- on every node of a new cluster; in the command, {master} "
        "is replaced by the first node's address, {nodes} by the number of ranks, {rank} by the "
        "rank, {node} by the number of its node, {local_rank} by its number there, and {port} by "
        "a free port",
    )
    add_command(
        actions,
        "shell",
        run=shell,
        passes_flags=True,
        flags=_NODE_FLAGS,
        help="open a shell on a node of a running cluster, or run the command after -- there",
    )
    disturb = add_command(
        actions,
        "fault",
        run=fault,
        flags=_NODE_FLAGS,
        help="disturb a node of a running cluster",
    )
    add_flags(disturb.add_mutually_exclusive_group(required=True), _FAULT_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Run the command for every rank; print what the ranks write, and log it to files.

    Returns 0, or the exit status of the rank that failed first.
    """
    command = args.flags
    if not command:
        raise UserError(
            "no command: add it after --, for example lab cluster run --nodes 2 -- "
            "python PartTwo/main.py --master-ip {master} --num-nodes {nodes} --rank {rank}"
        )
    check_placeholders(command)
    cluster = Cluster(
        args.nodes,
        ranks_per_node=args.ranks_per_node,
        rate=args.rate,
        latency=args.latency,
        loopback=args.loopback,
        fresh=args.fresh or parse_python(command) is None,
        on_line=PrefixedOutput(args.nodes, ranks_per_node=args.ranks_per_node),
    )
    for warning in cluster.warnings:
        say(f"warning: {warning}")
    logs = cluster.logs = args.logs or new_folder(args.output_dir, "cluster")
    began = time.monotonic()
    received: list[int] = []
    with cluster, on_signals(STOPS, lambda number, _frame: received.append(number)):
        say(_introduction(cluster, args, time.monotonic() - began))
        cluster.start(command)
        ends = cluster.wait(grace_seconds=GRACE_SECONDS, received=lambda: received)
        stopped_by = received[0] if received else 0
        failed = {end.rank: end.status for end in ends if end.status}
        seconds = time.monotonic() - began
        status = conclude(failed, stopped_by=stopped_by, seconds=seconds, logs=logs)
        return _report_failure(cluster, failed) if status is None else status


def _introduction(cluster: Cluster, args: argparse.Namespace, seconds: float) -> str:
    """Return what was started: nodes and links. seconds : that this took."""
    links = "on loopback, no limit on speed"
    if not cluster.loopback:
        first = cluster.address(0)
        last = cluster.address(cluster.nodes - 1)
        rate = f"{args.rate} in each direction" if args.rate else "links as fast as this machine"
        delayed = cluster.latency_seconds is not None
        latency = f", {args.latency} from node to node" if delayed else ""
        links = f"{first} to {last}, {rate}{latency}"
    nodes = count(cluster.nodes, "node")
    if cluster.ranks_per_node > 1:
        nodes += f" with {cluster.ranks_per_node} ranks each"
    return f"{nodes}, {links}; started in {seconds:.1f} s"


def _report_failure(cluster: Cluster, failed: Mapping[int, int]) -> int:
    """Print which rank failed first and why; return its exit status.

    failed : statuses by rank, the first to end first.
    """
    outputs = {rank: cluster.output(rank) for rank in failed}
    name = "node" if cluster.ranks_per_node == 1 else "rank"
    culprit, message, _ = first_to_fail(failed, outputs, name=name)
    print(f"error: {message} (output: {cluster.log(culprit)})", file=sys.stderr)
    return shell_status(failed[culprit])


def shell(args: argparse.Namespace) -> int:
    """Open a shell in a node of a running cluster, or run a command; return its exit status."""
    nodes = _find(args)
    if nodes.loopback:
        raise UserError(
            "this cluster runs with --loopback: its nodes are plain processes of this machine, so "
            "use a shell of this machine"
        )
    if not args.flags:
        say(f"a shell on node {args.node} of cluster {nodes.maker}; leave it with exit")
    command = args.flags or [setting("SHELL") or "/bin/sh"]
    variables = {**os.environ, RUN_TOKEN: nodes.token}  # to start ranks of the same run
    ranks = nodes.number * nodes.ranks_per_node
    environment = node_environment(variables, ranks=ranks, interface="eth0")
    folder = os.getcwd()
    try:
        nodes.network.enter(args.node)
    except OSError as error:
        raise UserError(
            f"node {args.node} cannot be entered ({error.strerror}): "
            "use the account that started the cluster"
        ) from error
    try:
        return shell_status(subprocess.call(command, cwd=folder, env=environment))
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND


def fault(args: argparse.Namespace) -> int:
    """Disturb a node of a running cluster, or undo that; the logs of its ranks mention it."""
    what = next(name for name in FAULTS if getattr(args, name))
    nodes = _find(args)
    nodes.fault(args.node, what, parse_rate(args.slow))
    ranks = nodes.ranks_of(args.node)
    name = f"node {args.node}"
    if len(ranks) > 1:
        name += f" with its ranks {ranks[0]} to {ranks[-1]}"
    text = f"{name}: {_DONE[what]}{args.slow or ''}"
    for rank in ranks:
        write_log(
            Path(nodes.logs, log_name(rank, nodes.ranks_per_node)), f"lab cluster fault: {text}"
        )
    say(text)
    return 0


def _find(args: argparse.Namespace) -> Nodes:
    """Return the nodes of the chosen cluster; UserError unless it has the chosen node."""
    nodes = find_nodes(args.cluster)
    if not 0 <= args.node < nodes.number:
        raise UserError(f"--node: got {args.node}, the cluster has nodes 0 to {nodes.number - 1}")
    return nodes
