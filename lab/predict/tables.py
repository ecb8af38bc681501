"""``lab predict``: the tables for nodes nobody has, from a calibration, in a moment: no torch is imported.

``predict_table`` has the steps on given numbers of nodes, ``scaling_limits_of`` how far each strategy scales at all.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.cost_model.calibration_file import QUIET_SHARE, Calibration, find_calibration
from common.cost_model.compute_model import LEAST_SAMPLES, StepCompute, local_samples
from common.cost_model.event_model import (
    HEADERS,
    LARGEST_NODES,
    MessagePlan,
    Network,
    Prediction,
    predict_step,
)
from common.errors import UserError
from common.sync import STRATEGIES
from lab.predict.scaling import SCALINGS, ScalingLimit, most_nodes, scaling_limits
from lab.predict.torchless import plans
from lab.units import parse_latency, parse_rate

_WIDTH, _NARROW = 100, 92
_OPTIONS = ("bucket_mb", "topk_ratio", "powersgd_rank", "averaging_period")


@dataclass(frozen=True)
class PredictedStep:
    """One strategy on so many nodes; ``prediction`` None where the strategy has no formula, ``speedup`` over one node (of a
    weak scaling: of the samples a second), ``efficiency`` = speedup / nodes; ``note`` where it holds only with a word."""

    sync: str
    nodes: int
    prediction: Prediction | None
    speedup: float | None
    efficiency: float | None
    note: str = ""


def network_of(
    calibration: Calibration, rate_bits: float | None, latency_seconds: float | None
) -> Network:
    """Return the network to predict for: the calibration's, or other links under the same software."""
    return calibration.network.over(rate_bits=rate_bits, latency_seconds=latency_seconds)


def compute_of(
    calibration: Calibration, nodes: int, *, batch_size: int, scaling: str, own_machines: bool
) -> StepCompute:
    """Return a rank's step among ``nodes``: each on a machine of its own, or all on the one that was calibrated."""
    here = (
        1
        if own_machines
        else nodes
        if calibration.over_loopback
        else min(nodes, calibration.ranks_here)
    )
    return calibration.compute.at(
        local_samples(batch_size, nodes, scaling=scaling), ranks_here=here
    )


def predict_table(
    nodes: Sequence[int],
    rate_bits: float | None,
    latency_seconds: float | None,
    strategies: Mapping[str, MessagePlan],
    batch_size: int,
    scaling: str,
    calibration: Calibration,
) -> list[PredictedStep]:
    """Return a row for each number of nodes and each strategy.

    strategies : by name, from ``lab.predict.torchless.plans``. Without rate and latency the ranks
    stand where the calibration's did: those of one over loopback share its machine. Raises UserError
    on values out of range.
    """
    for count in nodes:
        if not 1 <= count <= LARGEST_NODES:
            raise UserError(f"--nodes: got {count}, give 1 to {LARGEST_NODES:,}")
    if scaling not in SCALINGS:
        raise UserError(f"--scaling: got {scaling!r}, choose {' or '.join(SCALINGS)}")
    if batch_size < LEAST_SAMPLES:
        raise UserError(f"--batch-size: got {batch_size}, give {LEAST_SAMPLES} or more")
    own_machines = rate_bits is not None or latency_seconds is not None
    network = network_of(calibration, rate_bits, latency_seconds)
    alone = compute_of(
        calibration, 1, batch_size=batch_size, scaling=scaling, own_machines=own_machines
    ).seconds
    rows = []
    for count in nodes:
        compute = compute_of(
            calibration, count, batch_size=batch_size, scaling=scaling, own_machines=own_machines
        )
        note = _note(
            calibration, count, batch_size=batch_size, scaling=scaling, own_machines=own_machines
        )
        for name, strategy in strategies.items():
            rows.append(
                _row(
                    name,
                    strategy,
                    count,
                    calibration,
                    network,
                    compute,
                    alone,
                    scaling=scaling,
                    note=note,
                )
            )
    return rows


def scaling_limits_of(
    strategies: Mapping[str, MessagePlan],
    calibration: Calibration,
    rate_bits: float | None,
    latency_seconds: float | None,
    batch_size: int,
) -> list[ScalingLimit]:
    """Return how far each strategy scales with a global batch of that size, then with one a node.

    Empty without rate and latency for a calibration over loopback: the ranks of one machine end with its cores.
    """
    own_machines = rate_bits is not None or latency_seconds is not None
    if not own_machines and calibration.over_loopback:
        return []
    network = network_of(calibration, rate_bits, latency_seconds)
    return [
        stop
        for scaling in SCALINGS
        for stop in scaling_limits(
            strategies,
            calibration.gradients,
            network=network,
            batch_size=batch_size,
            scaling=scaling,
            compute_at=partial(
                compute_of,
                calibration,
                batch_size=batch_size,
                scaling=scaling,
                own_machines=own_machines,
            ),
        )
    ]


