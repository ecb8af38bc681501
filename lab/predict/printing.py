"""What ``lab predict`` prints: the source of its numbers, the steps, and the scaling limits.

``summarize`` returns the first lines, ``print_tables`` prints everything; tables.py computes the
numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.errors import count
from lab.predict.calibration_file import QUIET_SHARE, Calibration
from lab.predict.event_model import HEADERS, LARGEST_NODES
from lab.predict.readable import bandwidth_text, bytes_text, duration_text
from lab.predict.scaling import ScalingLimit, most_nodes
from lab.predict.scenario import Scenario
from lab.predict.tables import PredictedStep

_WIDTH = 110  # of a file or a pipe
_NARROW = 106


def summarize(
    scenario: Scenario, *, is_reference: bool, given: Sequence[str] = ("latency",)
) -> list[str]:
    """Return what a reader must know first, a line each: calibration, model and batch, network.

    given : those of "latency" and "software_gbit" that the reader gave; other latencies of links
    with a rate are typical ones.
    """
    calibration = scenario.calibration
    sizes_mb = sum(calibration.gradient_sizes) / 1e6
    gradients = f"{sizes_mb:.1f} MB of gradients"
    if scenario.gradient_type is not None:
        gradients += f" in {scenario.gradient_type}"
    batch = f"global batch {scenario.batch_size}"
    if scenario.scaling == "weak":
        batch = f"batch of a {_owner(scenario)} {scenario.batch_size}"
    if scenario.accumulation_steps > 1:
        batch += f" in {scenario.accumulation_steps} micro-batches"
    lines = [
        _source_text(calibration, is_reference=is_reference, own_nodes=scenario.own_nodes),
        f"{calibration.model}, {gradients}, {batch}; {_nodes_text(scenario)}",
        _network_text(scenario, typical=scenario.rate_bits is not None and "latency" not in given),
    ]
    if scenario.ranks_per_node > 1:
        lines.append(_inside_text(scenario))
    if scenario.sync_batchnorm:
        lines.append(_batchnorm_text(scenario))
    software = calibration.network.software_bits
    if scenario.rate_bits is not None and 2 * scenario.rate_bits > software:
        origin = "given" if "software_gbit" in given else "calibrated"
        lines.append(
            f"warning: the software passes {software / 1e9:.1f} Gbit/s at most, as {origin}: "
            "faster links change nothing. --software-gbit sets what it passes on your nodes"
        )
    return lines


def _owner(scenario: Scenario) -> str:
    """Return what has a batch of its own in weak scaling."""
    return "node" if scenario.ranks_per_node == 1 else "rank"


def _source_text(calibration: Calibration, *, is_reference: bool, own_nodes: bool) -> str:
    """Return where the times of computing come from."""
    source = f"calibrated on {calibration.name}, {calibration.made}"
    if calibration.quick:
        source += ", quickly"
    if calibration.others_share > QUIET_SHARE:
        source += (
            f", while other programs used {calibration.others_share:.0%} of its cores (calibrate "
            "again)"
        )
    if own_nodes:
        return f"a step's time is yours; how it divides into forward, backward and update: {source}"
    if is_reference:
        return (
            f"NOT this machine: {source}; this calibration comes with the project. `lab calibrate` "
            "measures your machine"
        )
    return source


def _nodes_text(scenario: Scenario) -> str:
    """Return what the nodes are, and where the ranks are."""
    if scenario.own_nodes:
        return (
            "messages cost what their links cost; `lab calibrate` on a node of yours measures what "
            "its software adds"
        )
    if scenario.own_machines:
        return "each node is a machine like the calibrated one"
    if scenario.on_one_machine:
        return "all nodes are ranks on the calibrated machine, over loopback"
    return "the nodes are those of the calibration"


def _network_text(scenario: Scenario, *, typical: bool) -> str:
    """Return what links, messages and sums cost; ``typical`` if nobody gave the latency."""
    network = scenario.network
    link = "links as measured"
    if scenario.rate_bits is not None:
        link = f"links of {scenario.rate_bits / 1e6:,.0f} Mbit/s ({HEADERS - 1:.0%} headers)"
    ring = network.rate("all_reduce")
    message = f"{duration_text(ring.alpha_seconds)} a message"
    if typical:
        message += " (typical; --latency sets it)"
    text = f"network: {link}; all_reduce: {message}, {bandwidth_text(ring.beta_seconds_per_byte)}"
    if scenario.own_nodes:
        return text
    return f"{text}; summing: {bandwidth_text(network.gamma_seconds_per_byte)}"


def _inside_text(scenario: Scenario) -> str:
    """Return how many ranks share a node, and what messages between them cost."""
    shared = "share its link" if scenario.own_nodes else "share its link and its cores"
    ring = scenario.network.inside.rate("all_reduce")
    source = "as calibrated over loopback, and no more latency than over the link"
    if not scenario.inside_measured:
        source = "typical; --rate-inside sets it"
    if scenario.inside_bits is not None:
        source = "--rate-inside"
    return (
        f"{scenario.ranks_per_node} ranks on each node {shared}; all_reduce inside a node: "
        f"{duration_text(ring.alpha_seconds)} a message, "
        f"{bandwidth_text(ring.beta_seconds_per_byte)} ({source})"
    )


def _batchnorm_text(scenario: Scenario) -> str:
    """Return how many messages of SyncBatchNorm a step waits for."""
    layers = scenario.calibration.batchnorm or ()
    messages = 2 * len(layers) * scenario.accumulation_steps
    return (
        f"SyncBatchNorm: {count(len(layers), 'layer')}, {messages} messages a step. "
        "Computing waits for each, so they are exposed communication"
    )


def answer(steps: Sequence[PredictedStep], *, scaling: str) -> str:
    """Return what would help most on the largest number of nodes; "" for one node.

    It speaks of ddp, or of the fastest strategy that is there. In weak scaling more nodes also make
    the batch larger, so their gain stands apart.
    """
    most = max(step.nodes for step in steps)
    if most == 1:
        return ""
    rows = [step for step in steps if step.nodes == most and step.sync != "none"]
    if not rows:
        return ""
    step = min(rows, key=lambda row: (row.sync != "ddp", -row.speedup))
    gain_of = {
        "a network twice as fast": step.gains["network"],
        "compute twice as fast": step.gains["compute"],
    }
    larger = ""
    if scaling == "strong":
        gain_of[f"{2 * most:,} nodes"] = step.gains["nodes"]
    else:
        larger = (
            f" {2 * most:,} nodes: {_times(step.gains['nodes'])} times the samples per second, in "
            "global batches twice as large."
        )
    best, *others = sorted(gain_of, key=lambda change: -gain_of[change])
    less = " and ".join(f"{change} {_times(gain_of[change])}" for change in others)
    seconds = step.prediction.step_seconds
    ceiling = step.gains["no messages"]
    return (
        f"What helps {step.sync} on {most:,} nodes most ({duration_text(seconds)} a step): {best}, "
        f"{_times(gain_of[best])} times the speed; {less}. "
        f"Without messages: {duration_text(seconds / ceiling)}, {_times(ceiling)} times.{larger}"
    )


def _console() -> Console:
    """Return the terminal; a file or a pipe has no width of its own."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    return Console(highlight=False, width=_WIDTH)


