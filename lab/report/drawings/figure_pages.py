"""The list of figures with their captions; draws them to files and for the page."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.plot_style import NothingToShowError, style
from lab.report.drawings import cost_figures, curves, figures
from lab.report.drawings.svg import inline, save, svg
from lab.report.drawings.timeline import mean_overlap, overlap, share_text
from lab.report.drawings.timeline_figure import draw_timeline
from lab.report.equality import wrong_rows
from lab.report.losses import largest_difference
from lab.report.view import (
    CellRow,
    ComparisonGroup,
    nodes_text,
    percent,
    rate_text,
    safe_name,
    seconds_text,
    small_text,
)


@dataclass(frozen=True)
class Drawing:
    """A figure of the page as SVG for wide and narrow screens, or why it is ``missing``."""

    name: str  # of its files, without suffix
    title: str
    caption: str = ""
    alt: str = ""  # the description for a screen reader
    wide: str = ""
    narrow: str = ""
    missing: str = ""


def step_time_caption(block: ComparisonGroup) -> str:
    text = (
        "Each bar is the median step: the median of each section, one after the other, and in grey "
        "the time outside the sections (metrics, records, Python). Sync is the communication that "
        "is exposed: first waiting for the slowest rank's last gradient (hatched), then sending. "
    )
    if any(_overshoot(row) for row in block.measured):
        text += (
            "Where the sections' medians sum up to more than the median step, the excess is pale. "
        )
    if wrong_rows(block):
        text += "✗ marks a strategy with a wrong result. "
    text += "The tick is the median of the whole step"
    single = [row for row in block.measured if not row.interval("step")]
    if len(single) == len(block.measured):
        return f"{text}; there is one repeat, so there is no interval."
    text += (
        "; the line across it is the 95 % interval over the repeats"
        f"{', where there is more than one' if single else ''}."
    )
    if max(figures.whisker_ends(block)) > figures.axis_end(block):
        text += " Some intervals are longer than the figure."
    return text


def _overshoot(row: CellRow) -> bool:
    drawn = figures.section_spans(row)
    return bool(drawn) and drawn[-1][2] > 1.001 * row.measured_step


def scaling_caption(block: ComparisonGroup) -> str:
    what = (
        "one node's step time divided by this cell's, at the same global batch"
        if block.scaling == "strong"
        else "samples per second divided by one node's, at the same batch per node"
    )
    one = block.baseline
    shown = f" (one node: {seconds_text(one.step, one.step)} s a step)" if one else ""
    return (
        f"The number is the speed-up: {what}{shown}. The point is the efficiency, the speed-up "
        "divided by the number of nodes. A cell left of the dotted line is slower than one node. "
        "The lines combine the 95 % intervals of both step times."
    )


_BYTES_CAPTION = (
    "Bytes of gradients that each strategy sends in a step, without TCP/IP headers (strategies "
    "that send only every few steps: the mean). The square is rank 0, the circle the mean of the "
    "other ranks; a square inside its circle means that rank 0 sends as much as the others."
)


def loss_caption(block: ComparisonGroup) -> str:
    parts = [
        f"{small_text(most.value)} on {nodes_text(nodes)} "
        f"(step {most.step}, {most.one} and {most.other})"
        if most.value
        else f"none on {nodes_text(nodes)}"
        for nodes in block.nodes
        if (most := largest_difference([row for row in block.at(nodes) if row.exact]))
    ]
    largest = " Largest difference between them at the same step and seed: "
    return (
        "Training loss over the global batch, of one seed. Strategies that claim to be exact "
        "must have the same loss; they are drawn as one line where no difference is visible. "
        f"The others are dashed.{largest + '; '.join(parts) + '.' if parts else ''}"
    )


_MEMORY_CAPTION = (
    "Largest resident memory of a process: interpreter, libraries, data and model together. "
    "The bar is the mean over the ranks, the tick the rank that needed most."
)

_TENSORS_CAPTION = (
    "Tensors between two steps on the rank that holds most, each storage counted once: no "
    "activations, no libraries. The diamond is the sum by the closed form; where compute is "
    "emulated, the bar is the closed form's, too."
)

_PREDICTION_CAPTION = (
    "The percentage is the error: predicted divided by measured, minus one. Dotted: outside the "
    "scope that the model claims."
)


FIGURES = (
    ("step_time", "Time of a step", figures.draw_step_time, step_time_caption),
    ("scaling", "Speed-up and efficiency", figures.draw_scaling, scaling_caption),
    ("bytes", "Bytes sent", cost_figures.draw_bytes, _BYTES_CAPTION),
    ("loss", "Loss over steps", curves.draw_loss, loss_caption),
    ("memory", "Peak memory", cost_figures.draw_memory, _MEMORY_CAPTION),
    ("tensors", "Tensors of a rank", cost_figures.draw_tensors, _TENSORS_CAPTION),
    (
        "prediction",
        "Predicted and measured step time",
        figures.draw_prediction,
        _PREDICTION_CAPTION,
    ),
)


def draw_block(folder: Path, block: ComparisonGroup) -> Iterator[Drawing]:
    """Draw every figure of ``block`` into ``folder``, and yield them for the page."""
    for name, title, draw, caption in FIGURES:
        words = caption if isinstance(caption, str) else caption(block)
        what = f"{title}, {block.label}" if block.label else title
        alt = f"{what}: {words} The table has the numbers."
        yield _drawn(folder, Drawing(name + block.suffix, title, words, alt), partial(draw, block))


def _drawn(folder: Path, described: Drawing, draw: Callable[..., Figure]) -> Drawing:
    """Write the figure's files; return ``described`` with its SVG, or why it is missing."""
    name = described.name
    try:
        with style():
            wide, narrow = draw(narrow=False), draw(narrow=True)
            return replace(
                described,
                wide=save(wide, folder / name),
                narrow=inline(svg(narrow), f"{name}-narrow"),
            )
    except NothingToShowError as error:
        return replace(described, missing=str(error))


