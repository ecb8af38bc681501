"""The gallery of lesson 9: what the audit's wrong scripts do to a training on digits.

``python -m lab.learn.gallery`` trains with each wrong script and with its right one on three ranks,
draws their curves into docs/learn/images/, and writes the numbers into the gallery's pages.
"""

import argparse
import contextlib
import io
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.utils.paths import REPOSITORY
from lab.learn.scripts import read_scripts

RANKS, BATCH, STEPS = 3, 24, 120
TRAINING_IMAGES = 1440  # of 1797; the others are the test set
EVERY = 4  # steps from one evaluation to the next
SEEDS = 5
_KEPT = 3  # steps whose gradients are kept


class Way(NamedTuple):
    """A wrong script: its title in the figure, the right one, the measure that betrays it."""

    title: str
    right: str
    measure: str
    drawn: bool = True


WAYS = {
    "clip_norm_torch": Way("clipped, then averaged", "right_clip_norm_after", "gradient"),
    "literal_4": Way("divided by a literal 4", "right_all_reduce", "gradient"),
    "samples_no_sampler": Way("the same samples", "right_all_reduce", "distinct"),
    "sum_all_reduce": Way("the sum, not the mean", "right_all_reduce", "gradient"),
    "weights_averaged_each_step": Way("weights averaged", "right_all_reduce", "gradient"),
    "start_rank_0_seeded": Way("only rank 0 seeded", "right_all_reduce", "start"),
    "samples_order_without_set_epoch": Way("no set_epoch", "right_all_reduce", "repeated"),
    "samples_batch_per_rank": Way("whole batch per rank", "right_all_reduce", "batch"),
    "scaled_in_loss_ddp": Way("divided twice", "right_ddp", "gradient"),
    "ddp_bypassed_module": Way("around DDP", "right_ddp", "apart"),
    "own_not_written_back": Way("not written back", "right_all_reduce", "apart", drawn=False),
    "own_averaged_after_the_step": Way("too late", "right_all_reduce", "apart", drawn=False),
    "own_scatter_of_the_wrong_list": Way("own", "right_gather_scatter", "apart", drawn=False),
    "some_last_layer_left_out": Way("last layer left out", "right_all_reduce", "gradient"),
    "stale_by_one_step": Way("one step late", "right_all_reduce", "gradient"),
    "settings_lr_by_rank": Way("learning rate by rank", "right_all_reduce", "apart"),
    "notice_summed_accumulation": Way("micro-batches summed", "right_ddp_no_sync", "gradient"),
}
"""In the order of the pages."""

MEASURES = {
    "gradient": "gradient off by {:.1%}",
    "start": "the ranks' weights begin {:.1%} apart",
    "apart": "the ranks' weights {:.1%} apart after one step",
    "distinct": "{:.0f} different samples in the first batch of 24",
    "batch": "{:.0f} samples a step",
    "repeated": "{:.0%} of epoch 2 in the order of epoch 1",
}


@dataclass
class Trace:
    """What one rank did with a script; weights and gradients are flat arrays."""

    losses: dict[int, float] = field(default_factory=dict)  # on the test set, by step
    accuracy: float = 0.0
    steps: int = 0
    gradients: list[NDArray] = field(default_factory=list)  # as the optimiser got them
    weights: list[NDArray] = field(default_factory=list)  # before the first steps
    drawn: list[int] = field(default_factory=list)  # samples, in order


class _EnoughError(Exception):
    """A script has trained for as many steps as asked for."""


def train_all(names: Sequence[str], *, steps: int = STEPS, seed: int = 0) -> dict[str, list[Trace]]:
    """Train with each script in turn, on ranks of one group; return each rank's trace by script."""
    from lab.proofs import run_ranks

    scripts = read_scripts()
    bodies = [scripts[name].body for name in names]
    found = run_ranks(RANKS, _train_here, bodies, steps, seed, timeout_seconds=600)
    return dict(zip(names, map(list, zip(*found, strict=True)), strict=True))


def _train_here(rank: int, bodies: Sequence[str], steps: int, seed: int) -> list[Trace]:
    """Run the scripts on this rank, each with digits in place of the starter code's noise."""
    import torch
    from sklearn.datasets import load_digits

    pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = (pixels.float().reshape(-1, 1, 8, 8) / 8 - 1).expand(-1, 3, -1, -1)
    return [_train_one(rank, body, images[order], labels[order], steps, seed) for body in bodies]