def print_tables(
    summary: Sequence[str],
    steps: Sequence[PredictedStep],
    limits: Sequence[ScalingLimit],
    scenario: Scenario,
) -> None:
    """Print summary, steps with their notes, and limits, as wide as the terminal permits."""
    console = _console()
    narrow = console.width < _NARROW
    notes = []
    for step in steps:
        about = "none" if step.sync == "none" else f"{step.nodes} nodes"
        if step.note and f"{about}: {step.note}" not in notes:
            notes.append(f"{about}: {step.note}")
    waits = {step.nodes: step.prediction.batchnorm_seconds for step in steps if step.sync != "none"}
    for nodes, seconds in waits.items():
        if seconds:
            notes.append(f"{nodes} nodes: SyncBatchNorm's messages take {duration_text(seconds)}")
    print_lines = partial(console.print, sep="\n", markup=False, soft_wrap=True)
    print_lines(*summary)
    if advice := answer(steps, scaling=scenario.scaling):
        print_lines(advice)
    console.print(_steps_table(steps, narrow=narrow))
    if notes:
        print_lines(*notes)
    if limits:
        console.print(_scaling_limits_table(limits, narrow=narrow))
        print_lines(*_scaling_limits_text(scenario))
    else:
        print_lines(
            f"where scaling stops is not shown: ranks of one machine share its "
            f"{scenario.calibration.cores} cores. Give "
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
    for row in zip(*tables.values(), strict=True):
        shown = (
            f"{duration_text(step.prediction.step_seconds)} ({_times(step.speedup)})"
            for step in row
        )
        table.add_row(row[0].sync, _nodes(row[0]), *shown)
    console.print(table)
    for rate, steps in tables.items():
        if advice := answer(steps, scaling=scaling):
            print_lines(f"{rate}: {advice}")


def _steps_table(steps: Sequence[PredictedStep], *, narrow: bool) -> Table:
    """Return the table of steps; a narrow one fits 80 columns, so that no number is cut."""
    columns = _STEP_COLUMNS
    if narrow:
        columns = {name: text for name, text in columns.items() if name not in _WIDE_COLUMNS}
    table = _frame(list(columns), narrow=narrow)
    for step in steps:
        table.add_row(*(text(step) for text in columns.values()))
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
    all_strong = [limit for limit in limits if limit.scaling == "strong"]
    all_weak = [limit for limit in limits if limit.scaling == "weak"]
    for strong, weak in zip(all_strong, all_weak, strict=True):  # the same strategies, in order
        table.add_row(
            strong.sync,
            f"{strong.nodes or strong.limit:,}",
            _times(strong.speedup),
            strong.held_by or "-",
            "all" if weak.half_nodes == weak.limit else f"{weak.half_nodes:,}",
            f"{weak.nodes:,}" if weak.nodes else "never",
            _times(weak.speedup),
            weak.held_by or "-",
        )
    return table


def _frame(headings: Sequence[str], *, narrow: bool) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=0 if narrow else (0, 1, 0, 0),
        pad_edge=False,
        show_edge=not narrow,
    )
    for heading in headings:
        is_text = heading.endswith(("strategy", " by"))
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    return table


