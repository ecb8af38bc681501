"""``lab cluster run``: run one command on every node of a new cluster."""

import argparse
import contextlib
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
from lab.cluster.program import check_placeholders, parse_python
from lab.processes.prefixed_output import PrefixedOutput

_INTERRUPT_SECONDS = 5.0

console = Console(highlight=False)


def run(args: argparse.Namespace) -> int:
    """Run the command on every node, and show and keep what the nodes write.

    Returns 0, or the exit status of the node that failed first.
    """
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
        _show(f"warning: {warning}")
    logs, began = args.logs or new_folder(args.output_dir, "cluster"), time.monotonic()
    with cluster, control.served(cluster):
        _show(_introduction(cluster, args, time.monotonic() - began))
        try:
            cluster.start(command, logs=logs)
            ends = cluster.wait(stop_at_failure=True)
        except KeyboardInterrupt:
            return _interrupted(cluster, logs)
        return _conclusion(cluster, ends, time.monotonic() - began, logs)


def _show(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _introduction(cluster: Cluster, args: argparse.Namespace, seconds: float) -> str:
    links = "on loopback, unshaped"
    if not cluster.loopback:
        first, last = cluster.address(0), cluster.address(cluster.nodes - 1)
        rate = f"{args.rate} both ways" if args.rate else "links as fast as this machine"
        added = cluster.latency_seconds is not None
        latency = f", {args.latency} from node to node" if added else ""
        links = f"{first} to {last}, {rate}{latency}"
    return f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}, {links}; up in {seconds:.1f} s"


def _interrupted(cluster: Cluster, logs: Path) -> int:
    """Let the nodes print why they end; a second Ctrl-C does not wait for that."""
    with contextlib.suppress(KeyboardInterrupt, TimeoutError):
        cluster.send_signal(signal.SIGINT)
        cluster.wait(limit_seconds=_INTERRUPT_SECONDS)
    _show(f"interrupted: every process of every node is ended; their output is in {logs}")
    return INTERRUPTED


def _conclusion(cluster: Cluster, ends: Sequence[End], seconds: float, logs: Path) -> int:
    """Report how the run ended, and return its exit status."""
    failed = {end.node: end.status for end in ends if end.status}
    if not failed:
        _show(f"all nodes ended well after {seconds:.1f} s; their output: {logs}")
        return 0
    outputs = {node: cluster.output(node) for node in failed}
    culprit, message = find_root_failure(list(failed), failed, outputs, name="node")
    print(f"error: {message} (its output: {cluster.log(culprit, logs)})", file=sys.stderr)
    status = failed[culprit]
    return status if status > 0 else 128 - status