def _row(
    name: str,
    strategy: MessagePlan,
    nodes: int,
    calibration: Calibration,
    network: Network,
    compute: StepCompute,
    alone: float,
    *,
    scaling: str,
    note: str,
) -> PredictedStep:
    if name == "none" and nodes > 1:
        note = "no exchange: each node trains a model of its own"
    try:
        prediction = predict_step(
            strategy, calibration.gradients, nodes, network=network, compute=compute
        )
    except NotImplementedError:
        return PredictedStep(name, nodes, None, None, None, "no formula")
    ratio = alone / prediction.step_seconds
    speedup = nodes * ratio if scaling == "weak" else ratio
    return PredictedStep(name, nodes, prediction, speedup, speedup / nodes, note)


def _note(
    calibration: Calibration, nodes: int, *, batch_size: int, scaling: str, own_machines: bool
) -> str:
    if scaling == "strong" and nodes * LEAST_SAMPLES > batch_size:
        return f"global batch {nodes * LEAST_SAMPLES:,}: BatchNorm needs two samples a node"
    if not own_machines and calibration.over_loopback and nodes > calibration.cores:
        return f"{nodes} ranks share {calibration.cores} cores: beyond what was measured"
    return ""


def main_predict(args: argparse.Namespace) -> int:
    """Print the tables, or JSON; draw the figure; return the exit status. Raises UserError on wrong values.

    ``args`` : nodes (list of int), sync (list of names, or ["all"]), rate, latency (text or None), batch_size, scaling,
    calibration (Path or None), json, figure (Path or None); and, where given, the strategies' options ``_OPTIONS``.
    """
    calibration, is_reference = find_calibration(args.calibration)
    names = list(STRATEGIES) if "all" in args.sync else list(dict.fromkeys(args.sync))
    options = {name: value for name in _OPTIONS if (value := getattr(args, name, None)) is not None}
    rate, latency = parse_rate(args.rate), parse_latency(args.latency)
    strategies = plans(names, options)
    rows = predict_table(
        args.nodes, rate, latency, strategies, args.batch_size, args.scaling, calibration
    )
    ends = scaling_limits_of(strategies, calibration, rate, latency, args.batch_size)
    summary = _summary(
        calibration,
        rate,
        latency,
        batch_size=args.batch_size,
        scaling=args.scaling,
        is_reference=is_reference,
    )
    if args.figure is not None:
        _draw(
            args.figure,
            strategies,
            calibration,
            rate,
            latency,
            summary,
            batch_size=args.batch_size,
            scaling=args.scaling,
        )
    if args.json:
        print(
            json.dumps(
                {
                    "format": 1,
                    "about": summary,
                    "rows": [asdict(row) for row in rows],
                    "scaling": [asdict(end) for end in ends],
                },
                indent=1,
            )
        )
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)  # a file or a pipe has no width of its own
    for line in summary:
        console.print(line, markup=False, soft_wrap=True)
    console.print(_table(rows, narrow=console.width < _NARROW))
    for note in dict.fromkeys(
        f"{'none' if row.sync == 'none' else f'{row.nodes} nodes'}: {row.note}"
        for row in rows
        if row.note and row.prediction
    ):
        console.print(note, markup=False, soft_wrap=True)
    _print_scaling_limits(console, ends, batch_size=args.batch_size, cores=calibration.cores)
    return 0


def _print_scaling_limits(
    console: Console, ends: Sequence[ScalingLimit], *, batch_size: int, cores: int
) -> None:
    if ends:
        console.print(_scaling_limits_table(ends, narrow=console.width < _NARROW))
    for line in (
        _scaling_limits_text(batch_size)
        if ends
        else [
            f"where scaling stops: ranks of one machine end with its {cores} cores; give --rate for nodes"
        ]
    ):
        console.print(line, markup=False, soft_wrap=True)


def _draw(
    path: Path,
    strategies: Mapping[str, MessagePlan],
    calibration: Calibration,
    rate: float | None,
    latency: float | None,
    summary: Sequence[str],
    *,
    batch_size: int,
    scaling: str,
) -> None:
    """Draw the steps from one node to as many as the batch allows."""
    from lab.predict.plots import (  # matplotlib takes a second to import
        draw_scaling,
        numbers_to_draw,
    )

    numbers = numbers_to_draw(most_nodes(batch_size, scaling=scaling))
    rows = predict_table(numbers, rate, latency, strategies, batch_size, scaling, calibration)
    draw_scaling(path, [row for row in rows if row.prediction], scaling=scaling, summary=summary)


