"""The flags of ``lab doctor``."""

import argparse
from pathlib import Path

from common.data import DATASETS
from common.utils.environment import DEFAULT_MASTER_PORT
from common.utils.paths import DATA, REPORTS
from lab.flags import add_command


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab doctor``."""
    parser = add_command(
        commands,
        "doctor",
        run="lab.doctor.examination:main_doctor",
        help="before a run: versions, cores, dataset, disk, network, and with --master-ip "
        "--num-nodes --rank on every node at once, each pair of nodes; status 1 where something "
        "would fail",
    )
    parser.add_argument("-M", "--master-ip", help="address of rank 0's node")
    parser.add_argument("--master-port", type=int, default=DEFAULT_MASTER_PORT, help="port there")
    parser.add_argument(
        "-N",
        "--num-nodes",
        "--world-size",
        type=int,
        help="number of nodes, which meet and try every pair",
    )
    parser.add_argument("-R", "--rank", type=int, help="this node's place")
    parser.add_argument(
        "--dataset", default="cifar10", choices=list(DATASETS), help="what is to be trained on"
    )
    parser.add_argument("--data-dir", type=Path, default=DATA, help="where it lies")
    parser.add_argument("--output-dir", type=Path, default=REPORTS, help="where the runs write")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for the other nodes"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
