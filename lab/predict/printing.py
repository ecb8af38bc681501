"""What ``lab predict`` prints: the source of its numbers, the steps, and the scaling limits.

``summarize`` returns the first lines, ``print_tables`` prints everything; tables.py computes the
numbers.
"""

from collections.abc import Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from common.cost_model.calibration_file import QUIET_SHARE, Calibration
from common.cost_model.compute_model import LEAST_SAMPLES
from common.cost_model.event_model import HEADERS, LARGEST_NODES
from lab.predict.scaling import SCALINGS, ScalingLimit, most_nodes
from lab.predict.tables import PredictedStep

_WIDTH, _NARROW = 100, 92


def summarize(
    calibration: Calibration,
    rate: float | None,
    latency: float | None,
    *,
    batch_size: int,
    scaling: str,
    is_reference: bool,
) -> list[str]:
    """Return what a reader must know first, a line each: calibration, model and batch, network."""
    source = (
        f"calibrated on {calibration.name}, {calibration.made}"
        f"{', quickly' if calibration.quick else ''}"
    )
    if calibration.others_share > QUIET_SHARE:
        source += (
            f", while others took {calibration.others_share:.0%} of its cores (calibrate again)"
        )
    if is_reference:
        source = (
            f"NOT this machine: {source}, comes with the project. `lab calibrate` measures this one"
        )
    network = calibration.network.over(rate_bits=rate, latency_seconds=latency)
    ring = network.rate("all_reduce")
    where = "the nodes of the calibration"
    if (rate, latency) != (None, None):
        where = "each node a machine like that one"
    elif calibration.over_loopback:
        where = "all nodes ranks of that one machine, over loopback"
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
        f"{ring.beta_seconds_per_byte * 1e9:.3g} ns a byte; summing "
        f"{network.gamma_seconds_per_byte * 1e9:.2g} ns a byte",
    ]


def print_tables(
    summary: Sequence[str],
    steps: Sequence[PredictedStep],
    limits: Sequence[ScalingLimit],
    *,
    batch_size: int,
    cores: int,
) -> None:
    """Print summary, steps with their notes, and limits, as wide as the terminal permits.

    batch_size : of the limits. cores : of the calibrated machine.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)  # a file or a pipe has no width of its own
    narrow = console.width < _NARROW
    notes = dict.fromkeys(
        f"{'none' if step.sync == 'none' else f'{step.nodes} nodes'}: {step.note}"
        for step in steps
        if step.note and step.prediction
    )
    print_lines = partial(console.print, sep="\n", markup=False, soft_wrap=True)
    print_lines(*summary)
    console.print(_steps_table(steps, narrow=narrow))
    if notes:
        print_lines(*notes)
    if limits:
        console.print(_scaling_limits_table(limits, narrow=narrow))
        print_lines(*_scaling_limits_text(batch_size))
    else:
        print_lines(
            f"where scaling stops: ranks of one machine end with its {cores} cores; give --rate "
            "for nodes"
        )


def _steps_table(steps: Sequence[PredictedStep], *, narrow: bool) -> Table:
    """Return the table of steps; a narrow one fits 80 columns, so that no number is cut."""
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
    for step in steps:
        one = step.prediction
        if one is None or step.speedup is None or step.efficiency is None:
            table.add_row(step.sync, str(step.nodes), *["-"] * (len(table.columns) - 3), step.note)
            continue
        sent = [one.bytes_sent_root] if narrow else [one.bytes_sent_root, one.bytes_sent_others]
        table.add_row(
            step.sync,
            str(step.nodes),
            _seconds(one.step_seconds),
            _times(step.speedup),
            _least(step.efficiency, 0.001, ".1%"),
            _seconds(one.sync_seconds),
            *map(_bytes, sent),
            one.bound,
        )
    return table


def _scaling_limits_table(limits: Sequence[ScalingLimit], *, narrow: bool) -> Table:
    """Return the table of limits, strong and weak scaling side by side."""
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
    strong, weak = ([limit for limit in limits if limit.scaling == scaling] for scaling in SCALINGS)
    for one, other in zip(strong, weak, strict=True):  # the same strategies in the same order
        table.add_row(
            one.sync,
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
    columns = (
        Column(
            heading,
            justify="left" if heading.endswith(("strategy", " by")) else "right",
            no_wrap=True,
        )
        for heading in headings
    )
    return Table(
        *columns,
        box=SIMPLE_HEAD,
        padding=0 if narrow else (0, 1, 0, 0),
        pad_edge=False,
        show_edge=not narrow,
    )


def _scaling_limits_text(batch_size: int) -> list[str]:
    """Return lines that explain the headings of ``_scaling_limits_table``."""
    limit = most_nodes(batch_size, scaling="strong")
    return [
        f"strong: {batch_size:,} samples for all nodes together, at least {LEAST_SAMPLES} "
        f"each, so up to {limit:,}; weak: {batch_size:,} samples a node, up to {LARGEST_NODES:,}.",
        "stops at: more nodes, however many, bring less than a tenth more samples a second; "
        "never: the last doubling brought",
        "more. speed up: there, over one node. half to: nodes of which each still does half of "
        "what one alone does.",
        "held by: what takes the most of the messages; compute: computing alone goes no "
        "further; samples: the batch ends.",
    ]


def _times(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else _least(value, 0.01, ".2f")


def _least(value: float, least: float, form: str) -> str:
    return f"{value:{form}}" if value >= least else f"<{least:{form}}"


def _seconds(value: float) -> str:
    if value >= 3600:
        return f"{value / 3600:.3g} h"
    if value >= 1:
        return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms"


def _bytes(value: float) -> str:
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    large = (f"{value / size:.3g} {unit}" for unit, size in units if value >= size)
    return next(large, f"{value:.0f} B")
