"""``lab cluster run``, ``shell`` and ``fault``: what each does with a ``Cluster``; their flags are in lab/cluster/cli.py."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from common.errors import INTERRUPTED, UserError
from common.utils.paths import new_folder
from common.utils.processes import find_root_failure
from lab.cluster import control
from lab.cluster.cluster import Cluster, End
from lab.cluster.program import check_placeholders, node_environment, parse_python
from lab.processes.prefixed_output import PrefixedOutput

_INTERRUPT_SECONDS = 5.0

console = Console(highlight=False)


def run(args: argparse.Namespace) -> int:
    """Run the command on every node, show and keep what they write; return 0, or the status of the node that failed first."""
    command = args.flags
    if not command:
        raise UserError(
            "no command: give it behind --, for example lab cluster run --nodes 2 -- "
            "python PartTwo/main.py --master-ip {master} --num-nodes {nodes} --rank {rank}"
        )
    check_placeholders(command)
    cluster = Cluster(
        args.nodes,
        rate=args.rate,
        latency=args.latency,
        loopback=args.loopback,
        fresh=args.fresh or parse_python(command) is None,
        on_line=PrefixedOutput(console, args.nodes),
    )
    for warning in cluster.warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    logs, began = args.logs or new_folder(args.output_dir, "cluster"), time.monotonic()
    with cluster, control.served(cluster):
        console.print(
            _introduction(cluster, args, time.monotonic() - began), markup=False, soft_wrap=True
        )
        try:
            cluster.start(command, logs=logs)
            ends = cluster.wait(stop_at_failure=True)
        except KeyboardInterrupt:
            return _interrupted(cluster, logs)
        return _conclusion(cluster, ends, time.monotonic() - began, logs)


def _introduction(cluster: Cluster, args: argparse.Namespace, seconds: float) -> str:
    first, last = cluster.address(0), cluster.address(cluster.nodes - 1)
    if cluster.loopback:
        links = "on loopback, unshaped"
    else:
        links = f"{first} to {last}, " + (
            f"{args.rate} both ways" if args.rate else "links as fast as this machine"
        )
        if cluster.latency_seconds is not None:
            links += f", {args.latency} from node to node"
    return f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}, {links}; up in {seconds:.1f} s"


def _interrupted(cluster: Cluster, logs: Path) -> int:
    """Wait for the nodes to print why they end; a second Ctrl-C skips that."""
    try:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(limit_seconds=_INTERRUPT_SECONDS)
    except (KeyboardInterrupt, TimeoutError):
        pass
    console.print(
        f"interrupted: every process of every node is ended; their output is in {logs}",
        markup=False,
        soft_wrap=True,
    )
    return INTERRUPTED


def _conclusion(cluster: Cluster, ends: Sequence[End], seconds: float, logs: Path) -> int:
    failed = [end.node for end in ends if end.status]
    if not failed:
        console.print(
            f"all nodes ended well after {seconds:.1f} s; their output: {logs}",
            markup=False,
            soft_wrap=True,
        )
        return 0
    statuses = {end.node: end.status for end in ends}
    culprit, message = find_root_failure(
        failed, statuses, {node: cluster.output(node) for node in failed}, name="node"
    )
    print(f"error: {message} (its output: {cluster.log(culprit, logs)})", file=sys.stderr)
    status = statuses[culprit]
    return status if status > 0 else 128 - status


def shell(args: argparse.Namespace) -> int:
    """Open a shell (or run the command given) in a node of a running cluster; return its exit status."""
    cluster = control.ask(pid := control.find(args.cluster), do="about")
    if cluster["loopback"]:
        raise UserError(
            "a cluster on loopback has no nodes to enter: they are this machine's own processes"
        )
    _check_node(args.node, cluster["nodes"])
    if not args.flags:
        console.print(
            f"a shell in node {args.node} of the cluster of process {pid}; exit leaves it",
            soft_wrap=True,
        )
    command = args.flags or [os.environ.get("SHELL", "/bin/sh")]
    environment = node_environment(dict(os.environ), nodes=cluster["nodes"], interface="eth0")
    return control.enter(cluster["host"], args.node, command, environment=environment)


def fault(args: argparse.Namespace) -> int:
    """Hurt a node of a running cluster, or undo it."""
    what = next(name for name in ("cut", "slow", "pause", "kill", "restore") if getattr(args, name))
    cluster = control.ask(pid := control.find(args.cluster), do="about")
    _check_node(args.node, cluster["nodes"])
    control.ask(pid, do="fault", node=args.node, fault=what, rate=args.slow)
    console.print(f"node {args.node}: {what}{f' {args.slow}' if args.slow else ''}", markup=False)
    return 0


def _check_node(node: int, nodes: int) -> None:
    if not 0 <= node < nodes:
        raise UserError(f"--node: got {node}, the cluster has nodes 0 to {nodes - 1}")