def _scaling_limits_text(scenario: Scenario) -> list[str]:
    """Return lines that explain the headings of ``_scaling_limits_table``."""
    owner = _owner(scenario)
    samples = f"{scenario.batch_size:,} samples"
    least = scenario.least_samples
    most = most_nodes(
        scenario.batch_size,
        scaling="strong",
        ranks_per_node=scenario.ranks_per_node,
        least_samples=least,
    )
    return [
        f"strong: {samples} for all nodes together, at least {least} a {owner}, so up to "
        f"{most:,} nodes.",
        f"weak: {samples} for each {owner}, up to {LARGEST_NODES:,} nodes.",
        "stops at: the smallest number of nodes within 10 % of the best speed; never: the last "
        "doubling still",
        "brought more than 10 %. speed up: at that number, over one node. half to: nodes up to "
        "which the",
        "efficiency is at least 50 %. limited by: what most of the communication time is spent on; "
        "compute:",
        "computing itself stops scaling; samples: the batch has no samples for more nodes.",
        "Above 32 nodes every 16th part of a doubling is tried, so numbers of nodes are 4 % apart.",
    ]


def _nodes(step: PredictedStep) -> str:
    """Return the number of nodes, times that of the ranks on each if there are several."""
    if step.ranks_per_node == 1:
        return str(step.nodes)
    return f"{step.nodes} x {step.ranks_per_node}"


def _times(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 0.01:
        return f"{value:.2f}"
    return "<0.01"


def _efficiency(value: float) -> str:
    return f"{value:.1%}" if value >= 0.001 else "<0.1%"


# The columns of the table of steps by their headings; the wide ones need more than 80 columns.
_STEP_COLUMNS: dict[str, Callable[[PredictedStep], str]] = {
    "strategy": lambda step: step.sync,
    "nodes": lambda step: _nodes(step),
    "step": lambda step: duration_text(step.prediction.step_seconds),
    "speed\nup": lambda step: _times(step.speedup),
    "effi-\nciency": lambda step: _efficiency(step.efficiency),
    "exposed\ncomm.": lambda step: duration_text(step.prediction.sync_seconds),
    "slowed\nby": lambda step: duration_text(step.prediction.slowed_seconds),
    "rank 0\nsends": lambda step: bytes_text(step.prediction.bytes_sent_root),
    "others\nsend": lambda step: bytes_text(step.prediction.bytes_sent_others),
    "2 x\nlink": lambda step: _times(step.gains["network"]),
    "2 x\ncomp": lambda step: _times(step.gains["compute"]),
    "2 x\nnode": lambda step: _times(step.gains["nodes"]),
}
_WIDE_COLUMNS = ("rank 0\nsends", "others\nsend")