def _summary(
    calibration: Calibration,
    rate: float | None,
    latency: float | None,
    *,
    batch_size: int,
    scaling: str,
    is_reference: bool,
) -> list[str]:
    """What a reader must know before the numbers."""
    source = f"calibrated on {calibration.name}, {calibration.made}" + (
        ", quickly" if calibration.quick else ""
    )
    if calibration.others_share > QUIET_SHARE:
        source += (
            f", while others took {calibration.others_share:.0%} of its cores (calibrate again)"
        )
    if is_reference:
        source = (
            f"NOT this machine: {source}, comes with the project. `lab calibrate` measures this one"
        )
    network = network_of(calibration, rate, latency)
    ring = network.rate("all_reduce")
    where = (
        "each node a machine like that one"
        if rate is not None or latency is not None
        else (
            "all nodes ranks of that one machine, over loopback"
            if calibration.over_loopback
            else "the nodes of the calibration"
        )
    )
    link = (
        f"{rate / 1e6:,.0f} Mbit/s and {HEADERS - 1:.0%} of headers"
        if rate is not None
        else "bandwidth as measured"
    )
    return [
        source,
        f"{calibration.model}, {sum(calibration.gradients) / 1e6:.1f} MB of gradients, "
        f"{'global batch' if scaling == 'strong' else 'batch a node'} {batch_size}; {where}",
        f"network: {link}, {ring.alpha_seconds * 1e3:.3g} ms a message (all_reduce), "
        f"{ring.beta_seconds_per_byte * 1e9:.3g} ns a byte; summing {network.gamma_seconds_per_byte * 1e9:.2g} ns a byte",
    ]


def _table(rows: Sequence[PredictedStep], *, narrow: bool) -> Table:
    """Narrow: within 80 columns, so that no number is cut."""
    table = _frame(
        [
            "strategy",
            "nodes",
            "step",
            "speed\nup",
            "effi-\nciency",
            "exposed\nsync",
            "root\nsends",
            *([] if narrow else ["others\nsend"]),
            "bound by",
        ],
        narrow=narrow,
    )
    for row in rows:
        one = row.prediction
        if one is None:
            table.add_row(row.sync, str(row.nodes), *["-"] * (len(table.columns) - 3), row.note)
            continue
        sent = [one.bytes_sent_root] if narrow else [one.bytes_sent_root, one.bytes_sent_others]
        table.add_row(
            row.sync,
            str(row.nodes),
            _seconds(one.step_seconds),
            _times(row.speedup),
            _least(row.efficiency, 0.001, ".1%"),
            _seconds(one.sync_seconds),
            *map(_bytes, sent),
            one.bound,
        )
    return table


def _scaling_limits_table(ends: Sequence[ScalingLimit], *, narrow: bool) -> Table:
    """Strong and weak scaling side by side."""
    table = _frame(
        [
            "\n\nstrategy",
            "strong:\nstops\nat",
            "\nspeed\nup",
            "\n\nheld by",
            "weak:\nhalf\nto",
            "\nstops\nat",
            "\nspeed\nup",
            "\n\nheld by",
        ],
        narrow=narrow,
    )
    strong, weak = (
        {end.sync: end for end in ends if end.scaling == scaling} for scaling in SCALINGS
    )
    for name, one in strong.items():
        other = weak[name]
        table.add_row(
            name,
            f"{one.nodes or one.limit:,}",
            _times(one.speedup),
            one.held_by or "-",
            "all" if other.half_nodes == other.limit else f"{other.half_nodes:,}",
            f"{other.nodes:,}" if other.nodes else "never",
            _times(other.speedup),
            other.held_by or "-",
        )
    return table


def _frame(headings: Sequence[str], *, narrow: bool) -> Table:
    table = Table(
        box=SIMPLE_HEAD, padding=0 if narrow else (0, 1, 0, 0), pad_edge=False, show_edge=not narrow
    )
    for heading in headings:
        table.add_column(
            heading,
            justify="left" if heading.endswith(("strategy", " by")) else "right",
            no_wrap=True,
        )
    return table


def _scaling_limits_text(batch_size: int) -> list[str]:
    """What the words of ``_scaling_limits_table`` mean."""
    limit = most_nodes(batch_size, scaling="strong")
    return [
        f"strong: {batch_size:,} samples for all nodes together, at least {LEAST_SAMPLES} each, so up to {limit:,}; weak: "
        f"{batch_size:,} samples a node, up to {LARGEST_NODES:,}.",
        "stops at: more nodes, however many, bring less than a tenth more samples a second; never: the last doubling brought",
        "more. speed up: there, over one node. half to: nodes of which each still does half of what one alone does.",
        "held by: what takes the most of the messages; compute: computing alone goes no further; samples: the batch ends.",
    ]


def _times(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else _least(value, 0.01, ".2f")
    )


def _least(value: float, least: float, form: str) -> str:
    return f"{value:{form}}" if value >= least else f"<{least:{form}}"


def _seconds(value: float) -> str:
    if value >= 1:
        return (
            f"{value / 3600:.3g} h"
            if value >= 3600
            else f"{value:.0f} s"
            if value >= 100
            else f"{value:.3g} s"
        )
    return f"{value * 1e3:.3g} ms"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
