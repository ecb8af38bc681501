"""The flags of ``lab launch`` and ``lab collect``."""

import argparse
from pathlib import Path

from common.utils.environment import DEFAULT_MASTER_PORT
from common.utils.paths import REPORTS
from lab.flags import add_command


def add_launch(commands: argparse._SubParsersAction) -> None:
    """Add ``lab launch``."""
    parser = add_command(
        commands,
        "launch",
        run="lab.ssh.launch:launch",
        passes_flags=True,
        help="start the command behind -- on each host by ssh, with --master-ip, --num-nodes and "
        "--rank filled in; torchrun gets its own flags, and {master}, {nodes}, {rank} and {port} "
        "are filled in anywhere",
    )
    _add_ssh_flags(parser, hosts_required=True)
    parser.add_argument(
        "--master-ip", help="address of the first host for the others (default: found by trying)"
    )
    parser.add_argument(
        "--master-port", type=int, help=f"port there (default: {DEFAULT_MASTER_PORT})"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="lab doctor on all hosts first; start only if none has a failure",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="folder for node<r>.log and launch.json (default: reports/launch-<time>)",
    )
    parser.add_argument("--output-dir", type=Path, default=REPORTS, help="receives launch-<time>/")


def add_collect(commands: argparse._SubParsersAction) -> None:
    """Add ``lab collect``."""
    parser = add_command(
        commands,
        "collect",
        run="lab.ssh.collect:collect",
        help="bring the run folders of lab launch back from its hosts, merged as lab report reads "
        "them; or with --hosts those that are named",
    )
    parser.add_argument(
        "things",
        nargs="*",
        metavar="LAUNCH|RUN",
        help="folder of a launch (default: the newest), then perhaps "
        "runs (<part>-<sync>/<time>) to choose of it; with --hosts runs alone",
    )
    _add_ssh_flags(parser, hosts_required=False)
    parser.add_argument(
        "--remote-reports",
        help="with --hosts: where the runs lie there (default: reports in --workdir)",
    )
    parser.add_argument("--checkpoints", action="store_true", help="the checkpoints, too")
    parser.add_argument("--output-dir", type=Path, default=REPORTS, help="receives the run folders")


def _add_ssh_flags(parser: argparse.ArgumentParser, *, hosts_required: bool) -> None:
    parser.add_argument(
        "--hosts",
        required=hosts_required,
        help="names as ssh knows them, rank 0 first: node0,node1 or user@10.0.0.1,user@10.0.0.2",
    )
    parser.add_argument("--user", help="on hosts that are given without one")
    parser.add_argument(
        "--workdir",
        help="the project's folder on the hosts, from the home folder unless absolute (default: "
        "the path that it has here)",
    )
    parser.add_argument(
        "--python",
        help="interpreter on the hosts (default: .venv/bin/python in --workdir, else python3)",
    )
    parser.add_argument(
        "--ssh-config", type=Path, metavar="FILE", help="of ssh, in place of ~/.ssh/config"
    )
    parser.add_argument(
        "--ssh-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of ssh, as its -o; may be repeated",
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=30.0,
        help="seconds after which a connection without a sign of life "
        "counts as broken, here and there",
    )
