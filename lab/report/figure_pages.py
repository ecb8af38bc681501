"""Which figures there are, in their order, with the captions that the data carries; drawn to files and for the page."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.plot_style import Drawing, NothingToShowError, inline_only, save, style
from lab.report import curves, figures
from lab.report.losses import largest_difference
from lab.report.timeline import draw_timeline, mean_overlap, overlap, share_text
from lab.report.view import ComparisonGroup, percent, rate_text, safe_name, seconds_text


@dataclass(frozen=True)
class MissingFigure:
    """A figure that cannot be drawn, and why."""

    name: str
    title: str
    reason: str


Draw = Callable[..., Figure]
Caption = Callable[[ComparisonGroup], str]


def step_time_caption(block: ComparisonGroup) -> str:
    text = (
        "Medians over the repeats of the mean over the ranks, one section after the other. Sync is what is exposed: waiting "
        "for the slowest rank's last gradient (hatched), then the wire. The tick is the median of the whole step; "
    )
    single = [row for row in block.measured if not row.interval("step")]
    if len(single) == len(block.measured):
        return text + "one repeat, so there is no interval."
    text += "the whisker the 95 % interval over repeats"
    text += ", where there is more than one." if single else "."
    cut = max(figures.whisker_ends(block)) > figures.axis_end(block)
    return text + (" Some whiskers are longer than the figure." if cut else "")


def scaling_caption(block: ComparisonGroup) -> str:
    what = (
        "one node's step time over this one's, at the same global batch"
        if block.scaling == "strong"
        else "samples a second over one node's, at the same batch a node"
    )
    one = block.baseline
    shown = f" (one node: {seconds_text(one.step, one.step)} s a step)" if one else ""
    return (
        f"Each panel is a strategy: {what}{shown}. The dashed line is ideal, the faint ones are the others; the percentages "
        "are the efficiency, that is the share of the ideal. Whiskers reach to the far ends of both 95 % intervals."
    )


def bytes_caption(block: ComparisonGroup) -> str:
    return (
        "Payload counted where the strategies send, a step (periodic strategies: mean over their period), without the "
        "headers of TCP and IP. The square is rank 0, the circle the mean of the others; a square within its circle sends "
        "as much as they do."
    )


def loss_caption(block: ComparisonGroup) -> str:
    parts = []
    for nodes in block.nodes_beyond_one:
        found = largest_difference([row for row in block.at(nodes) if row.exact])
        if found and found.value == 0:
            parts.append(f"none on {nodes} nodes")
        elif found:
            parts.append(
                f"{found.value:.2g} on {nodes} nodes (step {found.step}, {found.one} against {found.other})"
            )
    largest = ""
    if parts:
        largest = f" Largest difference between exact strategies at the same step and seed: {'; '.join(parts)}."
    return (
        "Training loss over the global batch, of one seed. Exact strategies must lie on one another, and are drawn as one "
        f"line where the eye could not tell them apart; those that are not exact are dashed.{largest}"
    )


def memory_caption(block: ComparisonGroup) -> str:
    return (
        "Resident memory of a process at its peak, of all that it holds: interpreter, libraries, data, model. Bars are the "
        "mean over the ranks, ticks the rank that took most."
    )


def prediction_caption(block: ComparisonGroup) -> str:
    one = block.baseline
    alone = ""
    if one and one.predicted and block.nodes != [1]:
        predicted, measured = (seconds_text(value, one.step) for value in (one.predicted, one.step))
        alone = f" One node, not drawn: predicted {predicted} s, measured {measured} s."
    return (
        "Each point is a cell; on the line the prediction was right, in the band within 20 % of the measured. Filled: in the "
        f"scope of the model; hollow: out of it, shown all the same.{alone}"
    )


FIGURES: tuple[tuple[str, str, Draw, Caption], ...] = (
    ("step_time", "Time of a step", figures.draw_step_time, step_time_caption),
    ("scaling", "Speed-up and efficiency", curves.draw_scaling, scaling_caption),
    ("bytes", "Bytes sent", figures.draw_bytes, bytes_caption),
    ("loss", "Loss over steps", curves.draw_loss, loss_caption),
    ("memory", "Peak memory", figures.draw_memory, memory_caption),
    ("prediction", "Predicted against measured", curves.draw_prediction, prediction_caption),
)


def draw_block(folder: Path, block: ComparisonGroup) -> dict[str, Drawing | MissingFigure]:
    """Draw every figure of ``block`` into ``folder`` as PNG and SVG, and return them for the page by name."""
    return {
        name: _drawn(folder, name + block.suffix, heading, block, draw, caption)
        for name, heading, draw, caption in FIGURES
    }


def _drawn(
    folder: Path, name: str, heading: str, block: ComparisonGroup, draw: Draw, caption: Caption
) -> Drawing | MissingFigure:
    try:
        wide, narrow = _draw_and_save(folder, name, partial(draw, block))
    except NothingToShowError as error:
        return MissingFigure(name, heading, str(error))
    words = caption(block)
    what = f"{heading}, {block.label}" if block.label else heading
    return Drawing(
        name, heading, words, f"{what}: {words} The table has the numbers.", wide, narrow
    )


def _draw_and_save(folder: Path, name: str, draw: Draw) -> tuple[str, str]:
    """Write the figure for a wide page into ``folder``; return the SVG for a wide and for a narrow page."""
    with style():
        wide, narrow = draw(narrow=False), draw(narrow=True)
        return save(wide, folder / name), inline_only(narrow, f"{name}-narrow")


def draw_timelines(folder: Path, results: Mapping[str, Any]) -> Iterator[Drawing | MissingFigure]:
    """Draw the recorded step of each cell that has one, in the cells' order, those of one node, without messages, last."""
    timelines, emulated = results.get("timelines") or {}, bool(results.get("emulated"))
    ordered = sorted(results.get("cells") or [], key=lambda cell: cell["nodes"] == 1)
    cells = {cell["id"]: cell for cell in ordered}
    keys = [key for key in cells if key in timelines]
    keys += [key for key in timelines if key not in cells]
    for key in keys:
        timeline, cell, name = timelines[key], cells.get(key), f"timeline-{safe_name(key)}"
        nodes = len(timeline.get("ranks") or [])
        label = f"{(cell or timeline).get('sync', key)} on {nodes} node{'s' if nodes != 1 else ''}"
        if cell is not None and cell.get("rate") is not None:
            label += f" at {rate_text(cell['rate'])}"
        draw = partial(draw_timeline, timeline, label=label, emulated=emulated)
        try:
            wide, narrow = _draw_and_save(folder, name, draw)
        except NothingToShowError as error:
            yield MissingFigure(name, f"{key}: {label}", str(error))
            continue
        words = timeline_caption(timeline)
        heading = f"{key}: {share_text(mean_overlap(timeline))}"
        yield Drawing(name, heading, words, f"One step of {label} as lanes. {words}", wide, narrow)


def timeline_caption(timeline: Mapping[str, Any]) -> str:
    """Say which step it is, and the overlap of each rank."""
    shares = [
        (rank["rank"], overlap(rank), len(rank.get("messages") or []))
        for rank in timeline.get("ranks") or []
    ]
    texts = "; ".join(
        f"rank {rank}: {percent(share)} ({count} messages)"
        for rank, share, count in shares[:8]
        if share is not None
    )
    more = "; …" if texts and len(shares) > 8 else ""
    return (
        f"Step {timeline.get('step')}, recorded with extra instruments and left out of the medians. Share of the messages' "
        f"time that lies under backward: {texts or 'no messages'}{more}."
    )
