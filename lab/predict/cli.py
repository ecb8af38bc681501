"""The flags and the handler of ``lab predict``."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.schema import DEFAULT_GLOBAL_BATCH_SIZE, flag
from common.errors import UserError
from common.sync import STRATEGIES, strategy_options
from lab.flags import add_command

if TYPE_CHECKING:  # slow to import, and --help imports this file
    from common.sync.plans.base import MessagePlan
    from lab.predict.calibration_file import Calibration
    from lab.predict.scaling import ScalingLimit
    from lab.predict.tables import PredictedStep


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
    from lab.predict.printing import print_rates, print_tables, summarize
    from lab.predict.tables import message_plans, predict_table, scaling_limits_of

    if args.step_time is not None and args.rate is None:
        raise UserError(
            "--step-time is of your own nodes: add --rate, that of their links, e.g. --rate 10gbit"
        )
    calibration, is_reference = find_calibration(args.calibration)
    calibration = _with_own_nodes(calibration, args)
    plans = message_plans(_wanted_strategies(args.sync), _options(args))
    links = _links(args)
    batch_size = args.batch_size or args.batch or DEFAULT_GLOBAL_BATCH_SIZE
    scaling = args.scaling
    if scaling is None:
        scaling = "weak" if args.batch else "strong"

    summaries = []
    tables = []
    for rate, latency in links:
        summary = summarize(
            calibration,
            rate,
            latency,
            batch_size=batch_size,
            scaling=scaling,
            is_reference=is_reference,
            own_nodes=args.step_time is not None,
            given=[name for name in ("latency", "software_gbit") if vars(args)[name] is not None],
        )
        summaries.append(summary)
        table = predict_table(args.nodes, rate, latency, plans, batch_size, scaling, calibration)
        tables.append(table)
    limits = scaling_limits_of(plans, calibration, *links[0], batch_size)
    if args.figure is not None:
        _draw(args, links[0], plans, batch_size, scaling, calibration, summaries[0])
    if args.json:
        _print_json(args.rate or [None], summaries[0], tables, limits)
    elif len(links) > 1:
        print_rates(summaries, dict(zip(args.rate, tables, strict=True)), scaling=scaling)
    else:
        print_tables(
            summaries[0],
            tables[0],
            limits,
            batch_size=batch_size,
            scaling=scaling,
            cores=calibration.cores,
        )
    return 0


def _with_own_nodes(calibration: "Calibration", args: argparse.Namespace) -> "Calibration":
    """Return the calibration with the model, the step and the software that the flags give."""
    from lab.predict.own_model import with_own_model
    from lab.units import parse_latency, parse_parameters

    calibration = with_own_model(
        calibration,
        model=args.model,
        parameters=parse_parameters(args.parameters),
        step_seconds=parse_latency(args.step_time, "--step-time"),
        batch=args.batch,
    )
    if args.software_gbit is None:
        return calibration
    if args.software_gbit <= 0:
        raise UserError(f"--software-gbit: got {args.software_gbit}, give more than 0")
    network = calibration.network
    faster = network.faster(1e9 * args.software_gbit / network.software_bits)
    return replace(calibration, network=faster)


def _wanted_strategies(names: Sequence[str]) -> list[str]:
    if "all" in names:
        return list(STRATEGIES)
    return list(dict.fromkeys(names))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the strategies' options that the flags give, by name."""
    from lab.predict.variants import parse_bucket_mb

    options = {}
    for name, option in strategy_options().items():
        value = getattr(args, name)
        options[name] = parse_bucket_mb(value) if option.auto else value
    return options


def _links(args: argparse.Namespace) -> list[tuple[float | None, float | None]]:
    """Return bits per second and latency of each --rate; None for what was calibrated."""
    from lab.predict.tables import typical_latency
    from lab.units import parse_latency, parse_rate

    latency = parse_latency(args.latency)
    links = []
    for text in args.rate or [None]:
        rate = parse_rate(text)
        links.append((rate, latency or typical_latency(rate)))
    return links


def _draw(
    args: argparse.Namespace,
    link: tuple[float | None, float | None],
    plans: "Mapping[str, MessagePlan]",
    batch_size: int,
    scaling: str,
    calibration: "Calibration",
    summary: Sequence[str],
) -> None:
    """Draw the steps over nodes on the first link, and over rates with the most nodes asked."""
    # matplotlib takes a second to import
    from lab.predict.plots import RATES_TO_DRAW, draw_scaling, numbers_to_draw
    from lab.predict.scaling import most_nodes
    from lab.predict.tables import predict_table

    rate, latency = link
    most = max(args.nodes)

    def steps(nodes: Sequence[int], rate_bits: float | None) -> "list[PredictedStep]":
        return predict_table(nodes, rate_bits, latency, plans, batch_size, scaling, calibration)

    nodes = numbers_to_draw(most_nodes(batch_size, scaling=scaling))
    by_rate = {rate_bits: steps([most], rate_bits) for rate_bits in RATES_TO_DRAW}
    draw_scaling(
        args.figure,
        steps(nodes, rate),
        by_rate,
        asked=(most, rate),
        scaling=scaling,
        summary=summary,
    )


def _print_json(
    rates: Sequence[str | None],
    summary: Sequence[str],
    tables: "Sequence[Sequence[PredictedStep]]",
    limits: "Sequence[ScalingLimit]",
) -> None:
    rows = []
    for rate, steps in zip(rates, tables, strict=True):
        rows += [asdict(step) | {"rate": rate} for step in steps]
    content = {
        "format": 1,
        "about": summary,
        "rows": rows,
        "scaling": [asdict(limit) for limit in limits],
    }
    print(json.dumps(content, indent=1))
