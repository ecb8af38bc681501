"""The flags and the handler of ``lab predict``."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.config.schema import DEFAULT_GLOBAL_BATCH_SIZE, flag
from common.sync import STRATEGIES, strategy_options
from lab.flags import add_command, refuse


def _option_flags() -> dict[str, dict[str, Any]]:
    """Return a flag for each option of a strategy; without it the plan's default holds."""
    flags: dict[str, dict[str, Any]] = {}
    for name, option in strategy_options().items():
        if option.auto:
            flags[flag(name)] = {"metavar": "SIZE", "help": f"{option.help}; 'auto': the best one"}
        else:
            flags[flag(name)] = {"type": option.kind, "help": option.help}
    return flags


PREDICT_FLAGS: dict[str, dict[str, Any]] = {
    "--nodes": {
        "type": int,
        "nargs": "+",
        "default": [1, 2, 4, 8],
        "help": "numbers of nodes, up to 100,000",
    },
    "--rate": {
        "nargs": "+",
        "help": "bandwidth of each link, e.g. 1gbit; several are compared (default: as calibrated)",
    },
    "--latency": {
        "help": "latency of a message, e.g. 0.2ms (default: with --rate a typical one of such a "
        "link, which is printed; else as calibrated)",
    },
    "--software-gbit": {
        "type": float,
        "metavar": "GBIT",
        "help": "Gbit/s that the nodes' software passes at most (default: as calibrated; with "
        "--step-time no limit)",
    },
    "--model": {"help": "a model of this project, with --step-time of one of your nodes"},
    "--parameters": {
        "metavar": "N",
        "help": "size of your own model, e.g. 25.6M, instead of --model",
    },
    "--step-time": {
        "help": "time of a step on one of your nodes, e.g. 120ms, with --batch samples"
    },
    "--batch": {"type": int, "help": "samples of the step of --step-time"},
    "--sync": {
        "nargs": "+",
        "default": ["all"],
        "help": f"strategies: {', '.join(STRATEGIES)}; or 'all'",
    },
    "--batch-size": {
        "type": int,
        "help": f"global batch; with --scaling weak that of one node (default: --batch, else "
        f"{DEFAULT_GLOBAL_BATCH_SIZE})",
    },
    "--scaling": {
        "choices": ["strong", "weak"],
        "help": "strong: all nodes share one batch; weak: each node has its own batch (default: "
        "weak with --batch, else strong)",
    },
    **_option_flags(),
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
    from lab.predict.own_model import with_own_model
    from lab.predict.printing import print_rates, print_tables, summarize
    from lab.predict.scaling import most_nodes
    from lab.predict.tables import (
        message_plans,
        predict_table,
        scaling_limits_of,
        typical_latency,
    )
    from lab.units import parse_bucket_mb, parse_latency, parse_parameters, parse_rate

    refuse(
        {
            "--step-time is of your own nodes: add --rate, that of their links, e.g. --rate "
            "10gbit": args.step_time is not None and args.rate is None
        }
    )
    scaling = args.scaling or ("weak" if args.batch else "strong")
    batch_size = args.batch_size or args.batch or DEFAULT_GLOBAL_BATCH_SIZE
    calibration, is_reference = find_calibration(args.calibration)
    calibration = with_own_model(
        calibration,
        model=args.model,
        parameters=parse_parameters(args.parameters),
        step_seconds=parse_latency(args.step_time, "--step-time"),
        batch=args.batch,
    )
    if args.software_gbit is not None:
        refuse(
            {
                f"--software-gbit: got {args.software_gbit}, give more than 0": args.software_gbit
                <= 0
            }
        )
        network = calibration.network
        network = network.faster(1e9 * args.software_gbit / network.software_bits)
        calibration = replace(calibration, network=network)
    names = list(STRATEGIES) if "all" in args.sync else list(dict.fromkeys(args.sync))
    options = {}
    for name, option in strategy_options().items():
        value = getattr(args, name)
        options[name] = parse_bucket_mb(value) if option.auto else value
    rates = [parse_rate(rate) for rate in args.rate or [None]]
    links = [(rate, parse_latency(args.latency) or typical_latency(rate)) for rate in rates]
    plans = message_plans(names, options)
    setting: dict[str, Any] = {"batch_size": batch_size, "scaling": scaling}

    tables = [
        predict_table(args.nodes, *link, plans, calibration=calibration, **setting)
        for link in links
    ]
    summaries = [
        summarize(
            calibration,
            *link,
            is_reference=is_reference,
            own_nodes=args.step_time is not None,
            given=[one for one in ("latency", "software_gbit") if getattr(args, one) is not None],
            **setting,
        )
        for link in links
    ]
    limits = scaling_limits_of(plans, calibration, *links[0], batch_size)
    if args.figure is not None:
        # matplotlib takes a second to import
        from lab.predict.plots import RATES_TO_DRAW, draw_scaling, numbers_to_draw

        nodes = numbers_to_draw(most_nodes(batch_size, scaling=scaling))
        drawn = predict_table(nodes, *links[0], plans, calibration=calibration, **setting)
        by_rate = {
            rate: predict_table(
                [max(args.nodes)], rate, links[0][1], plans, calibration=calibration, **setting
            )
            for rate in RATES_TO_DRAW
        }
        draw_scaling(
            args.figure,
            drawn,
            by_rate,
            asked=(max(args.nodes), links[0][0]),
            scaling=scaling,
            summary=summaries[0],
        )
    if args.json:
        content = {
            "format": 1,
            "about": summaries[0],
            "rows": [
                asdict(step) | {"rate": rate}
                for rate, steps in zip(args.rate or [None], tables, strict=True)
                for step in steps
            ],
            "scaling": [asdict(limit) for limit in limits],
        }
        print(json.dumps(content, indent=1))
    elif len(links) > 1:
        print_rates(summaries, dict(zip(args.rate, tables, strict=True)), scaling=scaling)
    else:
        cores = calibration.cores
        print_tables(summaries[0], tables[0], limits, cores=cores, **setting)
    return 0
