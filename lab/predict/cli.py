"""The flags and the handler of ``lab predict``."""

import argparse
import json
import math
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
    from lab.predict.cluster import TypicalCluster
    from lab.predict.observed import ClusterFit
    from lab.predict.scaling import ScalingLimit
    from lab.predict.scenario import Scenario
    from lab.predict.tables import PredictedStep


TRANSPORTS = ["tcp", "tcp-vm", "tcp-server", "rdma", "rdma-host", "rdma-gpudirect"]
MOST_ADAPTERS = 64
GRADIENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


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
    "--backend": {
        "choices": ["gloo", "nccl"],
        "help": "software that sends (default: nccl with --step-time, else gloo)",
    },
    "--transport": {
        "choices": TRANSPORTS,
        "help": "how it sends: tcp, or rdma for InfiniBand, RoCE and EFA; with the generation of "
        "the nodes, or the likelier one for their --rate, which is printed (default: tcp)",
    },
    "--adapters": {
        "type": int,
        "metavar": "N",
        "help": "network adapters of a node, which share its --rate (default: one; through the "
        "host's memory one for 100 Gbit/s)",
    },
    "--rate-inside": {
        "metavar": "RATE",
        "help": "bandwidth between two ranks of a node (default: as calibrated over loopback; with "
        "--step-time a typical one, which is printed)",
    },
    "--software-gbit": {
        "type": float,
        "metavar": "GBIT",
        "help": "Gbit/s that the nodes' software passes at most (default: as calibrated; with "
        "--step-time no limit)",
    },
    "--model": {
        "help": "a model of this project, or a common one, e.g. bert_base, with --step-time of one "
        "of your nodes"
    },
    "--parameters": {
        "metavar": "N",
        "help": "size of your own model, e.g. 25.6M or 25600000, instead of --model",
    },
    "--step-time": {
        "help": "time of a step on one of your nodes, e.g. 120ms, with --batch samples; with "
        "--ranks-per-node that of a rank"
    },
    "--node-step-time": {
        "metavar": "TIME",
        "help": "the same step on one node where all its ranks compute, e.g. 130ms, with "
        "--ranks-per-node (default: a typical loss)",
    },
    "--optimizer": {
        "choices": ["sgd", "momentum", "adam", "lamb"],
        "help": "whose update a step contains; momentum is SGD's (default: the model's usual one)",
    },
    "--batch": {"type": int, "help": "samples of the step of --step-time"},
    "--gradient-type": {
        "choices": [*GRADIENT_BYTES],
        "help": "type of the gradients, and of weights that a strategy sends (default: the "
        "model's, fp32); compute times stay as they are",
    },
    "--accumulation-steps": {
        "type": int,
        "metavar": "A",
        "default": 1,
        "help": "micro-batches of a step, whose gradients are exchanged once; --step-time and "
        "--batch are of one micro-batch, --batch-size is of all of them",
    },
    "--sync": {
        "nargs": "+",
        "default": ["all"],
        "help": f"strategies: {', '.join(STRATEGIES)}; or 'all'",
    },
    "--batch-size": {
        "type": int,
        "help": "global batch; with --scaling weak that of one node (default: --batch, times "
        f"--accumulation-steps, else {DEFAULT_GLOBAL_BATCH_SIZE})",
    },
    "--scaling": {
        "choices": ["strong", "weak"],
        "help": "strong: all ranks share one batch; weak: each rank has its own batch (default: "
        "weak with --batch, else strong)",
    },
    **_option_flags(),
    "--ranks-per-node": {
        "type": int,
        "metavar": "K",
        "default": 1,
        "help": "ranks on each node, which share its link",
    },
    "--sync-batchnorm": {
        "choices": ["off", "on"],
        "default": "off",
        "help": "on: BatchNorm layers normalise over all ranks, and wait for two messages each",
    },
    "--calibration": {
        "type": Path,
        "help": "a file written by lab calibrate (default: this machine's, or else the one that "
        "comes with the project)",
    },
    "--fit": {
        "type": Path,
        "nargs": "+",
        "metavar": "FILE",
        "help": "steps that you measured on such nodes: a table (.csv) with the columns nodes, "
        "strategy, global_batch, step_seconds, perhaps ranks_per_node and rate, or folders of runs",
    },
    "--links": {
        "type": Path,
        "metavar": "FILE",
        "help": "what your links pass: the output of nccl-tests (all_reduce_perf), of Gloo's "
        "benchmark (allreduce_ring_chunked) or of iperf3 (text or --json) on two nodes or more",
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
    from lab.predict.printing import summarize
    from lab.predict.tables import message_plans

    if args.step_time is not None and args.rate is None:
        raise UserError(
            "--step-time is of your own nodes: add --rate, that of their links, e.g. --rate 10gbit"
        )
    calibration, is_reference = find_calibration(args.calibration)
    calibration = _with_own_nodes(calibration, args)
    calibrated = args.calibration is not None or not is_reference
    scenarios = _scenarios(calibration, args, calibrated=calibrated)
    links = None
    if args.links is not None:
        links = _links(scenarios, args)
        scenarios = [scenarios[0].with_beliefs(links.beliefs)]
    fitted = None
    if args.fit is not None:
        fitted = _fit(scenarios[0], args)
        scenarios = [scenario.with_beliefs(fitted.beliefs) for scenario in scenarios]
    options = _options(args) | scenarios[0].plan_options
    plans = message_plans(_wanted_strategies(args.sync), options)
    given = [] if args.latency is None else ["latency"]
    summaries = [
        summarize(scenario, is_reference=is_reference, given=given) for scenario in scenarios
    ]
    measured: dict[str, Any] = {}
    for name, found in (("links", links), ("fit", fitted)):
        if found is not None:
            measured[name] = found
            summaries[0] += found.lines()
    _show(args, plans, scenarios, summaries, measured)
    return 0


def _show(
    args: argparse.Namespace,
    plans: "Mapping[str, MessagePlan]",
    scenarios: "Sequence[Scenario]",
    summaries: Sequence[Sequence[str]],
    measured: "Mapping[str, ClusterFit]",
) -> None:
    """Print the predictions of each scenario as the flags ask, and draw the figure."""
    from lab.predict.printing import print_rates, print_tables
    from lab.predict.tables import predict_table, scaling_limits_of

    first = scenarios[0]
    tables = [predict_table(args.nodes, plans, scenario) for scenario in scenarios]
    if args.figure is not None:
        _draw(args, plans, first, summaries[0])
    if len(scenarios) > 1 and not args.json:
        print_rates(summaries, dict(zip(args.rate, tables, strict=True)), scenarios)
        return
    limits = scaling_limits_of(plans, first)
    if args.json:
        _print_json(args.rate or [None], summaries[0], tables, limits, first, measured)
    else:
        print_tables(summaries[0], tables[0], limits, first)


def _links(scenarios: "Sequence[Scenario]", args: argparse.Namespace) -> "ClusterFit":
    """Return what a benchmark says about the links of the only scenario."""
    from lab.predict.link_files import fit_links, read_links

    if len(scenarios) > 1 or scenarios[0].cluster is None:
        raise UserError("--links: give the one --rate of these links, e.g. --rate 10gbit")
    if args.software_gbit is not None:
        raise UserError("--links: it says what --software-gbit says: leave one of them out")
    return fit_links(read_links(args.links), scenarios[0])


def _fit(scenario: "Scenario", args: argparse.Namespace) -> "ClusterFit":
    """Return what the reader's own measured steps say about the scenario's cluster."""
    from lab.predict.observed import fit_to, read_observed

    if scenario.cluster is None:
        raise UserError("--fit: add --rate, that of the nodes' links, e.g. --rate 10gbit")
    steps = read_observed(args.fit)
    if len(args.rate) > 1 and any(step.rate_bits is None for step in steps):
        raise UserError(
            "--fit: several rates are given: give one --rate, or a column rate in the table"
        )
    return fit_to(steps, scenario, _options(args))


def _with_own_nodes(calibration: "Calibration", args: argparse.Namespace) -> "Calibration":
    """Return the calibration with the model, the step and the software that the flags give."""
    from lab.predict.own_model import with_gradient_bytes, with_own_model
    from lab.units import parse_latency, parse_parameters

    calibration = with_own_model(
        calibration,
        model=args.model,
        parameters=parse_parameters(args.parameters),
        step_seconds=parse_latency(args.step_time, "--step-time"),
        batch=args.batch,
    )
    if args.gradient_type is not None:
        calibration = with_gradient_bytes(calibration, GRADIENT_BYTES[args.gradient_type])
    if args.software_gbit is None:
        return calibration
    if not 0 < args.software_gbit < math.inf:
        raise UserError(f"--software-gbit: got {args.software_gbit}, give more than 0")
    network = calibration.network
    faster = network.faster(1e9 * args.software_gbit / network.software_bits)
    return replace(calibration, network=faster)


def _cluster(
    args: argparse.Namespace, rate_bits: float | None, *, calibrated: bool
) -> "TypicalCluster | None":
    """Return what nodes with links of that rate cost, unless a calibration says that.

    calibrated : the calibration is the reader's own.
    """
    of_links = (args.backend, args.transport, args.adapters)
    chosen = any(value is not None for value in of_links)
    if rate_bits is None:
        if chosen:
            raise UserError(
                "--backend, --transport and --adapters are of links: add --rate, theirs"
            )
        return None
    own_steps = args.step_time is not None or args.fit is not None or args.links is not None
    if calibrated and not chosen and not own_steps:
        return None
    return _typical_cluster(args, rate_bits)


def _typical_cluster(args: argparse.Namespace, rate_bits: float) -> "TypicalCluster":
    """Return the kind of cluster that the flags describe, with links of that rate."""
    from lab.predict.cluster import TypicalCluster

    backend = args.backend or ("gloo" if args.step_time is None else "nccl")
    if args.adapters is not None and not 1 <= args.adapters <= MOST_ADAPTERS:
        raise UserError(f"--adapters: got {args.adapters}, give 1 to {MOST_ADAPTERS}")
    cluster = TypicalCluster.of(
        backend, args.transport or "tcp", rate_bits=rate_bits, adapters=args.adapters
    )
    if args.software_gbit is not None:
        cluster = replace(cluster, software_bits=1e9 * args.software_gbit)
    if args.adapters is not None and (args.software_gbit is not None or cluster.passes_all):
        raise UserError(
            f"--adapters {args.adapters}: it multiplies what an adapter's software passes, but "
            "--software-gbit is of the node, and with GPUDirect a node passes what its links pass. "
            "Leave it out"
        )
    return cluster


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
    return options | {"accumulation_steps": args.accumulation_steps}


def _scenarios(
    calibration: "Calibration", args: argparse.Namespace, *, calibrated: bool
) -> "list[Scenario]":
    """Return what is predicted: a scenario for each --rate, or one with the calibrated links."""
    from lab.predict.cluster import typical_latency
    from lab.predict.compute_model import OPTIMIZERS
    from lab.predict.own_model import usual_optimizer
    from lab.predict.scenario import Scenario
    from lab.units import parse_latency, parse_rate

    scaling = args.scaling
    if scaling is None:
        scaling = "weak" if args.batch else "strong"
    batch_size = args.batch_size
    if batch_size is None:
        batch_size = DEFAULT_GLOBAL_BATCH_SIZE
        if args.batch is not None:
            batch_size = args.batch * args.accumulation_steps
    latency = parse_latency(args.latency)
    scenarios = []
    for text in args.rate or [None]:
        rate = parse_rate(text)
        cluster = _cluster(args, rate, calibrated=calibrated)
        seconds = latency
        if rate is not None and latency is None and cluster is None:
            seconds = typical_latency(rate)
        scenario = Scenario(
            calibration=calibration,
            batch_size=batch_size,
            scaling=scaling,
            rate_bits=rate,
            latency_seconds=seconds,
            ranks_per_node=args.ranks_per_node,
            inside_bits=parse_rate(args.rate_inside, "--rate-inside"),
            own_nodes=args.step_time is not None,
            cluster=cluster,
            step_seconds=parse_latency(args.step_time, "--step-time"),
            step_samples=args.batch,
            node_step_seconds=parse_latency(args.node_step_time, "--node-step-time"),
            accumulation_steps=args.accumulation_steps,
            gradient_type=None if args.gradient_type == "fp32" else args.gradient_type,
            sync_batchnorm=args.sync_batchnorm == "on",
            update_bytes=OPTIMIZERS[args.optimizer or usual_optimizer(args.model)],
        )
        scenarios.append(scenario)
    return scenarios


def _draw(
    args: argparse.Namespace,
    plans: "Mapping[str, MessagePlan]",
    scenario: "Scenario",
    summary: Sequence[str],
) -> None:
    """Draw the steps over nodes on the scenario's link, and over rates with the most nodes."""
    # matplotlib takes a second to import
    from lab.predict.plots import RATES_TO_DRAW, draw_scaling, numbers_to_draw
    from lab.predict.scaling import most_nodes
    from lab.predict.tables import predict_table

    most = max(args.nodes)
    by_rate = {}
    for rate_bits in RATES_TO_DRAW:
        on_links = replace(scenario, rate_bits=rate_bits)
        by_rate[rate_bits] = predict_table([most], plans, on_links)
    limit = most_nodes(
        scenario.batch_size,
        scaling=scenario.scaling,
        ranks_per_node=scenario.ranks_per_node,
        least_samples=scenario.least_samples,
    )
    draw_scaling(
        args.figure,
        predict_table(numbers_to_draw(limit), plans, scenario),
        by_rate,
        asked=(most, scenario.rate_bits),
        scaling=scenario.scaling,
        summary=summary,
    )


def _print_json(
    rates: Sequence[str | None],
    summary: Sequence[str],
    tables: "Sequence[Sequence[PredictedStep]]",
    limits: "Sequence[ScalingLimit]",
    scenario: "Scenario",
    measured: "Mapping[str, ClusterFit]",
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
    if scenario.gradient_type is not None:
        content["gradient_type"] = scenario.gradient_type
    if scenario.accumulation_steps > 1:
        content["accumulation_steps"] = scenario.accumulation_steps
    for name, found in measured.items():
        content[name] = found.as_json()
    print(json.dumps(content, indent=1))
