"""The lessons' pictures: ``python docs/learn/pictures.py`` draws them all into docs/learn/images/.

``PICTURES`` lists them. All are computed, so that they come out the same everywhere. A picture is
one SVG file that follows its reader's light or dark mode.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from common.profiling.records import RankTimeline, SentMessage
from common.utils.paths import REPOSITORY
from lab.comparison.record import read_comparison
from lab.plot_style import DASHES, INK, PAPER, grid, style, title
from lab.report.drawings.svg import svg
from lab.report.drawings.timeline_figure import Row, draw_timeline
from lab.report.view import blocks

Json = Mapping[str, Any]

_MODES = (
    "<style>svg{--ink:#1b1f23;--paper:#fffffe}@media(prefers-color-scheme:dark)"
    "{svg{--ink:#e6edf3;--paper:#0d1117}}</style>\n"
)
# VGG-11's gradients on a link of 1 Gbit/s.
_SECONDS = 36.92 * 8 / 1000
Interval = tuple[float, float]
# Letters, each with its place: x and y. In a timeline y = 0.5 is the middle of the first rank.
Marks = Mapping[str, tuple[float, float]]


def main(folder: Path) -> None:
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
    """Return a timeline of ranks, each a ``_step``.

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
        ys = [formula(x) for x in xs]
        axis.plot(xs, ys, color=INK, linestyle=dash, label=label)
    x_label, y_label = labels
    axis.set(xlabel=x_label, ylabel=y_label)
    x_scale, y_scale = scales
    axis.set(xscale=x_scale, yscale=y_scale, xlim=(xs[0], xs[-1]), ylim=(bottom, top))
    axis.grid()
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    title(figure, heading, emulated=False)
    return _marked(figure, marks)


def _marked(figure: Figure, marks: Marks) -> Figure:
    """Return the figure with its letters."""
    circle = {"boxstyle": "circle", "facecolor": PAPER, "edgecolor": INK}
    for letter, place in marks.items():
        figure.axes[0].annotate(letter, place, ha="center", va="center", bbox=circle)
    return figure


# --- what a rank does in a step, in seconds ---


def _step(sections: Mapping[str, Sequence[Interval]], messages: Sequence[Json] = ()) -> Json:
    return {"sections": sections, "messages": messages}


def _message(kind: str, begin: float, end: float) -> Json:
    return {"kind": kind, "begin": begin, "end": end}


def _through_root(*turns: int) -> Json:
    """Return a rank's step of lesson 3; its link works in some of two turns in and two out."""
    messages: list[Json] = []
    for turn in turns:
        kind = "gather" if turn < 2 else "scatter"
        begin = 0.2 + turn * _SECONDS
        end = 0.195 + (turn + 1) * _SECONDS  # a gap
        messages.append(_message(kind, begin, end))
    return _step({"forward": [(0, 0.07)], "backward": [(0.07, 0.2)]}, messages)


def _overlapped(*buckets: tuple[int, float]) -> Json:
    """Return a step of lesson 6. buckets : the layer of 7 after which each is full, and its MB."""
    messages: list[Json] = []
    end = 0.0
    for layer, megabytes in buckets:
        begin = max(end, 0.015 * layer)
        end = begin + 1.5 * megabytes * 8 / 1000
        messages.append(_message("all_reduce", begin, end - 0.002))  # a gap
    return _step({"backward": [(0, 0.105)], "sync": [(0.105, end)]}, messages)


def _accumulated(*sends: bool) -> Json:
    """Return a step of lesson 11 under DDP. sends : of each micro-batch."""
    forward: list[Interval] = []
    backward: list[Interval] = []
    sync: list[Interval] = []
    messages: list[Json] = []
    now = 0.0
    for sent in sends:
        begun = now + 0.053
        ended = begun + 0.105
        forward.append((now, begun))
        backward.append((begun, ended))
        now = ended
        if sent:
            end = 0.0
            for complete, megabytes in ((0.015, 9.5), (0.098, 27.2), (0.105, 0.3)):
                begin = max(end, begun + complete)
                end = begin + 1.5 * megabytes * 8 / 1000
                messages.append(_message("all_reduce", begin, end - 0.002))  # a gap
            sync.append((ended, end))
            now = end
    return _step({"forward": forward, "backward": backward, "sync": sync}, messages)


_SAMPLE = REPOSITORY / "reports/samples/compare-digits-1gbit/results.json"


def _recorded_step() -> Json:
    """Return rank 0's step with ``overlapped`` from the sample report."""
    return json.loads(_SAMPLE.read_text("utf-8"))["timelines"]["overlapped-n4-1gbit"]["ranks"][0]


def _on_network(sync: str, times: float, *, share: float = 1) -> float:
    """Return the seconds of the sample's step on a network that is faster by ``times``.

    share : of the exposed communication that counts.
    """
    [block] = blocks(read_comparison(_SAMPLE))
    row = block.find(sync, 4)
    assert row is not None
    exposed = row.medians.sync
    return row.step - exposed + share * exposed / times


