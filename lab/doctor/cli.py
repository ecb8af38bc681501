"""The flags of ``lab doctor``."""

import argparse
from pathlib import Path
from typing import Any

from common.data import DATASETS
from common.utils.environment import DEFAULT_MASTER_PORT
from common.utils.paths import DATA, REPORTS
from lab.flags import add_command

DOCTOR_FLAGS: dict[str, dict[str, Any]] = {
    "-M --master-ip": {"help": "address of rank 0's node"},
    "--master-port": {"type": int, "default": DEFAULT_MASTER_PORT, "help": "rank 0's port"},
    "-N --num-nodes --world-size": {
        "type": int,
        "help": "number of ranks; each then connects to every other one",
    },
    "-R --rank": {"type": int, "help": "this process's rank, from 0"},
    "--dataset": {
        "default": "cifar10",
        "choices": list(DATASETS),
        "help": "dataset of the run",
    },
    "--data-dir": {"type": Path, "default": DATA, "help": "folder of the dataset"},
    "--output-dir": {"type": Path, "default": REPORTS, "help": "folder that runs write to"},
    "--timeout": {"type": float, "default": 60.0, "help": "seconds to wait for the other ranks"},
    "--json": {"action": "store_true", "help": "print the findings as JSON"},
}


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab doctor``."""
    add_command(
        commands,
        "doctor",
        run="lab.doctor.examination:main_doctor",
        flags=DOCTOR_FLAGS,
        help="check what would make a run fail: versions, cores, dataset, disk, network; with "
        "--master-ip, --num-nodes and --rank, started for every rank at the same time, also every "
        "pair of ranks; exit status 1 if a run would fail",
    )
