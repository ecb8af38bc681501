"""The list of figures with their captions; draws them to files and for the page."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.plot_style import NothingToShowError, inline, save, style, svg
from lab.report import curves, figures
from lab.report.losses import largest_difference
from lab.report.timeline import draw_timeline, mean_overlap, overlap, share_text
from lab.report.view import (
    ComparisonGroup,
    nodes_text,
    percent,
    rate_text,
    safe_name,
    seconds_text,
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
        "Medians over the repeats of the mean over the ranks, one section after the other. Sync is "
        "what is exposed: waiting for the slowest rank's last gradient (hatched), then the wire. "
        "The tick is the median of the whole step; "
    )
    single = [row for row in block.measured if not row.interval("step")]
    if len(single) == len(block.measured):
        return text + "one repeat, so there is no interval."
    text += (
        "the whisker the 95 % interval over repeats"
        f"{', where there is more than one' if single else ''}."
    )
    if max(figures.whisker_ends(block)) > figures.axis_end(block):
        text += " Some whiskers are longer than the figure."
    return text


def scaling_caption(block: ComparisonGroup) -> str:
    what = (
        "one node's step time over this one's, at the same global batch"
        if block.scaling == "strong"
        else "samples a second over one node's, at the same batch a node"
    )
    one = block.baseline
    shown = f" (one node: {seconds_text(one.step, one.step)} s a step)" if one else ""
    return (
        f"Each panel is a strategy: {what}{shown}. The dashed line is ideal, the faint ones "
        "are the others; the percentages are the efficiency, that is the share of the ideal. "
        "Whiskers reach to the far ends of both 95 % intervals."
    )


_BYTES_CAPTION = (
    "Payload counted where the strategies send, a step (periodic strategies: mean over their "
    "period), without the headers of TCP and IP. The square is rank 0, the circle the mean of "
    "the others; a square within its circle sends as much as they do."
)


def loss_caption(block: ComparisonGroup) -> str:
    found = {
        nodes: largest_difference([row for row in block.at(nodes) if row.exact])
        for nodes in block.nodes_beyond_one
    }
    parts = [
        f"{most.value:.2g} on {nodes} nodes (step {most.step}, {most.one} against {most.other})"
        if most.value
        else f"none on {nodes} nodes"
        for nodes, most in found.items()
        if most
    ]
    largest = " Largest difference between exact strategies at the same step and seed: "
    return (
        "Training loss over the global batch, of one seed. Exact strategies must lie on one "
        "another, and are drawn as one line where the eye could not tell them apart; those "
        f"that are not exact are dashed.{largest + '; '.join(parts) + '.' if parts else ''}"
    )


_MEMORY_CAPTION = (
    "Resident memory of a process at its peak, of all that it holds: interpreter, libraries, "
    "data, model. Bars are the mean over the ranks, ticks the rank that took most."
)


def prediction_caption(block: ComparisonGroup) -> str:
    one = block.baseline
    alone = ""
    if one and one.predicted and block.nodes != [1]:
        predicted, measured = (seconds_text(value, one.step) for value in (one.predicted, one.step))
        alone = f" One node, not drawn: predicted {predicted} s, measured {measured} s."
    return (
        "Each point is a cell; on the line the prediction was right, in the band within 20 % "
        "of the measured. Filled: in the scope of the model; hollow: out of it, shown all the same."
        f"{alone}"
    )


FIGURES = (
    ("step_time", "Time of a step", figures.draw_step_time, step_time_caption),
    ("scaling", "Speed-up and efficiency", curves.draw_scaling, scaling_caption),
    ("bytes", "Bytes sent", figures.draw_bytes, _BYTES_CAPTION),
    ("loss", "Loss over steps", curves.draw_loss, loss_caption),
    ("memory", "Peak memory", figures.draw_memory, _MEMORY_CAPTION),
    ("prediction", "Predicted against measured", curves.draw_prediction, prediction_caption),
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
        label = f"{sync} on {nodes_text(len(timeline.get('ranks') or []))}{at}"
        words = timeline_caption(timeline)
        drawn = _drawn(
            folder,
            Drawing(
                f"timeline-{safe_name(key)}",
                f"{key}: {share_text(mean_overlap(timeline))}",
                words,
                f"One step of {label} as lanes. {words}",
            ),
            partial(draw_timeline, timeline, label=label, emulated=emulated),
        )
        yield replace(drawn, title=f"{key}: {label}") if drawn.missing else drawn


def timeline_caption(timeline: Mapping[str, Any]) -> str:
    """Return which step it is, and the overlap of the first 8 ranks."""
    ranks = timeline.get("ranks") or []
    texts = "; ".join(
        f"rank {rank['rank']}: {percent(share)} ({len(rank.get('messages') or [])} messages)"
        for rank in ranks[:8]
        if (share := overlap(rank)) is not None
    )
    more = "; …" if texts and len(ranks) > 8 else ""
    return (
        f"Step {timeline.get('step')}, recorded with extra instruments and left out of the "
        "medians. Share of the messages' time that lies under backward: "
        f"{texts or 'no messages'}{more}."
    )
