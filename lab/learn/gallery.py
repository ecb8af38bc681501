"""The gallery of lesson 9: what the audit's wrong scripts do to a training on digits.

``python -m lab.learn.gallery`` trains with each wrong script and with its right one, draws their
losses, and writes the numbers that betray each into the gallery's pages.
"""

import contextlib
import io
import re
import runpy
import sys
import types
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from common.utils.paths import REPOSITORY
from lab.audit.cases import STARTER_CODE, read_scripts
from lab.learn.pictures import save
from lab.plot_style import INK, grid

RANKS, GLOBAL_BATCH, STEPS, SEEDS = 3, 24, 120, 5
TRAINING_IMAGES = 1440  # of 1797; the others are the test set
RIGHT = "right_all_reduce"
PAGES = REPOSITORY / "docs/learn"
_TEST_EVERY = 4  # steps
_KEPT = 2  # steps whose gradients and weights are kept: in the second, the first one's may arrive

# By the wrong script: its title, the right script, the measure that betrays it. The pages have
# this order, after number 1: a command line that fails.
WAYS = {
    "clip_norm_torch": ("clipped before", "right_clip_norm_after", "gradient"),
    "literal_4": ("a literal 4", RIGHT, "gradient"),
    "samples_no_sampler": ("the same samples", RIGHT, "distinct"),
    "sum_all_reduce": ("the sum", RIGHT, "gradient"),
    "weights_averaged_each_step": ("weights averaged", RIGHT, "gradient"),
    "start_rank_0_seeded": ("only rank 0 seeded", RIGHT, "weights"),
    "samples_order_without_set_epoch": ("no set_epoch", RIGHT, "order"),
    "samples_batch_per_rank": ("batch per rank", RIGHT, "distinct"),
    "scaled_in_loss_ddp": ("divided twice", "right_ddp", "gradient"),
    "ddp_bypassed_module": ("around DDP", "right_ddp", "weights"),
    "own_not_written_back": ("mean in a copy", RIGHT, "weights"),
    "own_averaged_after_the_step": ("after the step", RIGHT, "weights"),
    "own_scatter_of_the_wrong_list": ("the wrong list", "right_gather_scatter", "weights"),
    "some_last_layer_left_out": ("last layer left out", RIGHT, "gradient"),
    "stale_by_one_step": ("one step late", RIGHT, "gradient"),
    "settings_lr_by_rank": ("lr by rank", RIGHT, "weights"),
    "notice_summed_accumulation": ("micro-batch sum", "right_ddp_no_sync", "gradient"),
}

MEASURES = {
    "gradient": "gradient off by {:.1f} %",
    "weights": "ranks' weights {:.1f} % apart after a step",
    "distinct": "different samples in a step: {:.0f} % of the global batch",
    "order": "second epoch in the order of the first: {:.0f} %",
}

# What one rank did: the samples ``drawn``, and how many ``until`` each step; the flat
# ``gradients`` and ``weights`` of the first steps; ``tests`` of (step, test loss, accuracy).
Trace = dict[str, list[Any]]
Traces = Mapping[str, Sequence[Trace]]  # of the ranks, by script


def train(names: Sequence[str], *, steps: int = STEPS, seed: int = 0) -> dict[str, list[Trace]]:
    """Train with each script in turn, on ranks of one group; return each rank's trace by script."""
    from lab.proofs import run_ranks

    bodies = [read_scripts()[name].body for name in names]
    found = run_ranks(RANKS, _train_here, bodies, steps, seed, timeout_seconds=600)
    return {name: [rank[index] for rank in found] for index, name in enumerate(names)}


def _train_here(rank: int, bodies: Sequence[str], steps: int, seed: int) -> list[Trace]:
    """Run the scripts on this rank, with digits in place of the starter code's noise."""
    import torch
    from sklearn.datasets import load_digits

    pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = (pixels.float().reshape(-1, 1, 8, 8) / 8 - 1).expand(-1, 3, -1, -1)
    sys.argv = ["main.py", "--num-nodes", f"{RANKS}", "--rank", f"{rank}"]
    traces = []
    for body in bodies:
        torch.manual_seed(seed + rank)  # what a script that seeds nothing starts from
        text = body.replace("manual_seed(0)", f"manual_seed({seed})").replace(
            "dist.destroy_process_group()",
            "",  # the next script needs it
        )
        traces.append(_run(text, images[order], labels[order], steps))
    return traces


