"""The gallery of lesson 9: what the audit's wrong scripts do to a training on digits.

``python docs/learn/gallery.py`` trains with each wrong script and with its right one, draws their
losses, and writes the numbers that betray each into the gallery's pages.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from pictures import save

from common.say import listed, percent
from lab.learn.script_runs import RANKS, TRAINING_IMAGES, Trace, train
from lab.plot_style import INK, grid

GLOBAL_BATCH = 24
STEPS = 120
SEEDS = 5
RIGHT = "right_all_reduce"
PAGES = Path(__file__).parent

# The betraying numbers, in percent.
MEASURES = {
    "gradient": "gradient off by {:.1f} %",
    "weights": "ranks' weights {:.1f} % apart after a step",
    "distinct": "different samples in a step: {:.0f} % of the global batch",
    "order": "second epoch in the order of the first: {:.0f} %",
}


class Way(NamedTuple):
    """A way to be wrong.

    title : in the figure.
    right : the script that is right.
    measure : the name in MEASURES of what betrays the wrong one.
    """

    title: str
    right: str
    measure: str


# By the wrong script. The pages have this order, after number 1: a command line that fails.
WAYS = {
    "clip_norm_torch": Way("clipped before", "right_clip_norm_after", "gradient"),
    "literal_4": Way("a literal 4", RIGHT, "gradient"),
    "samples_no_sampler": Way("the same samples", RIGHT, "distinct"),
    "sum_all_reduce": Way("the sum", RIGHT, "gradient"),
    "weights_averaged_each_step": Way("weights averaged", RIGHT, "gradient"),
    "start_rank_0_seeded": Way("only rank 0 seeded", RIGHT, "weights"),
    "samples_order_without_set_epoch": Way("no set_epoch", RIGHT, "order"),
    "samples_batch_per_rank": Way("batch per rank", RIGHT, "distinct"),
    "scaled_in_loss_ddp": Way("divided twice", "right_ddp", "gradient"),
    "ddp_bypassed_module": Way("around DDP", "right_ddp", "weights"),
    "own_not_written_back": Way("mean in a copy", RIGHT, "weights"),
    "own_averaged_after_the_step": Way("after the step", RIGHT, "weights"),
    "own_scatter_of_the_wrong_list": Way("the wrong list", "right_gather_scatter", "weights"),
    "some_last_layer_left_out": Way("last layer left out", RIGHT, "gradient"),
    "stale_by_one_step": Way("one step late", RIGHT, "gradient"),
    "settings_lr_by_rank": Way("lr by rank", RIGHT, "weights"),
    "notice_summed_accumulation": Way("micro-batch sum", "right_ddp_no_sync", "gradient"),
}


Traces = Mapping[str, Sequence[Trace]]  # of the ranks, by script


def measure(name: str, ranks: Sequence[Trace], right: Sequence[Trace]) -> float:
    """Return a measure of MEASURES for a script's traces; ``right`` are those of the right one."""
    match name:
        case "gradient":
            return _gradient_error(ranks, right[0])
        case "weights":
            return max(_apart(rank.weights[0], ranks[0].weights[0]) for rank in ranks)
        case "order":
            epoch = TRAINING_IMAGES // RANKS  # samples that a rank draws
            first, second, *_ = np.split(np.array(ranks[0].drawn), [epoch, 2 * epoch])
            return float(np.mean(first == second))
    # "distinct": of all samples that the ranks draw in the first step.
    samples = {sample for rank in ranks for sample in rank.drawn[: rank.until[0]]}
    return len(samples) / GLOBAL_BATCH


def _gradient_error(ranks: Sequence[Trace], right: Trace) -> float:
    """Return the largest error of a rank's gradient, in the first step in which one differs."""
    for step, true in enumerate(right.gradients):
        error = max(_apart(rank.gradients[step], true) for rank in ranks)
        if error > 1e-3:
            return error
    return 0.0


def _apart(vector: NDArray, other: NDArray) -> float:
    """Return the norm of the difference over the norm of ``other``."""
    return float(np.linalg.norm(vector - other) / np.linalg.norm(other))


