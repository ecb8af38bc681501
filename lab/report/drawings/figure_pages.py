"""The list of figures with their captions; draws them to files and for the page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from common.runs import TimelineFile
from common.say import listed, percent
from lab.plot_style import NothingToShowError, style
from lab.report.drawings import figures
from lab.report.drawings.curves import draw_iterations, draw_loss, draw_ranks
from lab.report.drawings.svg import inline, save, svg
from lab.report.drawings.timeline_figure import Row, draw_timeline
from lab.report.timeline import mean_overlap, overlap
from lab.report.view import CellRow, ComparisonGroup, link_text


class Drawing(NamedTuple):
    """A figure of the page as SVG for wide and narrow screens, or why it is ``missing``."""

    name: str  # of its files, without suffix
    title: str
    caption: str
    wide: str = ""
    narrow: str = ""
    missing: str = ""


Caption = str | Callable[[ComparisonGroup], str]

# By the name of its files: title, function and caption.
FIGURES: dict[str, tuple[str, Callable[..., Figure], Caption]] = {
    "step_time": (
        "Time of a step",
        figures.draw_step_time,
        "Each bar is a step: the median of each section over the repeats, one after the other, and "
        "in grey the time outside the sections (metrics, records, Python). Sync is the "
        "communication that is exposed, a mean over the ranks: first waiting for the slowest "
        "rank's last gradient (hatched), then the exchange. What the strategy computes between its "
        "messages stands apart where a step was recorded; else it is a part of the exchange. "
        "Where the sections sum up to more than the step, the excess is pale. The tick is the "
        "whole step, the mean over the repeats; the line across it is its 95 % interval, cut at "
        "the figure's end, and absent for one repeat. A strategy with a wrong result has a cross "
        "before its name.",
    ),
    "scaling": (
        "Speed-up and efficiency",
        figures.draw_scaling,
        "The number is the speed-up: samples per second divided by one rank's, which at the same "
        "global batch is one rank's time divided by this cell's. The point is the "
        "efficiency, the speed-up divided by the number of ranks. A cell left of the dotted line "
        "is slower than one rank. The lines combine the 95 % intervals of both times.",
    ),
    "bytes": (
        "Bytes sent",
        figures.draw_bytes,
        figures.bytes_caption,
    ),
    "ranks": (
        "Over the number of ranks",
        draw_ranks,
        "The step, and the speed-up: how many times as many samples a second as one rank. "
        "Ideal is N times with N ranks. Lines lead from the single rank to each strategy.",
    ),
    "iterations": (
        "Time of each iteration",
        draw_iterations,
        "The time of every step of a strategy's first run on rank 0, without the first step, as "
        "the assignment asks. Even steps show a quiet machine; single peaks are other programs, or "
        "steps that --timeline recorded. The medians leave recorded steps out.",
    ),
    "loss": (
        "Loss over steps",
        draw_loss,
        "Training loss over the global batch, of one seed. Strategies that claim to be exact must "
        "have the same loss; they are drawn as one line where no difference is visible. The "
        "others are dashed.",
    ),
}


def draw_block(folder: Path, block: ComparisonGroup) -> Iterator[Drawing]:
    """Draw every figure of ``block`` into ``folder``, and yield them for the page."""
    label = f", {block.label}" if block.label else ""
    for name, (title, draw, caption) in FIGURES.items():
        text = caption(block) if callable(caption) else caption
        described = Drawing(name + block.suffix, title + label, text)
        yield _drawn(folder, described, partial(draw, block))


def _drawn(folder: Path, described: Drawing, draw: Callable[..., Figure]) -> Drawing:
    """Write the figure's files; return ``described`` with its SVG, or why it is missing."""
    name = described.name
    try:
        with style():
            wide = draw(narrow=False)
            narrow = draw(narrow=True)
            small = inline(svg(narrow), f"{name}-narrow")
            return described._replace(wide=save(wide, folder / name), narrow=small)
    except NothingToShowError as error:
        return described._replace(missing=str(error))


def draw_timelines(
    folder: Path, groups: Sequence[ComparisonGroup], timelines: Mapping[str, TimelineFile]
) -> Iterator[Drawing]:
    """Draw each cell's recorded step, cells of one rank last, since they send no messages.

    timelines : by the cells' ids.
    """
    by_id = {row.cell.id: (row, block) for block in groups for row in block.rows}
    for row, block in sorted(by_id.values(), key=lambda drawn: drawn[0].nodes == 1):
        if row.cell.id not in timelines:
            continue
        timeline = timelines[row.cell.id]
        title = _timeline_title(row, timeline)
        described = Drawing(f"timeline-{row.cell.id}", title, _timeline_caption(timeline))
        rows = [Row(_lane_name(row, rank.rank), rank, timeline.ranks) for rank in timeline.ranks]
        draw = partial(draw_timeline, rows, heading=title, emulated=block.emulated)
        yield _drawn(folder, described, draw)


def _lane_name(row: CellRow, rank: int) -> str:
    """Return the name of a rank's lane, with its node if that has several ranks."""
    if row.cell.ranks_per_node == 1:
        return f"rank {rank}"
    return f"node {rank // row.cell.ranks_per_node}, rank {rank}"


def _timeline_title(row: CellRow, timeline: TimelineFile) -> str:
    label = row.name
    if row.cell.rate is not None:
        label += f" at {link_text(row.cell.rate)}"
    hidden = mean_overlap(timeline.ranks)
    if hidden is None:
        return f"{label}: no messages"
    return f"{label}: {percent(hidden)} of the message time is hidden behind backward"


def _timeline_caption(timeline: TimelineFile) -> str:
    known = [(rank, share) for rank in timeline.ranks if (share := overlap(rank)) is not None]
    shares = [
        f"rank {rank.rank}: {percent(share)} ({len(rank.messages)} messages)"
        for rank, share in known
    ]
    return (
        f"Step {timeline.step}, recorded with extra timers and not counted in the medians. Share "
        "of the message time before the rank's last gradient: "
        f"{listed(shares, most=8) or 'no messages'}."
    )
