"""The flags and the handler of ``lab predict``."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.config.schema import DEFAULT_GLOBAL_BATCH_SIZE
from common.sync import STRATEGIES
from lab.flags import add_command

PREDICT_FLAGS: dict[str, dict[str, Any]] = {
    "--nodes": {
        "type": int,
        "nargs": "+",
        "default": [1, 2, 4, 8],
        "help": "numbers of nodes, up to 100,000",
    },
    "--rate": {"help": "bandwidth of each link, e.g. 1gbit (default: as calibrated)"},
    "--latency": {"help": "latency of a message, e.g. 0.2ms (default: as calibrated)"},
    "--sync": {
        "nargs": "+",
        "default": ["all"],
        "help": f"strategies: {', '.join(STRATEGIES)}; or 'all'",
    },
    "--batch-size": {
        "type": int,
        "default": DEFAULT_GLOBAL_BATCH_SIZE,
        "help": "global batch; with --scaling weak that of one node",
    },
    "--scaling": {
        "choices": ["strong", "weak"],
        "default": "strong",
        "help": "strong: all nodes share one batch; weak: each node has its own batch",
    },
    "--bucket-mb": {
        "metavar": "SIZE",
        "help": "size of a bucket in MiB, as for PartTwo and PartThree, or 'auto': the best one",
    },
    "--topk-ratio": {"type": float, "help": "share of the gradients that topk sends"},
    "--powersgd-rank": {"type": int, "help": "rank of ddp_powersgd"},
    "--averaging-period": {"type": int, "help": "steps between two exchanges of local_sgd"},
    "--calibration": {
        "type": Path,
        "help": "a file written by lab calibrate (default: this machine's, or else the one that "
        "comes with the project)",
    },
    "--figure": {
        "type": Path,
        "metavar": "FILE.png",
        "help": "also draw step time and efficiency for 1 to 100,000 nodes; .svg and .pdf work, "
        "too",
    },
    "--json": {"action": "store_true", "help": "print JSON"},
}


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab predict``."""
    add_command(
        commands,
        "predict",
        run=main_predict,
        flags=PREDICT_FLAGS,
        help="predict the step time of each strategy for any number of nodes, and where each "
        "strategy stops scaling",
    )


def main_predict(args: argparse.Namespace) -> int:
    """Print the predictions, draw the figure and return the exit status.

    Raises UserError on wrong values.

    args : the flags, ``rate``, ``latency`` and ``bucket_mb`` as text.
    """
    from lab.predict.calibration_file import find_calibration
    from lab.predict.printing import print_tables, summarize
    from lab.predict.scaling import most_nodes
    from lab.predict.tables import message_plans, predict_table, scaling_limits_of
    from lab.units import parse_bucket_mb, parse_latency, parse_rate

    calibration, is_reference = find_calibration(args.calibration)
    names = list(STRATEGIES) if "all" in args.sync else list(dict.fromkeys(args.sync))
    options = {
        "bucket_mb": parse_bucket_mb(args.bucket_mb),
        "topk_ratio": args.topk_ratio,
        "powersgd_rank": args.powersgd_rank,
        "averaging_period": args.averaging_period,
    }
    links = parse_rate(args.rate), parse_latency(args.latency)
    plans = message_plans(names, {name: one for name, one in options.items() if one is not None})
    setting = {"batch_size": args.batch_size, "scaling": args.scaling}

    steps = predict_table(args.nodes, *links, plans, calibration=calibration, **setting)
    limits = scaling_limits_of(plans, calibration, *links, args.batch_size)
    summary = summarize(calibration, *links, is_reference=is_reference, **setting)
    if args.figure is not None:
        # matplotlib takes a second to import
        from lab.predict.plots import draw_scaling, numbers_to_draw

        nodes = numbers_to_draw(most_nodes(args.batch_size, scaling=args.scaling))
        drawn = predict_table(nodes, *links, plans, calibration=calibration, **setting)
        draw_scaling(args.figure, drawn, scaling=args.scaling, summary=summary)
    if args.json:
        content = {
            "format": 1,
            "about": summary,
            "rows": [asdict(step) for step in steps],
            "scaling": [asdict(limit) for limit in limits],
        }
        print(json.dumps(content, indent=1))
    else:
        print_tables(summary, steps, limits, batch_size=args.batch_size, cores=calibration.cores)
    return 0