def draw_timelines(folder: Path, results: Mapping[str, Any]) -> Iterator[Drawing]:
    """Draw each cell's recorded step, cells on one node last, since they send no messages."""
    timelines, emulated = results.get("timelines") or {}, bool(results.get("emulated"))
    ordered = sorted(results.get("cells") or [], key=lambda cell: cell["nodes"] == 1)
    cells = {cell["id"]: cell for cell in ordered if cell["id"] in timelines}
    for key in cells | timelines:
        timeline, cell = timelines[key], cells.get(key, {})
        sync = (cell or timeline).get("sync", key)
        at = f" at {rate_text(cell['rate'])}" if cell.get("rate") is not None else ""
        label = f"{sync}, {nodes_text(len(timeline.get('ranks') or []))}{at}"
        words = timeline_caption(timeline)
        described = Drawing(
            f"timeline-{safe_name(key)}",
            f"{label}: {share_text(mean_overlap(timeline))}",
            words,
            f"One step of {label}, a row for each rank. {words}",
        )
        draw = partial(draw_timeline, timeline, label=label, emulated=emulated)
        drawn = _drawn(folder, described, draw)
        yield replace(drawn, title=label) if drawn.missing else drawn


def timeline_caption(timeline: Mapping[str, Any]) -> str:
    """Return which step it is, and the overlap of the first 8 ranks."""
    ranks = timeline.get("ranks") or []
    texts = "; ".join(
        f"rank {rank['rank']}: {percent(share)} ({len(rank.get('messages') or [])} messages)"
        for rank in ranks[:8]
        if (share := overlap(rank)) is not None
    )
    more = "; …" if texts and len(ranks) > 8 else ""
    shares = f"{texts or 'no messages'}{more}"
    return (
        f"Step {timeline.get('step')}, recorded with extra timers and not counted in the medians. "
        f"Share of the message time before the rank's last gradient: {shares}."
    )