def _steps(*exchanges: float) -> Json:
    """Return steps of lesson 10: 0.1 s of computing, then an exchange of these seconds."""
    forward: list[Interval] = []  # without a last gradient
    sync: list[Interval] = []
    end = 0.0
    for seconds in exchanges:
        end += 0.1 + seconds
        begin = end - seconds
        forward.append((begin - 0.1, begin))
        sync.append((begin, end))
    return _step({"forward": forward, "sync": sync})


# --- formulas ---


def _exchange(nodes: float, *, gbit: float = 1.0) -> float:
    """Return the seconds of a step: 0.6 s of compute, shared, and all gradients through rank 0."""
    return 0.6 / nodes + 2 * (nodes - 1) * _SECONDS / gbit


# --- the pictures, by lesson ---


def _overlap() -> Figure:
    layers = [9.4, 9.4, 9.4, 4.7, 2.4, 1.2, 0.3]  # MB, in the order of backward
    steps = {
        "1 MB": _overlapped(*enumerate(layers, 1)),
        "9 MB": _overlapped((1, 9.4), (2, 9.4), (3, 9.4), (7, 8.6)),
        "25 MB": _overlapped((2, 18.8), (7, 18.0)),
        "100 MB": _overlapped((7, 36.8)),
    }
    return timeline(
        "A step on 4 nodes at 1 Gbit/s, by the formula",
        list(steps.values()),
        labels=list(steps),
        marks={"A": (15, 3.4), "B": (105, 4.6), "C": (420, 3.4), "D": (105, 7.5)},
    )


def _overlap_recorded() -> Figure:
    return timeline(
        "A recorded step of VGG-11, 4 nodes at 1 Gbit/s: buckets of 9.5, 27.2 and 0.3 MB",
        [_recorded_step()],
        marks={"1": (110, 1.3), "2": (450, 1.9), "3": (250, 2.4)},
    )


def _ddp() -> Figure:
    steps = {"every time": _accumulated(True, True), "no_sync": _accumulated(False, True)}
    return timeline(
        "A step of two micro-batches under DDP, 4 nodes at 1 Gbit/s, by the formula",
        list(steps.values()),
        labels=list(steps),
        marks={"A": (330, 0.5), "B": (830, 0.5), "C": (158, 3.4), "D": (500, 2.0)},
    )


def _break_it() -> Figure:
    usual = [0.11] * 5
    until_killed = _steps(*usual)
    survivor = _steps(*usual, 0.1)
    waiting = _steps(*usual, 6.0)
    slowed = _steps(*usual, *[0.55] * 10)
    steps = {
        "kill": [survivor, until_killed, survivor],
        "pause": [waiting, until_killed, waiting],
        "slow": [slowed, slowed, slowed],
    }
    return timeline(
        "Lesson 10's program, disturbed in its sixth step, by the formula; blue: computing",
        [step for ranks in steps.values() for step in ranks],
        labels=[f"{fault}: rank {rank}" for fault in steps for rank in range(3)],
        marks={"A": (1250, 0.5), "B": (1050, 2.0), "C": (7150, 5.0), "D": (4000, 11.0)},
    )


PICTURES: Mapping[str, Callable[[], Figure]] = {
    "01_one_process": partial(
        timeline,
        "A step of one process: forward 0.65 ms, backward 1.11 ms, update 0.30 ms",
        [
            _step(
                {
                    "forward": [(0, 0.65e-3)],
                    "backward": [(0.65e-3, 1.76e-3)],
                    "update": [(1.76e-3, 2.06e-3)],
                }
            )
        ],
        marks={"A": (0.325, 0.5), "B": (1.2, 0.5), "C": (1.91, 0.5)},
    ),
    "02_two_ranks": partial(
        curves,
        "Samples that rank 0 has seen at least once",
        {
            "2 ranks, set_epoch": lambda epochs: 100 * (1 - 0.5**epochs),
            "4 ranks, set_epoch": lambda epochs: 100 * (1 - 0.75**epochs),
            "2 ranks, one order forever": lambda epochs: min(50.0, 50.0 * epochs),
            "4 ranks, one order forever": lambda epochs: min(25.0, 25.0 * epochs),
        },
        xs=range(9),
        labels=("epochs", "%"),
        marks={"A": (3, 87.5), "B": (3, 50)},
        top=100,
    ),
    "03_gather_scatter": partial(
        timeline,
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
    # 8 ms a MB; a message waits for 0.5 ms, and in a ring carries an eighth
    "05_ring": partial(
        curves,
        "Gradients of 34 tensors on 8 nodes, 1 Gbit/s and 0.5 ms a message, by the formula",
        {
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
    "06_overlap": _overlap,
    "06_overlap_recorded": _overlap_recorded,
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
            **{
                sync: partial(_on_network, sync) for sync in ("gather_scatter", "all_reduce", "ddp")
            },
            "computing alone": partial(_on_network, "ddp", share=0),
        },
        xs=range(1, 21),
        labels=("times as fast", "seconds a step"),
        marks={"A": (1, 2.055), "B": (10, 0.225), "C": (19, 0.19)},
        top=2.2,
    ),
    "10_break_it": _break_it,
    "11_ddp": _ddp,
}

if __name__ == "__main__":
    main(Path(__file__).with_name("images"))
