"""The flags of ``lab launch`` and ``lab collect``."""

import argparse
from pathlib import Path
from typing import Any

from common.utils.environment import DEFAULT_MASTER_PORT
from common.utils.paths import REPORTS
from lab.flags import add_command

# The flags of each command, with their arguments of ``add_argument``.
SSH_FLAGS: dict[str, dict[str, Any]] = {
    "--hosts": {
        "help": "host names as ssh knows them, rank 0 first: node0,node1 or "
        "user@10.0.0.1,user@10.0.0.2",
    },
    "--user": {"help": "user name on hosts that are given without one"},
    "--workdir": {
        "help": "the project's folder on the hosts, absolute or relative to the home folder "
        "(default: the same path as here)",
    },
    "--python": {
        "help": "interpreter on the hosts (default: .venv/bin/python in --workdir, else python3)",
    },
    "--ssh-config": {
        "type": Path,
        "metavar": "FILE",
        "help": "configuration file for ssh (its -F)",
    },
    "--ssh-option": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUE",
        "help": "option for ssh (its -o); may be repeated",
    },
    "--silence": {
        "type": float,
        "default": 30.0,
        "help": "seconds without any message after which both sides treat the connection as broken",
    },
}
LAUNCH_FLAGS: dict[str, dict[str, Any]] = {
    **SSH_FLAGS,
    "--hosts": {**SSH_FLAGS["--hosts"], "required": True},
    "--ranks-per-node": {
        "type": int,
        "default": 1,
        "metavar": "K",
        "help": "start the command K times on each host, as consecutive ranks",
    },
    "--master-ip": {
        "help": "address at which the other hosts reach the first (default: found by testing)",
    },
    "--master-port": {
        "type": int,
        "help": f"rank 0's port (default: {DEFAULT_MASTER_PORT})",
    },
    "--check": {
        "action": "store_true",
        "help": "run lab doctor on all hosts first; start only if it finds no failure",
    },
    "--dry-run": {
        "action": "store_true",
        "help": "print each host's command, variables and ssh command; connect to no host",
    },
    "--logs": {
        "type": Path,
        "help": "folder for node<r>.log, with several ranks on a host node<n>-rank<r>.log, and "
        "launch.json (default: reports/launch-<time>)",
    },
    "--output-dir": {"type": Path, "default": REPORTS, "help": "folder for launch-<time>/"},
}
COLLECT_FLAGS: dict[str, dict[str, Any]] = {
    "things": {
        "nargs": "*",
        "metavar": "LAUNCH|RUN",
        "help": "folder of a launch (default: the newest); to copy only some of its runs, name "
        "them after it (<part>-<sync>/<time>); with --hosts, only runs",
    },
    **SSH_FLAGS,
    "--remote-reports": {
        "help": "with --hosts: folder of the runs on the hosts (default: reports in --workdir)",
    },
    "--checkpoints": {"action": "store_true", "help": "copy the checkpoints, too"},
    "--output-dir": {
        "type": Path,
        "default": REPORTS,
        "help": "folder that receives the run folders",
    },
}


def add_launch(commands: argparse._SubParsersAction) -> None:
    """Add ``lab launch``."""
    add_command(
        commands,
        "launch",
        run="lab.ssh.launch:launch",
        flags=LAUNCH_FLAGS,
        passes_flags=True,
        help="run the command after -- on every host over ssh, with --master-ip, --num-nodes and "
        "--rank added (for torchrun, its own flags); {master}, {nodes}, {rank}, {node}, "
        "{local_rank} and {port} are replaced anywhere in the command",
    )


def add_collect(commands: argparse._SubParsersAction) -> None:
    """Add ``lab collect``."""
    add_command(
        commands,
        "collect",
        run="lab.ssh.collect:collect",
        flags=COLLECT_FLAGS,
        help="copy the run folders of a lab launch from its hosts, merged for lab report; or, with "
        "--hosts, the runs that you name",
    )