def _train_one(rank: int, body: str, images: Any, labels: Any, steps: int, seed: int) -> Trace:
    import torch
    from torch import nn
    from torch.optim import optimizer
    from torch.utils.data import Dataset

    trace, models = Trace(), []
    test = slice(TRAINING_IMAGES, None)

    class Pictures(Dataset):
        def __init__(self, samples: int = TRAINING_IMAGES) -> None:
            self.length = min(samples, TRAINING_IMAGES)

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, index: int) -> Any:
            trace.drawn.append(index)
            return images[index], labels[index]

    def make_model(*extra: nn.Module) -> nn.Module:
        layers = (nn.Conv2d(3, 8, 3, padding=1), *extra, nn.ReLU(), nn.Flatten())
        models.append(nn.Sequential(*layers, nn.Linear(512, 10)))
        return models[-1]

    def flat(tensors: Any) -> NDArray:
        return torch.cat([one.detach().reshape(-1) for one in tensors]).numpy()

    def before_step(*_: Any) -> None:
        if len(trace.weights) < _KEPT:
            trace.weights.append(flat(models[-1].parameters()))
            trace.gradients.append(flat(p.grad for p in models[-1].parameters()))

    def after_step(*_: Any) -> None:
        trace.steps += 1
        if trace.steps % EVERY == 0:
            with torch.no_grad():
                outputs = models[-1](images[test])
            trace.losses[trace.steps] = nn.functional.cross_entropy(outputs, labels[test]).item()
            trace.accuracy = (outputs.argmax(1) == labels[test]).float().mean().item()
        if trace.steps == steps:
            raise _EnoughError

    torch.manual_seed(seed + rank)  # what a script that seeds nothing starts from
    flags = argparse.Namespace(num_nodes=RANKS, rank=rank, batch_size=BATCH)
    student = types.ModuleType("student")
    vars(student).update(Pictures=Pictures, make_model=make_model)
    vars(student).update(read_flags=lambda: flags, join=lambda args: None)
    sys.modules["student"] = student
    # The next script needs the group.
    body = body.replace("dist.destroy_process_group()", "pass")
    body = body.replace("manual_seed(0)", f"manual_seed({seed})")
    hooks = (
        optimizer.register_optimizer_step_pre_hook(before_step),
        optimizer.register_optimizer_step_post_hook(after_step),
    )
    with contextlib.suppress(_EnoughError), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(body, "main.py", "exec"), {"__name__": "__main__"})
    for hook in hooks:
        hook.remove()
    return trace


def measure(name: str, ranks: Sequence[Trace], right: Sequence[Trace]) -> float:
    """Return a measure of MEASURES for a script's traces; ``right`` are those of the right one."""
    if name == "gradient":  # in the first step in which a rank's differs
        steps = zip(*(one.gradients for one in ranks), right[0].gradients, strict=True)
        errors = [max(_apart(one, true) for one in own) for *own, true in steps]
        return next((error for error in errors if error > 1e-3), 0.0)
    if name in ("start", "apart"):
        weights = [one.weights[name == "apart"] for one in ranks]
        return max(_apart(one, weights[0]) for one in weights)
    if name == "repeated":
        first, second, *_ = np.split(np.array(ranks[0].drawn), [480, 960])
        return float(np.mean(first == second))
    if name == "batch":
        return sum(len(one.drawn) for one in ranks) / ranks[0].steps
    return len({index for one in ranks for index in one.drawn[: BATCH // RANKS]})


def _apart(one: NDArray, other: NDArray) -> float:
    """Return the norm of the difference over the norm of ``other``."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def sentences(traces: dict[str, list[Trace]], spread: tuple[float, float]) -> dict[str, list[str]]:
    """Return for each way what its right and its wrong script did.

    spread : by how much test loss and accuracy differ between seeds of the right script.
    """
    found = {}
    for wrong, way in WAYS.items():
        sides = [traces[way.right], traces[wrong]]
        ends = [(one[0].losses[max(one[0].losses)], one[0].accuracy) for one in sides]
        lines = [
            MEASURES[way.measure].format(measure(way.measure, one, sides[0]))
            + f"; test loss {loss:.2f}, accuracy {accuracy:.0%}"
            for one, (loss, accuracy) in zip(sides, ends, strict=True)
        ]
        names = ("loss", "accuracy")
        shown = [
            name
            for name, ours, theirs, usual in zip(names, *ends, spread, strict=True)
            if abs(ours - theirs) > usual
        ]
        seen = " and ".join(shown) if shown else "only the first number"
        found[wrong] = [lines[0], f"{lines[1]}. Seen in: **{seen}**"]
    return found


def spread_of(seeds: Sequence[Sequence[Trace]]) -> tuple[float, float]:
    """Return the range of the test loss and the accuracy at the end over the right script's runs."""
    losses = [one[0].losses[max(one[0].losses)] for one in seeds]
    accuracies = [one[0].accuracy for one in seeds]
    return max(losses) - min(losses), max(accuracies) - min(accuracies)
