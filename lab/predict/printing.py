"""What ``lab predict`` prints: the source of its numbers, the steps, and the scaling limits.

``summarize`` returns the first lines, ``print_tables`` prints everything; tables.py computes the
numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from common.say import (
    bandwidth_text,
    bytes_text,
    count,
    duration_text,
    factor_text,
    listed,
    percent,
    range_text,
    rate_text,
)
from lab.predict.calibration_file import QUIET_SHARE
from lab.predict.cluster import TypicalCluster
from lab.predict.event_model import HEADERS, LARGEST_NODES
from lab.predict.scaling import ScalingLimit, most_nodes
from lab.predict.scenario import Scenario
from lab.predict.sentences import sentence
from lab.predict.tables import PURCHASES, PredictedStep, main_step

_WIDTH = 110  # of a file or a pipe
_NARROW = 106
DECIDED = 0.8  # the share of the draws in which the best purchase must be the best
LITTLE = 0.03  # a gain of less is almost nothing


def summarize(
    scenario: Scenario, *, is_reference: bool, given: Sequence[str] = ("latency",)
) -> list[str]:
    """Return what a reader must know first, a line each: calibration, model and batch, network.

    given : "latency" if the reader gave it; else that of links with a rate is a typical one.
    """
    calibration = scenario.calibration
    gradients = f"{bytes_text(sum(calibration.gradient_sizes))} of gradients"
    if scenario.gradient_type is not None:
        gradients += f" in {scenario.gradient_type}"
    batch = f"global batch {scenario.batch_size}"
    if scenario.scaling == "weak":
        batch = f"batch of a {_owner(scenario)} {scenario.batch_size}"
    if scenario.accumulation_steps > 1:
        batch += f" in {scenario.accumulation_steps} micro-batches"
    about = f"{calibration.model}, {gradients}, {batch}"
    if not scenario.own_nodes:
        about += f"; {_nodes_text(scenario)}"
    typical = scenario.rate_bits is not None and "latency" not in given
    lines = [
        _source_text(scenario, is_reference=is_reference),
        about,
    ]
    if scenario.cluster is None:
        lines.append(_network_text(scenario, typical=typical))
    else:
        lines.append(_cluster_text(scenario.cluster))
        lines.append(_links_text(scenario, scenario.cluster, typical=typical))
    if scenario.ranks_per_node > 1:
        lines.append(_inside_text(scenario))
    if scenario.sync_batchnorm:
        lines.append(_batchnorm_text(scenario))
    return lines


def _owner(scenario: Scenario) -> str:
    """Return what has a batch of its own in weak scaling."""
    return "node" if scenario.ranks_per_node == 1 else "rank"


def _source_text(scenario: Scenario, *, is_reference: bool) -> str:
    """Return where the times of computing come from."""
    calibration = scenario.calibration
    source = f"calibrated on {calibration.name}, {calibration.made}"
    if calibration.quick:
        source += ", quickly"
    if calibration.others_share > QUIET_SHARE:
        source += (
            f", while other programs used {percent(calibration.others_share)} of its cores "
            "(calibrate again)"
        )
    if scenario.cluster is not None and scenario.own_nodes:
        seconds = duration_text(scenario.update_seconds(scenario.cluster))
        return (
            f"a step's time is yours, {seconds} of it the update's, typical for "
            f"{scenario.update_bytes:g} bytes a parameter (--optimizer sets them); how the rest "
            f"divides into forward and backward: {source}"
        )
    if is_reference:
        return (
            f"NOT this machine: {source}; this calibration comes with the project. `lab calibrate` "
            "measures your machine"
        )
    return source


def _nodes_text(scenario: Scenario) -> str:
    """Return what the nodes are, and where the ranks are."""
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
        link = f"links of {rate_text(scenario.rate_bits)} ({percent(HEADERS - 1)} headers)"
    ring = network.rate("all_reduce")
    message = f"{duration_text(ring.alpha_seconds)} a message"
    if typical:
        message += " (typical; --latency sets it)"
    text = f"network: {link}; all_reduce: {message}, {bandwidth_text(ring.beta_seconds_per_byte)}"
    return f"{text}; summing: {bandwidth_text(network.gamma_seconds_per_byte)}"


def _cluster_text(cluster: TypicalCluster) -> str:
    """Return what was assumed of nodes that nobody calibrated, and what measures it."""
    origin = "as you measured" if cluster.beliefs.mean.any() else "typical of such clusters"
    most = "its software passes what the links pass"
    if not cluster.passes_all:
        most = f"at most {rate_text(cluster.most_bits)} of payload a node"
    if cluster.adapters > 1:
        most += f", {cluster.adapters} adapters"
    if cluster.software_bits is not None:
        most += " (--software-gbit)"
    return (
        f"{cluster.name}, {origin}: {most}, a message delays backward by "
        f"{percent(cluster.values.overlap_cost)} of its time, nodes' steps scatter by "
        f"{percent(cluster.values.straggler, 1)} (ranges in priors.toml; `lab calibrate` or "
        "--fit measures yours)"
    )


def _links_text(scenario: Scenario, cluster: TypicalCluster, *, typical: bool) -> str:
    """Return what the links pass, and what a message costs; ``typical``: see ``summarize``."""
    network = scenario.network
    ring = network.rate("all_reduce")
    payload = _gbit(8 / ring.beta_seconds_per_byte)
    if scenario.rate_bits is not None:
        payload += f" of {_gbit(scenario.rate_bits)}"
    software = cluster.values.message_seconds
    message = f"{duration_text(ring.alpha_seconds - software)} on the link"
    if typical:
        message += " (typical; --latency sets it)"
    message += f" and {duration_text(software)} in software"
    if ring.start_seconds:
        message += f", each operation {duration_text(ring.start_seconds)} to start"
    text = f"network: {payload} Gbit/s reach payload; a message takes {message}"
    if not network.gamma_seconds_per_byte:
        return text
    return f"{text}; summing: {bandwidth_text(network.gamma_seconds_per_byte)}"


def _gbit(bits: float) -> str:
    """Return bits a second in Gbit/s, of at least three digits: "8.8", "1,440"."""
    gbit = bits / 1e9
    return f"{gbit:,.0f}" if gbit >= 100 else f"{gbit:.3g}"


def _inside_text(scenario: Scenario) -> str:
    """Return how many ranks share a node, and what that and messages between them cost."""
    shared = "share its link" if scenario.own_nodes else "share its link and its cores"
    text = f"{scenario.ranks_per_node} ranks on each node {shared}"
    if scenario.node_step_seconds is not None:
        return f"{text}; messages inside a node are part of --node-step-time"
    ring = scenario.network.inside.rate("all_reduce")
    source = "as calibrated over loopback, and no more latency than over the link"
    if scenario.cluster is not None or not scenario.inside_measured:
        source = "typical; --rate-inside sets it"
    if scenario.inside_bits is not None:
        source = "--rate-inside"
    text += (
        f"; all_reduce inside a node: {duration_text(ring.alpha_seconds)} a message, "
        f"{bandwidth_text(ring.beta_seconds_per_byte)} ({source})"
    )
    if scenario.cluster is None or scenario.step_seconds is None:
        return text
    loss = percent(scenario.cluster.values.node_loss, 1)
    return f"{text}; together they compute {loss} longer (typical; --node-step-time sets it)"


def _batchnorm_text(scenario: Scenario) -> str:
    """Return how many messages of SyncBatchNorm a step waits for."""
    layers = scenario.calibration.batchnorm or ()
    messages = 2 * len(layers) * scenario.accumulation_steps
    return (
        f"SyncBatchNorm: {count(len(layers), 'layer')}, {messages} messages a step. "
        "Computing waits for each, so they are exposed communication"
    )


def answer(steps: Sequence[PredictedStep], scenario: Scenario) -> str:
    """Return how long a step takes and what would help most; "" for one node.

    It speaks of ``tables.main_step``. In weak scaling more nodes also make the batch larger, so
    their gain stands apart.
    """
    step = main_step(steps)
    if step is None:
        return ""
    typical = step.prediction.step_seconds
    sentences = [
        sentence(
            "step",
            strategy=step.sync,
            nodes=count(step.nodes, "node"),
            seconds=duration_text(typical),
            range=range_text(step.low_seconds, step.high_seconds, typical=typical),
        ),
        _purchases_text(step, _purchases(step, scenario)),
        sentence("no_messages", factor=factor_text(step.gains["no messages"])),
    ]
    if scenario.scaling == "weak" and 2 * step.nodes <= LARGEST_NODES:
        nodes, factor = f"{2 * step.nodes:,}", factor_text(step.gains["nodes"])
        sentences.append(sentence("weak_nodes", nodes=nodes, factor=factor))
    return " ".join(sentences)


def _purchases(step: PredictedStep, scenario: Scenario) -> list[str]:
    """Return ``PURCHASES``, without more nodes than are predicted."""
    purchases = list(PURCHASES[scenario.scaling])
    if 2 * step.nodes > LARGEST_NODES and "nodes" in purchases:
        purchases.remove("nodes")
    return purchases


def _best_purchases(step: PredictedStep, purchases: Sequence[str]) -> list[str]:
    """Return the purchase that gains most, and before the others the one that may gain more.

    The best one stands alone if it is that in ``DECIDED`` of the draws.
    """
    best = max(purchases, key=lambda change: step.gains[change])
    others = [change for change in purchases if change != best]
    rival = max(others, key=lambda change: step.best_shares[change])
    _, most = step.gain_ranges[rival]
    if step.best_shares[best] >= DECIDED or most < 1 + LITTLE:
        return [best]
    return [best, rival]


def _purchases_text(step: PredictedStep, purchases: Sequence[str]) -> str:
    """Return what each purchase would bring, the best one first, as a sentence."""
    in_turn = sorted(purchases, key=lambda change: -step.gains[change])
    name_of = {change: _purchase_text(step, change) for change in purchases}
    gain_of = {change: factor_text(step.gains[change]) for change in purchases}
    best, *rivals = _best_purchases(step, purchases)
    if rivals:
        [rival] = rivals
        first = sentence(
            "open",
            best=name_of[best],
            factor=gain_of[best],
            range=_gain_range(step, best),
            rival=name_of[rival],
            rival_factor=gain_of[rival],
            rival_range=_gain_range(step, rival),
        )
    elif step.gains[best] < 1 + LITTLE:
        each = ", ".join(f"{name_of[change]} {gain_of[change]}" for change in in_turn)
        return sentence("nothing", each=each)
    else:
        first = sentence("most", best=name_of[best], factor=gain_of[best])
    others = [change for change in in_turn if change not in (best, *rivals)]
    effects = [_effect(name_of[change], step.gains[change]) for change in others]
    text = "; ".join([first, *effects])
    return f"{text[0].upper()}{text[1:]}."


def _purchase_text(step: PredictedStep, change: str) -> str:
    return sentence(change, doubled=f"{2 * step.nodes:,}", nodes=f"{step.nodes:,}")


def _gain_range(step: PredictedStep, change: str) -> str:
    low, high = map(factor_text, step.gain_ranges[change])
    return sentence("factors", low=low, high=high)


def _effect(change: str, gain: float) -> str:
    """Return what a change does that is not the best one."""
    size = "more"
    if gain < 1 - LITTLE / 2:
        size = "slower"
    elif gain < 1 + LITTLE:
        size = "little"
    return sentence(size, change=change, factor=factor_text(gain))


def _closing_lines(
    tables: Mapping[str, Sequence[PredictedStep]], scenarios: Sequence[Scenario]
) -> list[str]:
    """Return what holds for all answers: the software's limit, and what would decide between two.

    tables, scenarios : by rate, as for ``print_rates``; the name of a single one is not shown.
    """
    lines = _software_lines(tables, scenarios)
    mains = [main_step(steps) for steps in tables.values()]
    scenario = scenarios[0]
    for step in mains:
        if step is not None and len(_best_purchases(step, _purchases(step, scenario))) > 1:
            return [*lines, _decided_by(scenario)]
    return lines


def _decided_by(scenario: Scenario) -> str:
    if scenario.cluster is None:
        return "A run on your nodes would decide it: `lab compare` measures both."
    sources = ["`lab calibrate` on your nodes", "a step measured there (--fit)"]
    if scenario.cluster.software_bits is None:
        sources.append("nccl-tests or `iperf3` between two of them (--links)")
    return f"What would decide it: {', or '.join(sources)}."


def _software_lines(
    tables: Mapping[str, Sequence[PredictedStep]], scenarios: Sequence[Scenario]
) -> list[str]:
    """Return from which rate on software limits the links, a line for each generation of nodes."""
    by_generation: dict[str, list[tuple[str, Scenario]]] = {}
    for rate, scenario in zip(tables, scenarios, strict=True):
        name = "" if scenario.cluster is None else scenario.cluster.name
        by_generation.setdefault(name, []).append((rate, scenario))
    lines = []
    for of_generation in by_generation.values():
        fastest = max(of_generation, key=lambda pair: pair[1].rate_bits or 0)[1]
        if fastest.rate_bits is None or 2 * fastest.rate_bits <= fastest.enough_bits:
            continue
        line = _software_text(fastest)
        if len(by_generation) > 1:
            rates = listed([rate for rate, _ in of_generation])
            line = f"{rates}: {line[0].lower()}{line[1:]}"
        lines.append(line)
    return lines


def _software_text(scenario: Scenario) -> str:
    """Return from which rate on the nodes' software limits the links."""
    source = "as calibrated; --software-gbit sets what yours passes"
    if scenario.cluster is not None:
        source = f"typical of {scenario.cluster.name}; --software-gbit sets what yours passes"
        if scenario.cluster.software_bits is not None:
            source = "--software-gbit"
    return (
        f"Links above {rate_text(scenario.enough_bits)} would bring nothing more, since a node's "
        f"software passes {rate_text(scenario.software_bits)} at most ({source})."
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
    print_lines = partial(console.print, sep="\n", markup=False, soft_wrap=True)
    print_lines(*summary)
    if advice := answer(steps, scenario):
        print_lines(advice, *_closing_lines({"": steps}, [scenario]))
    console.print(_steps_table(steps, console))
    if notes := _notes(steps):
        print_lines(*notes)
    if limits:
        console.print(_scaling_limits_table(limits, narrow=console.width < _NARROW))
        print_lines(*_scaling_limits_text(scenario))
    else:
        print_lines(
            "where scaling stops is not shown: ranks of one machine share its "
            f"{count(scenario.calibration.cores, 'core')}. Give --rate to predict separate "
            "machines"
        )


def print_rates(
    summaries: Sequence[Sequence[str]],
    tables: Mapping[str, Sequence[PredictedStep]],
    scenarios: Sequence[Scenario],
) -> None:
    """Print step and speed-up at each rate, side by side; all three arguments are by rate."""
    console = _console()
    print_lines = partial(console.print, sep="\n", markup=False, soft_wrap=True)
    print_lines(*dict.fromkeys(line for summary in summaries for line in summary))
    console.print(_rates_table(tables, console))
    advices = [
        f"{rate}: {advice}"
        for (rate, steps), scenario in zip(tables.items(), scenarios, strict=True)
        if (advice := answer(steps, scenario))
    ]
    if advices:
        print_lines(*advices, *_closing_lines(tables, scenarios))


def _notes(steps: Sequence[PredictedStep]) -> list[str]:
    """Return when steps hold, what they leave out, and how long SyncBatchNorm's messages take."""
    notes = []
    for step in steps:
        about = "none" if step.sync == "none" else count(step.nodes, "node")
        if step.note:
            notes.append(f"{about}: {step.note}")
    notes += [f"{step.sync}: {step.caveat}" for step in steps if step.caveat]
    waits = {step.nodes: step.prediction.batchnorm_seconds for step in steps if step.sync != "none"}
    for nodes, seconds in waits.items():
        if seconds:
            about = count(nodes, "node")
            notes.append(f"{about}: SyncBatchNorm's messages take {duration_text(seconds)}")
    return list(dict.fromkeys(notes))


def _fits(table: Table, console: Console) -> bool:
    """Return whether the console has the columns that the table takes."""
    widest = console.options.update(max_width=1000)
    return Measurement.get(console, widest, table).maximum <= console.width


def _steps_table(steps: Sequence[PredictedStep], console: Console) -> Table:
    """Return the table of steps, without columns for which the console is too narrow."""
    columns = dict(_STEP_COLUMNS)
    for left_out in ("", *_LEFT_OUT):
        columns.pop(left_out, None)
        table = _frame(list(columns), narrow=console.width < _NARROW)
        for step in steps:
            table.add_row(*(text(step) for text in columns.values()))
        if _fits(table, console):
            break
    return table


def _rates_table(tables: Mapping[str, Sequence[PredictedStep]], console: Console) -> Table:
    """Return steps with interval and speed-up by rate; on a narrow console in two lines each."""
    for between in ("  ", "\n"):
        heading = f"step (speed up){between}80 %"
        headings = [f"{rate}:\n{heading}" for rate in tables]
        lead = "\n" * (1 + between.count("\n"))
        table = _frame([f"{lead}strategy", f"{lead}nodes", *headings], narrow=False)
        for row in zip(*tables.values(), strict=True):
            cells = [f"{_rate_cell(step)}{between}{_interval(step)}" for step in row]
            table.add_row(row[0].sync, _nodes(row[0]), *cells)
        if _fits(table, console):
            break
    return table


def _rate_cell(step: PredictedStep) -> str:
    return f"{duration_text(step.prediction.step_seconds)} ({factor_text(step.speedup)})"


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
            factor_text(strong.speedup),
            strong.held_by or "-",
            "all" if weak.half_nodes == weak.limit else f"{weak.half_nodes:,}",
            f"{weak.nodes:,}" if weak.nodes else "never",
            factor_text(weak.speedup),
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
    samples = count(scenario.batch_size, "sample")
    least = scenario.least_samples
    most = most_nodes(
        scenario.batch_size,
        scaling="strong",
        ranks_per_node=scenario.ranks_per_node,
        least_samples=least,
    )
    return [
        f"strong: {samples} for all nodes together, at least {least} a {owner}, so up to "
        f"{count(most, 'node')}.",
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


def _interval(step: PredictedStep) -> str:
    """Return the step's 80 % interval; "-" if the step is the reader's own."""
    if step.low_seconds == step.high_seconds:
        return "-"
    return range_text(step.low_seconds, step.high_seconds, between="–")


def _efficiency(value: float) -> str:
    return percent(value, 1) if value >= 0.001 else "<0.1 %"


# The columns of the table of steps by their headings, and those that a narrow terminal lacks, in
# this order: --json has them all.
_STEP_COLUMNS: dict[str, Callable[[PredictedStep], str]] = {
    "strategy": lambda step: step.sync,
    "nodes": lambda step: _nodes(step),
    "step": lambda step: duration_text(step.prediction.step_seconds),
    "80 %\ninterval": _interval,
    "speed\nup": lambda step: factor_text(step.speedup),
    "effi-\nciency": lambda step: _efficiency(step.efficiency),
    "exposed\ncomm.": lambda step: duration_text(step.prediction.sync_seconds),
    "slowed\nby": lambda step: duration_text(step.prediction.slowed_seconds),
    "rank 0\nsends": lambda step: bytes_text(step.prediction.bytes_sent_root),
    "others\nsend": lambda step: bytes_text(step.prediction.bytes_sent_others),
    "2 x\nlink": lambda step: factor_text(step.gains["network"]),
    "2 x\ncomp": lambda step: factor_text(step.gains["compute"]),
    "2 x\nnode": lambda step: factor_text(step.gains["nodes"]),
}
_LEFT_OUT = ("others\nsend", "rank 0\nsends", "effi-\nciency", "slowed\nby")
