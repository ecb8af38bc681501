"""What ``lab predict`` prints: the source of its numbers, the steps, and the scaling limits.

``summarize`` returns the first lines, ``print_tables`` prints everything; tables.py computes the
numbers.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from lab.predict.calibration_file import QUIET_SHARE, Calibration
from lab.predict.compute_model import LEAST_SAMPLES
from lab.predict.event_model import HEADERS, LARGEST_NODES
from lab.predict.readable import bandwidth_text, bytes_text, duration_text
from lab.predict.scaling import SCALINGS, ScalingLimit, most_nodes
from lab.predict.tables import PredictedStep

_WIDTH, _NARROW = 110, 106


def summarize(
    calibration: Calibration,
    rate: float | None,
    latency: float | None,
    *,
    batch_size: int,
    scaling: str,
    is_reference: bool,
    own_nodes: bool = False,
    given: Sequence[str] = ("latency",),
) -> list[str]:
    """Return what a reader must know first, a line each: calibration, model and batch, network.

    own_nodes : whether the reader gave the time of a step. given : those of "latency" and
    "software_gbit" that the reader gave; other latencies of links with a rate are typical ones.
    """
    source = (
        f"calibrated on {calibration.name}, {calibration.made}"
        f"{', quickly' if calibration.quick else ''}"
    )
    if calibration.others_share > QUIET_SHARE:
        source += (
            f", while other programs used {calibration.others_share:.0%} of its cores (calibrate "
            "again)"
        )
    if own_nodes:
        source = (
            f"a step's time is yours; how it divides into forward, backward and update: {source}"
        )
    elif is_reference:
        source = (
            f"NOT this machine: {source}; this calibration comes with the project. `lab calibrate` "
            "measures your machine"
        )
    software = calibration.network.software_bits
    network = calibration.network.over(rate_bits=rate, latency_seconds=latency)
    ring = network.rate("all_reduce")
    where = "the nodes are those of the calibration"
    if own_nodes:
        where = (
            "messages cost what their links cost; `lab calibrate` on a node of yours measures what "
            "its software adds"
        )
    elif (rate, latency) != (None, None):
        where = "each node is a machine like the calibrated one"
    elif calibration.over_loopback:
        where = "all nodes are ranks on the calibrated machine, over loopback"
    link = (
        f"links of {rate / 1e6:,.0f} Mbit/s ({HEADERS - 1:.0%} headers)"
        if rate is not None
        else "links as measured"
    )
    cap = (
        f"warning: the software passes {software / 1e9:.1f} Gbit/s at most, as "
        f"{'given' if 'software_gbit' in given else 'calibrated'}: faster links change nothing. "
        "--software-gbit sets what it passes on your nodes"
    )
    typical = ""
    if "latency" not in given and rate is not None:
        typical = " (typical; --latency sets it)"
    return [
        source,
        f"{calibration.model}, {sum(calibration.gradient_sizes) / 1e6:.1f} MB of gradients, "
        f"{'global batch' if scaling == 'strong' else 'batch of a node'} {batch_size}; {where}",
        f"network: {link}; all_reduce: {duration_text(ring.alpha_seconds)} a message{typical}, "
        f"{bandwidth_text(ring.beta_seconds_per_byte)}"
        + ("" if own_nodes else f"; summing: {bandwidth_text(network.gamma_seconds_per_byte)}"),
        *([cap] if rate is not None and 2 * rate > software else []),
    ]


def answer(steps: Sequence[PredictedStep], *, scaling: str) -> str:
    """Return what would help most on the largest number of nodes; "" for one node.

    It speaks of ddp, or of the fastest strategy that is there. In weak scaling more nodes also make
    the batch larger, so their gain stands apart.
    """
    most = max(step.nodes for step in steps)
    rows = [one for one in steps if one.nodes == most > 1 and one.sync != "none"]
    if not rows:
        return ""
    step = min(rows, key=lambda one: (one.sync != "ddp", -one.speedup))
    changes = {
        "a network twice as fast": step.gains["network"],
        "compute twice as fast": step.gains["compute"],
    }
    more = ""
    if scaling == "strong":
        changes[f"{2 * most:,} nodes"] = step.gains["nodes"]
    else:
        more = (
            f" {2 * most:,} nodes: {_times(step.gains['nodes'])} times the samples per second, in "
            "global batches twice as large."
        )
    (best, gain), *others = sorted(changes.items(), key=lambda one: -one[1])
    less = " and ".join(f"{name} {_times(value)}" for name, value in others)
    ceiling, seconds = step.gains["no messages"], step.prediction.step_seconds
    return (
        f"What helps {step.sync} on {most:,} nodes most ({duration_text(seconds)} a step): {best}, "
        f"{_times(gain)} times the speed; {less}. "
        f"Without messages: {duration_text(seconds / ceiling)}, {_times(ceiling)} times.{more}"
    )


def _console() -> Console:
    """Return the terminal; a file or a pipe has no width of its own."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def print_tables(
    summary: Sequence[str],
    steps: Sequence[PredictedStep],
    limits: Sequence[ScalingLimit],
    *,
    batch_size: int,
    scaling: str,
    cores: int,
) -> None:
    """Print summary, steps with their notes, and limits, as wide as the terminal permits.

    batch_size : of the limits. scaling : of the steps. cores : of the calibrated machine.
    """
    console = _console()
    narrow = console.width < _NARROW
    notes = dict.fromkeys(
        f"{'none' if step.sync == 'none' else f'{step.nodes} nodes'}: {step.note}"
        for step in steps
        if step.note
    )
    print_lines = partial(console.print, sep="\n", markup=False, soft_wrap=True)
    print_lines(*summary, *filter(None, [answer(steps, scaling=scaling)]))
    console.print(_steps_table(steps, narrow=narrow))
    if notes:
        print_lines(*notes)
    if limits:
        console.print(_scaling_limits_table(limits, narrow=narrow))
        print_lines(*_scaling_limits_text(batch_size))
    else:
        print_lines(
            f"where scaling stops is not shown: ranks of one machine share its {cores} cores. Give "
            "--rate to predict separate machines"
        )


