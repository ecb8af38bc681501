"""The lessons' pictures: ``python -m lab.learn.pictures`` draws them all into docs/learn/images/.

``PICTURES`` lists them. All are computed, so that they come out the same everywhere. A picture is
one SVG file that follows its reader's light or dark mode.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from common.profiling.records import RankTimeline, SentMessage
from common.utils.paths import REPOSITORY
from lab.plot_style import DASHES, INK, PAPER, grid, style, title
from lab.report.drawings.svg import svg
from lab.report.drawings.timeline_figure import Row, draw_timeline

Json = Mapping[str, Any]

_MODES = (
    "<style>svg{--ink:#1b1f23;--paper:#fffffe}@media(prefers-color-scheme:dark)"
    "{svg{--ink:#e6edf3;--paper:#0d1117}}</style>\n"
)
# Letters, each with its place: x and y. In a timeline y = 0.5 is the middle of the first rank.
Marks = Mapping[str, tuple[float, float]]


def main(folder: Path = REPOSITORY / "docs/learn/images") -> None:
    """Draw every picture into a folder."""
    for name, draw in PICTURES.items():
        save(draw, folder / f"{name}.svg")


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a picture, and write it as SVG that follows light and dark mode."""
    with style(), rc_context({"axes.formatter.min_exponent": 5}):  # 0.1 at a log axis, not 10⁻¹
        text = svg(draw()).replace(INK, "var(--ink)").replace(PAPER, "var(--paper)")
    path.write_text(text.replace(" <defs>", f" {_MODES} <defs>", 1), encoding="utf-8")


def timeline(
    heading: str, ranks: Sequence[Json], *, marks: Marks, labels: Sequence[str] | None = None
) -> Figure:
    """Return a timeline of ranks, each with its ``sections`` and ``messages`` in seconds.

    labels : of the rows, if each is a step of its own.
    """
    steps = [_recorded(rank) for rank in ranks]
    if labels is None:
        rows = [Row(f"rank {number}", step, steps) for number, step in enumerate(steps)]
    else:
        rows = [Row(label, step, []) for label, step in zip(labels, steps, strict=True)]
    figure = draw_timeline(rows, heading=heading, narrow=False, emulated=False)
    return _marked(figure, marks)


def _recorded(rank: Json) -> RankTimeline:
    """Return a step as a run records it; a picture shows no bytes."""
    messages = [
        SentMessage(message["kind"], 0, 0.0, message["begin"], message["end"])
        for message in rank["messages"]
    ]
    return RankTimeline(rank=0, sections=rank["sections"], messages=messages)


def curves(
    heading: str,
    formulas: Mapping[str, Callable[[float], float]],
    *,
    xs: Sequence[float],
    labels: tuple[str, str],
    marks: Marks,
    top: float,
    bottom: float = 0.0,
    scales: tuple[str, str] = ("linear", "linear"),
) -> Figure:
    """Return the curves of some formulas by their label, for y from ``bottom`` to ``top``.

    labels, scales : of x and y.
    """
    figure, (axis,) = grid(1, narrow=False, columns=1, height=3.2)
    for dash, (label, formula) in zip(("-", *DASHES), formulas.items(), strict=False):
        axis.plot(xs, [*map(formula, xs)], color=INK, linestyle=dash, label=label)
    axis.set(
        xlabel=labels[0],
        ylabel=labels[1],
        xscale=scales[0],
        yscale=scales[1],
        xlim=(xs[0], xs[-1]),
        ylim=(bottom, top),
    )
    axis.grid()
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    title(figure, heading, emulated=False)
    return _marked(figure, marks)


def _marked(figure: Figure, marks: Marks) -> Figure:
    circle = {"boxstyle": "circle", "facecolor": PAPER, "edgecolor": INK}
    for letter, place in marks.items():
        figure.axes[0].annotate(letter, place, ha="center", va="center", bbox=circle)
    return figure


# VGG-11's gradients on a link of 1 Gbit/s.
_SECONDS = 36.92 * 8 / 1000