def _run(body: str, images: Any, labels: Any, steps: int) -> Trace:
    import torch
    from torch.nn.utils import parameters_to_vector
    from torch.optim import optimizer
    from torch.utils.data import TensorDataset

    class Pictures(TensorDataset):
        def __init__(self, samples: int = TRAINING_IMAGES) -> None:
            super().__init__(images[:samples], labels[:samples])

        def __getitem__(self, index: int) -> Any:
            trace["drawn"].append(index)
            return super().__getitem__(index)

    def make_model(*extra: Any) -> Any:
        models.append(starter_code["make_model"](*extra))
        return models[-1]

    def after_step(*_: Any) -> None:
        parameters = list(models[-1].parameters())
        trace["until"].append(len(trace["drawn"]))
        step = len(trace["until"])
        if step <= _KEPT:
            trace["weights"].append(parameters_to_vector(parameters).detach().numpy())
            trace["gradients"].append(parameters_to_vector(p.grad for p in parameters).numpy())
        if step % _TEST_EVERY == 0:
            with torch.no_grad():
                outputs, true = models[-1](images[TRAINING_IMAGES:]), labels[TRAINING_IMAGES:]
            loss = torch.nn.functional.cross_entropy(outputs, true).item()
            trace["tests"].append((step, loss, (outputs.argmax(1) == true).float().mean().item()))
        if step == steps:
            sys.exit()

    trace: Trace = defaultdict(list)
    models: list[Any] = []
    starter_code = runpy.run_path(str(STARTER_CODE))
    own: dict[str, Any] = {"Pictures": Pictures, "make_model": make_model, "join": lambda _: None}
    student: Any = types.SimpleNamespace(**starter_code | own)
    sys.modules["student"] = student
    hook = optimizer.register_optimizer_step_post_hook(after_step)
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(body, "main.py", "exec"), {"__name__": "__main__"})
    hook.remove()
    return trace


def measure(name: str, ranks: Sequence[Trace], right: Sequence[Trace]) -> float:
    """Return a measure of MEASURES for a script's traces; ``right`` are those of the right one."""
    match name:
        case "gradient":  # in the first step in which a rank's differs
            steps = zip(*(one["gradients"] for one in [*ranks, right[0]]), strict=True)
            errors = [max(_apart(one, true) for one in own) for *own, true in steps]
            return next((error for error in errors if error > 1e-3), 0.0)
        case "weights":
            return max(_apart(one["weights"][0], ranks[0]["weights"][0]) for one in ranks)
        case "order":
            first, second, *_ = np.split(np.array(ranks[0]["drawn"]), [480, 960])
            return float(np.mean(first == second))
    return len({index for one in ranks for index in one["drawn"][: one["until"][0]]}) / GLOBAL_BATCH


def _apart(one: NDArray, other: NDArray) -> float:
    """Return the norm of the difference over the norm of ``other``."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def describe(traces: Traces, seeds: Sequence[Trace]) -> dict[str, list[str]]:
    """Return for each way what its right and its wrong script did, as the pages show it.

    seeds : the right script's traces with several seeds: how much equal programs differ.
    """
    usual, found = np.ptp([one["tests"][-1][1:] for one in seeds], axis=0), {}
    for wrong, (_, right, name) in WAYS.items():
        ends = [np.array(traces[script][0]["tests"][-1][1:]) for script in (right, wrong)]
        seen = np.array(["loss", "accuracy"])[np.abs(ends[1] - ends[0]) > usual]
        texts = [
            MEASURES[name].format(100 * measure(name, traces[script], traces[right]))
            + f"; test loss {loss:.2f}, accuracy {100 * accuracy:.0f} %"
            for script, (loss, accuracy) in zip((right, wrong), ends, strict=True)
        ]
        texts[1] += f". Seen in: **{' and '.join(seen) or 'only the first number'}**"
        found[wrong] = texts
    return found


def draw(traces: Traces, seeds: Sequence[Trace]) -> Figure:
    """Draw the test loss over the steps: each wrong script's ranks beside its right script."""
    figure, axes = grid(
        len(WAYS) + 1, narrow=False, columns=6, height=1.4, extra=0.5, sharex=True, sharey=True
    )
    styles: list[dict[str, Any]] = [
        {"color": "#d1242f", "linewidth": 0.9, "label": "the wrong script, a line a rank"},
        {"color": INK, "linewidth": 1.1, "linestyle": (0, (3, 2)), "label": "the right script"},
    ]
    panels = [(f"right, {SEEDS} seeds", (), seeds)] + [
        (f"{number}. {title}", traces[wrong], traces[right][:1])
        for number, (wrong, (title, right, _)) in enumerate(WAYS.items(), 2)
    ]
    for axis, (title, wrong, right) in zip(axes, panels, strict=True):
        axis.set_title(title, fontsize=7.5)
        for style, some in zip(styles, (wrong, right), strict=True):
            for one in some:
                axis.plot(*np.array(one["tests"])[:, :2].T, **style)
        axis.grid()
    axes[0].set(yscale="log", ylim=(0.06, 4), xticks=[0, STEPS // 2, STEPS])
    figure.supylabel("test loss, by step", fontsize=8)
    figure.legend(
        handles=[Line2D([], [], **style) for style in styles], loc="outside lower center", ncols=2
    )
    return figure


def make_gallery() -> Figure:
    """Train, write the numbers into the gallery's pages, and return the figure."""
    traces = train([*{right for _, right, _ in WAYS.values()}, *WAYS])
    seeds = [train([RIGHT], seed=seed)[RIGHT][0] for seed in range(SEEDS)]
    for page in PAGES.glob("gallery*.md"):
        text = page.read_text(encoding="utf-8")
        for wrong, sides in describe(traces, seeds).items():
            row = rf"(?<=\| wrong: `{wrong}` \|\n\| --- \| --- \|\n)(.*\n)\|.*"
            text = re.sub(row, rf"\1| {' | '.join(sides)} |", text)
        page.write_text(text, encoding="utf-8")
    return draw(traces, seeds)


if __name__ == "__main__":
    save(make_gallery, PAGES / "images/09_find_the_bug.svg")
