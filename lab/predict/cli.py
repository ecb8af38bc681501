"""The flags of ``lab predict``."""

import argparse
from pathlib import Path

from common.config.schema import DEFAULT_GLOBAL_BATCH_SIZE
from common.sync import STRATEGIES
from lab.flags import add_command


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab predict``."""
    parser = add_command(
        commands,
        "predict",
        run=_predict,
        help="the step time of each strategy on nodes that nobody has, and where each stops scaling",
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of nodes, up to 100,000"
    )
    parser.add_argument("--rate", help="of each link, e.g. 1gbit (default: as calibrated)")
    parser.add_argument("--latency", help="of a message, e.g. 0.2ms (default: as calibrated)")
    parser.add_argument(
        "--sync", nargs="+", default=["all"], help=f"{', '.join(STRATEGIES)}; or 'all'"
    )
    parser.add_argument(
        "--batch-size", type=int, default=DEFAULT_GLOBAL_BATCH_SIZE, help="as of lab compare"
    )
    parser.add_argument(
        "--scaling", choices=["strong", "weak"], default="strong", help="as of lab compare"
    )
    parser.add_argument("--bucket-mb", type=float, help="as of the parts; so are the next three")
    parser.add_argument("--topk-ratio", type=float)
    parser.add_argument("--powersgd-rank", type=int)
    parser.add_argument("--averaging-period", type=int)
    parser.add_argument(
        "--calibration",
        type=Path,
        help="a file of lab calibrate (default: this machine's, else the one that "
        "comes with the project)",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE.png",
        help="also draw step time and efficiency from one node to "
        "100,000; .svg and .pdf will do, too",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def _predict(args: argparse.Namespace) -> int:
    from lab.predict.tables import main_predict

    return main_predict(args)
