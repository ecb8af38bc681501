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
        help="run the command after -- on every host over ssh, with --master-ip, --num-nodes and "
        "--rank added (for torchrun, its own flags); {master}, {nodes}, {rank} and {port} are "
        "replaced anywhere in the command",
    )
    _add_ssh_flags(parser, hosts_required=True)
    parser.add_argument(
        "--master-ip",
        help="address at which the other hosts reach the first (default: found by testing)",
    )
    parser.add_argument(
        "--master-port", type=int, help=f"rank 0's port (default: {DEFAULT_MASTER_PORT})"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run lab doctor on all hosts first; start only if it finds no failure",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="folder for node<r>.log and launch.json (default: reports/launch-<time>)",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=REPORTS, help="folder for launch-<time>/"
    )


def add_collect(commands: argparse._SubParsersAction) -> None:
    """Add ``lab collect``."""
    parser = add_command(
        commands,
        "collect",
        run="lab.ssh.collect:collect",
        help="copy the run folders of a lab launch from its hosts, merged for lab report; or, with "
        "--hosts, the runs that you name",
    )
    parser.add_argument(
        "things",
        nargs="*",
        metavar="LAUNCH|RUN",
        help="folder of a launch (default: the newest); to copy only some of its runs, name them "
        "after it (<part>-<sync>/<time>); with --hosts, only runs",
    )
    _add_ssh_flags(parser, hosts_required=False)
    parser.add_argument(
        "--remote-reports",
        help="with --hosts: folder of the runs on the hosts (default: reports in --workdir)",
    )
    parser.add_argument("--checkpoints", action="store_true", help="copy the checkpoints, too")
    parser.add_argument(
        "--output-dir", type=Path, default=REPORTS, help="folder that receives the run folders"
    )


def _add_ssh_flags(parser: argparse.ArgumentParser, *, hosts_required: bool) -> None:
    parser.add_argument(
        "--hosts",
        required=hosts_required,
        help="host names as ssh knows them, rank 0 first: node0,node1 or "
        "user@10.0.0.1,user@10.0.0.2",
    )
    parser.add_argument("--user", help="user name on hosts that are given without one")
    parser.add_argument(
        "--workdir",
        help="the project's folder on the hosts, absolute or relative to the home folder "
        "(default: the same path as here)",
    )
    parser.add_argument(
        "--python",
        help="interpreter on the hosts (default: .venv/bin/python in --workdir, else python3)",
    )
    parser.add_argument(
        "--ssh-config", type=Path, metavar="FILE", help="configuration file for ssh (its -F)"
    )
    parser.add_argument(
        "--ssh-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option for ssh (its -o); may be repeated",
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=30.0,
        help="seconds without any message after which both sides treat the connection as broken",
    )