def _through_root(*turns: int) -> Json:
    """Return a rank's step of lesson 3; its link works in some of two turns in and two out."""
    return {
        "sections": {"forward": [(0, 0.07)], "backward": [(0.07, 0.2)]},
        "messages": [
            {
                "kind": "gather" if turn < 2 else "scatter",
                "begin": 0.2 + turn * _SECONDS,
                "end": 0.195 + (turn + 1) * _SECONDS,  # a gap
            }
            for turn in turns
        ],
    }


def _exchange(nodes: float, *, gbit: float = 1.0) -> float:
    """Return the seconds of a step: 0.6 s of compute, shared, and all gradients through rank 0."""
    return 0.6 / nodes + 2 * (nodes - 1) * _SECONDS / gbit


def _overlapped(buckets: Sequence[tuple[int, float]]) -> Json:
    """Return a step of lesson 6. buckets : the layer of 7 after which each is full, and its MB."""
    messages, end = [], 0.0
    for layer, mb in buckets:
        begin = max(end, 0.015 * layer)
        end = begin + 1.5 * mb * 8 / 1000
        messages.append({"kind": "all_reduce", "begin": begin, "end": end - 0.002})  # a gap
    return {"sections": {"backward": [(0, 0.105)], "sync": [(0.105, end)]}, "messages": messages}


def _recorded_step() -> Json:
    """Return rank 0's step with ``overlapped`` from the sample report."""
    found = (REPOSITORY / "reports/samples/compare-digits-1gbit/results.json").read_text("utf-8")
    return json.loads(found)["timelines"]["overlapped-n4-1gbit"]["ranks"][0]


def _steps(*sync: float) -> Json:
    """Return steps of lesson 10: 0.1 s of computing, then an exchange of these seconds."""
    ends = list(accumulate(0.1 + seconds for seconds in sync))
    begins = [end - seconds for end, seconds in zip(ends, sync, strict=True)]
    return {
        "sections": {
            "forward": [(begin - 0.1, begin) for begin in begins],  # without a last gradient
            "sync": list(zip(begins, ends, strict=True)),
        },
        "messages": [],
    }