def describe(traces: Traces, seeds: Sequence[Trace]) -> dict[str, list[str]]:
    """Return for each way what its right and its wrong script did, as the pages show it.

    seeds : the right script's traces with several seeds: how much equal programs differ.
    """
    described: dict[str, list[str]] = {}
    for script, way in WAYS.items():
        right = _outcome(way, traces[way.right], traces[way.right])
        wrong = _outcome(way, traces[script], traces[way.right])
        seen_in = _seen_in(traces[way.right][0], traces[script][0], seeds)
        described[script] = [right, f"{wrong}. Seen in: **{seen_in}**"]
    return described


def _outcome(way: Way, ranks: Sequence[Trace], right: Sequence[Trace]) -> str:
    """Return what a script did: its betraying number, and its test at the end."""
    number = MEASURES[way.measure].format(100 * measure(way.measure, ranks, right))
    end = ranks[0].tests[-1]
    return f"{number}; test loss {end.loss:.2f}, accuracy {percent(end.accuracy)}"


def _seen_in(right: Trace, wrong: Trace, seeds: Sequence[Trace]) -> str:
    """Return in which of loss and accuracy the wrong one differs more than equal programs do."""
    seen: list[str] = []
    for name in ("loss", "accuracy"):
        usual = np.ptp([getattr(trace.tests[-1], name) for trace in seeds])
        difference = getattr(wrong.tests[-1], name) - getattr(right.tests[-1], name)
        if abs(difference) > usual:
            seen.append(name)
    return listed(seen) or "only the first number"


_WRONG_LINE: dict[str, Any] = {
    "color": "#d1242f",
    "linewidth": 0.9,
    "label": "the wrong script, a line a rank",
}
_RIGHT_LINE: dict[str, Any] = {
    "color": INK,
    "linewidth": 1.1,
    "linestyle": (0, (3, 2)),
    "label": "the right script",
}


def draw(traces: Traces, seeds: Sequence[Trace]) -> Figure:
    """Draw the test loss over the steps: each wrong script's ranks beside its right script."""
    figure, axes = grid(
        len(WAYS) + 1, narrow=False, columns=6, height=1.4, extra=0.5, sharex=True, sharey=True
    )
    _draw_panel(axes[0], f"right, {SEEDS} seeds", [], seeds)
    for number, (axis, (script, way)) in enumerate(zip(axes[1:], WAYS.items(), strict=True), 2):
        _draw_panel(axis, f"{number}. {way.title}", traces[script], traces[way.right][:1])
    axes[0].set(yscale="log", ylim=(0.06, 4), xticks=[0, STEPS // 2, STEPS])
    figure.supylabel("test loss, by step", fontsize=8)
    handles = [Line2D([], [], **style) for style in (_WRONG_LINE, _RIGHT_LINE)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _draw_panel(axis: Axes, name: str, wrong: Sequence[Trace], right: Sequence[Trace]) -> None:
    axis.set_title(name, fontsize=7.5)
    for traces, style in ((wrong, _WRONG_LINE), (right, _RIGHT_LINE)):
        for trace in traces:
            steps, losses, _ = zip(*trace.tests, strict=True)
            axis.plot(steps, losses, **style)
    axis.grid()


def make_gallery() -> Figure:
    """Train, write the numbers into the gallery's pages, and return the figure."""
    rights = {way.right for way in WAYS.values()}
    traces = train([*rights, *WAYS], steps=STEPS)
    seeds = [train([RIGHT], steps=STEPS, seed=seed)[RIGHT][0] for seed in range(SEEDS)]
    described = describe(traces, seeds)
    for page in PAGES.glob("gallery*.md"):
        text = page.read_text(encoding="utf-8")
        for wrong, outcomes in described.items():
            row = rf"(?<=\| wrong: `{wrong}` \|\n\| --- \| --- \|\n)(.*\n)\|.*"
            text = re.sub(row, rf"\1| {' | '.join(outcomes)} |", text)
        page.write_text(text, encoding="utf-8")
    return draw(traces, seeds)


if __name__ == "__main__":
    save(make_gallery, PAGES / "images/09_find_the_bug.svg")