def print_rates(
    summaries: Sequence[Sequence[str]],
    tables: Mapping[str, Sequence[PredictedStep]],
    *,
    scaling: str,
) -> None:
    """Print step and speed-up at each rate, side by side; summaries and tables are by rate."""
    console = _console()
    print_lines = partial(console.print, sep="\n", markup=False, soft_wrap=True)
    print_lines(*dict.fromkeys(line for summary in summaries for line in summary))
    headings = ["\nstrategy", "\nnodes", *(f"{rate}:\nstep (speed up)" for rate in tables)]
    table = _frame(headings, narrow=False)
    for steps in zip(*tables.values(), strict=True):
        shown = (
            f"{duration_text(one.prediction.step_seconds)} ({_times(one.speedup)})" for one in steps
        )
        table.add_row(steps[0].sync, str(steps[0].nodes), *shown)
    console.print(table)
    answers = {rate: answer(steps, scaling=scaling) for rate, steps in tables.items()}
    print_lines(*(f"{rate}: {text}" for rate, text in answers.items() if text))


def _steps_table(steps: Sequence[PredictedStep], *, narrow: bool) -> Table:
    """Return the table of steps; a narrow one fits 80 columns, so that no number is cut."""
    table = _frame(
        [
            "strategy",
            "nodes",
            "step",
            "speed\nup",
            "effi-\nciency",
            "exposed\ncomm.",
            "slowed\nby",
            *([] if narrow else ["rank 0\nsends", "others\nsend"]),
            "2 x\nlink",
            "2 x\ncomp",
            "2 x\nnode",
        ],
        narrow=narrow,
    )
    for step in steps:
        one = step.prediction
        sent = [] if narrow else [one.bytes_sent_root, one.bytes_sent_others]
        table.add_row(
            step.sync,
            str(step.nodes),
            duration_text(one.step_seconds),
            _times(step.speedup),
            _least(step.efficiency, 0.001, ".1%"),
            duration_text(one.sync_seconds),
            duration_text(one.slowed_seconds),
            *map(bytes_text, sent),
            *(_times(step.gains[name]) for name in ("network", "compute", "nodes")),
        )
    return table


def _scaling_limits_table(limits: Sequence[ScalingLimit], *, narrow: bool) -> Table:
    """Return the table of limits, strong and weak scaling side by side."""
    table = _frame(
        [
            "\n\nstrategy",
            "strong:\nstops\nat",
            "\nspeed\nup",
            "\n\nlimited by",
            "weak:\nhalf\nto",
            "\nstops\nat",
            "\nspeed\nup",
            "\n\nlimited by",
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
    return [
        f"strong: {batch_size:,} samples for all nodes together, at least {LEAST_SAMPLES} a node, "
        f"so up to {most_nodes(batch_size, scaling='strong'):,} nodes.",
        f"weak: {batch_size:,} samples for each node, up to {LARGEST_NODES:,} nodes.",
        "stops at: the smallest number of nodes within 10 % of the best speed; never: the last "
        "doubling still",
        "brought more than 10 %. speed up: at that number, over one node. half to: nodes up to "
        "which the",
        "efficiency is at least 50 %. limited by: what most of the communication time is spent on; "
        "compute:",
        "computing itself stops scaling; samples: the batch has no samples for more nodes.",
        "Above 32 nodes every 16th part of a doubling is tried, so numbers of nodes are 4 % apart.",
    ]


def _times(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else _least(value, 0.01, ".2f")


def _least(value: float, least: float, form: str) -> str:
    return f"{value:{form}}" if value >= least else f"<{least:{form}}"