PICTURES: Mapping[str, Callable[[], Figure]] = {
    "01_one_process": partial(
        timeline,
        "A step of one process: forward 0.65 ms, backward 1.11 ms, update 0.30 ms",
        [
            {
                "sections": {
                    "forward": [(0, 0.65e-3)],
                    "backward": [(0.65e-3, 1.76e-3)],
                    "update": [(1.76e-3, 2.06e-3)],
                },
                "messages": [],
            }
        ],
        marks={"A": (0.325, 0.5), "B": (1.2, 0.5), "C": (1.91, 0.5)},
    ),
    "02_two_ranks": partial(
        curves,
        "Samples that rank 0 has seen at least once",
        {
            "2 ranks, set_epoch": lambda epochs: 100 * (1 - 0.5**epochs),
            "4 ranks, set_epoch": lambda epochs: 100 * (1 - 0.75**epochs),
            "2 ranks, one order forever": lambda epochs: 50.0 * (epochs > 0),
            "4 ranks, one order forever": lambda epochs: 25.0 * (epochs > 0),
        },
        xs=range(9),
        labels=("epochs", "%"),
        marks={"A": (3, 87.5), "B": (3, 50)},
        top=100,
    ),
    "03_gather_scatter": lambda: timeline(
        "A step on 3 nodes at 1 Gbit/s, by the formula: 0.2 s of compute, 1.18 s of exchange",
        [_through_root(0, 1, 2, 3), _through_root(0, 2), _through_root(1, 3)],
        marks={
            "A": (200, 0.5),
            "B": (200 + 2000 * _SECONDS, 0.5),
            "C": (200 + 4000 * _SECONDS, 0.5),
            "D": (640, 3.35),
        },
    ),
    "04_root_link": partial(
        curves,
        "A step of VGG-11 with all gradients through rank 0, by the formula",
        {
            "1 Gbit/s": _exchange,
            "10 Gbit/s": partial(_exchange, gbit=10),
            "100 Gbit/s": partial(_exchange, gbit=100),
            "compute alone": lambda nodes: 0.6 / nodes,
        },
        xs=range(1, 17),
        labels=("nodes", "seconds a step"),
        marks={
            "A": (4, _exchange(4)),
            "B": (3, _exchange(3, gbit=10)),
            "C": (10, _exchange(10, gbit=100)),
        },
        bottom=0.03,
        top=10,
        scales=("linear", "log"),
    ),
    "05_ring": partial(
        curves,
        "Gradients of 34 tensors on 8 nodes, 1 Gbit/s and 0.5 ms a message, by the formula",
        {
            # 8 ms a MB; a message waits for 0.5 ms, and in a ring carries an eighth
            "through rank 0": lambda mb: 2 * 0.5 + 14 * 8 * mb,
            "34 rings": lambda mb: 14 * (34 * 0.5 + 8 * mb / 8),
            "one ring": lambda mb: 14 * (0.5 + 8 * mb / 8),
            "one ring, latency alone": lambda mb: 14 * 0.5,
        },
        xs=[10 ** (exponent / 20) for exponent in range(-20, 41)],
        labels=("MB of gradients", "milliseconds a step"),
        marks={"A": (1, 21), "B": (0.3, 242), "C": (36.92, 524), "D": (2.42, 272)},
        bottom=3,
        top=10_000,
        scales=("log", "log"),
    ),
    "06_overlap": lambda: timeline(
        "A step on 4 nodes at 1 Gbit/s, by the formula",
        [
            _overlapped(list(enumerate([9.4, 9.4, 9.4, 4.7, 2.4, 1.2, 0.3], 1))),
            _overlapped([(1, 9.4), (2, 9.4), (3, 9.4), (7, 8.6)]),
            _overlapped([(2, 18.8), (7, 18.0)]),
            _overlapped([(7, 36.8)]),
        ],
        labels=["1 MB", "9 MB", "25 MB", "100 MB"],
        marks={"A": (15, 3.4), "B": (105, 4.6), "C": (420, 3.4), "D": (105, 7.5)},
    ),
    "06_overlap_recorded": lambda: timeline(
        "A recorded step of VGG-11, 4 nodes at 1 Gbit/s: buckets of 9.5, 27.2 and 0.3 MB",
        [_recorded_step()],
        marks={"A": (110, 1.3), "B": (450, 1.9), "C": (250, 2.4)},
    ),
    "07_batchnorm": partial(
        curves,
        "What BatchNorm makes of a number",
        {
            "one process: 1, 3, 5, 11": lambda x: (x - 5) / 14**0.5,
            "rank 0: 1, 3": lambda x: x - 2.0,
            "rank 1: 5, 11": lambda x: (x - 8) / 3,
        },
        xs=range(13),
        labels=("the number", "after BatchNorm"),
        marks={"A": (3, 1), "B": (3, -0.53), "C": (11, 1.6), "D": (11, 1)},
        top=3,
        bottom=-3,
    ),
    "08_measuring": partial(
        curves,
        "A step of VGG-11 on 4 nodes if the network were faster than 1 Gbit/s, by the formula",
        {
            "gather_scatter": lambda times: 0.173 + 1.883 / times,
            "all_reduce": lambda times: 0.170 + 0.544 / times,
            "ddp": lambda times: 0.170 + 0.371 / times,
            "computing alone": lambda times: 0.170,
        },
        xs=range(1, 21),
        labels=("times as fast", "seconds a step"),
        marks={"A": (1, 2.056), "B": (10, 0.224), "C": (19, 0.19)},
        top=2.2,
    ),
    "10_break_it": lambda: timeline(
        "Lesson 10's program, disturbed in its sixth step, by the formula; blue: computing",
        [
            _steps(*[0.11] * 5, 0.1),
            _steps(*[0.11] * 5),
            _steps(*[0.11] * 5, 0.1),
            _steps(*[0.11] * 5, 6.0),
            _steps(*[0.11] * 5),
            _steps(*[0.11] * 5, 6.0),
            *[_steps(*[0.11] * 5, *[0.55] * 10)] * 3,
        ],
        labels=[
            f"{fault}: rank {rank}" for fault in ("kill", "pause", "slow") for rank in (0, 1, 2)
        ],
        marks={"A": (1250, 0.5), "B": (1050, 2.0), "C": (7150, 5.0), "D": (4000, 11.0)},
    ),
}

if __name__ == "__main__":
    main()
