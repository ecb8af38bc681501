"""Learning-rate schedules: torch's own schedulers, stepped once per optimiser step."""

from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from common.errors import UserError

_ONECYCLE_WARMUP_SHARE = 0.2


def build_schedule(
    optimizer: Optimizer,
    name: str,
    *,
    total_steps: int,
    warmup_steps: int | None = None,
    milestones: Sequence[float] = (0.5, 0.75),
    step_factor: float = 0.1,
) -> LRScheduler:
    """Return a scheduler for ``total_steps`` steps that peaks at the optimiser's current rate.

    Parameters
    ----------
    name : "onecycle" rises over the warm-up (default: 20 % of the steps) and falls along a cosine
        to almost zero (Smith & Topin, arXiv:1708.07120); "constant" stays; "cosine" falls to zero
        (Loshchilov & Hutter, arXiv:1608.03983); "step" multiplies by ``step_factor`` at each of
        ``milestones``.
    total_steps : optimiser steps of the whole training.
    warmup_steps : optimiser steps of linear rise (default: none).
    milestones : shares of the steps after the warm-up.

    Raises UserError if the warm-up leaves no steps for the rest of the schedule.
    """
    if warmup_steps is not None and warmup_steps >= total_steps and name != "constant":
        raise UserError(
            f"the warm-up of {warmup_steps} steps is not shorter than the training of "
            f"{total_steps} steps: shorten the one or lengthen the other"
        )
    if name == "onecycle":
        if warmup_steps is None:
            warmup_steps = round(_ONECYCLE_WARMUP_SHARE * total_steps)
        if warmup_steps:
            return _one_cycle(optimizer, total_steps=total_steps, warmup_steps=warmup_steps)
        name = "cosine"  # one cycle without its rise
    warmup = warmup_steps or 0
    rest = max(1, total_steps - warmup)
    if name == "constant":
        main: LRScheduler = ConstantLR(optimizer, factor=1.0, total_iters=1)
    elif name == "cosine":
        main = CosineAnnealingLR(optimizer, T_max=rest)
    else:
        steps = [round(share * rest) for share in milestones]
        main = MultiStepLR(optimizer, milestones=steps, gamma=step_factor)
    if warmup == 0:
        return main
    rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return SequentialLR(optimizer, [rise, main], milestones=[warmup])


def _one_cycle(optimizer: Optimizer, *, total_steps: int, warmup_steps: int) -> LRScheduler:
    # torch puts the peak at step pct_start * total_steps - 1, counted from 0. It also needs one
    # rate more than there are steps: the one after the last.
    return OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=total_steps + 1,
        pct_start=(warmup_steps + 1) / (total_steps + 1),
        cycle_momentum=False,
    )
