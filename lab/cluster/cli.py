"""The flags of ``lab cluster``.

The handlers import what they need when they are called, so that ``lab --help`` answers at once.
"""

import argparse
from pathlib import Path

from common.utils.paths import REPORTS
from lab.flags import add_command


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``cluster run``, ``cluster shell`` and ``cluster fault`` to the commands of ``lab``."""
    about = "nodes with addresses of their own on this machine, joined by links of a chosen speed"
    cluster = commands.add_parser("cluster", help=about, description=about, allow_abbrev=False)
    actions = cluster.add_subparsers(required=True, metavar="ACTION", parser_class=type(cluster))
    _add_run(actions)
    _add_shell(actions)
    _add_fault(actions)


def _add_run(actions: argparse._SubParsersAction) -> None:
    parser = add_command(
        actions,
        "run",
        run=_run,
        help="start the command behind -- on every node of a new cluster; {master}, {nodes}, "
        "{rank} and {port} in it become the first node's address, the number of nodes, the node's "
        "own, and a port that is free there",
    )
    parser.set_defaults(passes_flags=True)
    parser.add_argument("--nodes", type=int, default=4, help="number of nodes")
    parser.add_argument(
        "--rate",
        help="of each link, both ways, e.g. 1gbit or 200mbit (default: as fast as this machine)",
    )
    parser.add_argument(
        "--latency", help="from one node to another, e.g. 0.5ms (where the kernel has netem)"
    )
    parser.add_argument(
        "--loopback", action="store_true", help="no namespaces and no links: processes on 127.0.0.1"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start each python by itself, not from one that has imported torch",
    )
    parser.add_argument(
        "--logs", type=Path, help="folder for node<r>.log (default: reports/cluster-<time>)"
    )
    parser.add_argument("--output-dir", type=Path, default=REPORTS, help="receives cluster-<time>/")


def _add_shell(actions: argparse._SubParsersAction) -> None:
    parser = add_command(
        actions,
        "shell",
        run=_shell,
        help="a shell in a node of a running cluster, or the command behind --",
    )
    parser.set_defaults(passes_flags=True)
    _add_node(parser)


def _add_fault(actions: argparse._SubParsersAction) -> None:
    parser = add_command(actions, "fault", run=_fault, help="hurt a node of a running cluster")
    _add_node(parser)
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--cut", action="store_true", help="take its link down")
    one.add_argument("--slow", metavar="RATE", help="give its link another rate, e.g. 10mbit")
    one.add_argument("--pause", action="store_true", help="stop its processes (SIGSTOP)")
    one.add_argument("--kill", action="store_true", help="kill its processes (SIGKILL)")
    one.add_argument("--restore", action="store_true", help="undo all of these but --kill")


def _add_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node", type=int, required=True, help="its number, from 0")
    parser.add_argument(
        "--cluster",
        type=int,
        metavar="PID",
        help="process id of its lab cluster run, where several run",
    )


def _run(args: argparse.Namespace) -> int:
    from lab.cluster.run_command import run

    return run(args)


def _shell(args: argparse.Namespace) -> int:
    from lab.cluster.control import shell

    return shell(args)


def _fault(args: argparse.Namespace) -> int:
    from lab.cluster.control import fault

    return fault(args)
