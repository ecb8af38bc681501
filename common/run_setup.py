"""``Setup``: what a run fixes before its first step.

``run`` makes it, and everything that reports on the run reads it. ``prepare_model`` makes the model
with its optimiser and schedule from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.config.schema import Config
from common.data.dataset import Dataset
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.sync import is_exact
from common.training import prepare_model_for_training
from common.training_engine.amp import choose_amp
from common.training_engine.lr_schedules import build_schedule
from common.training_plan import TrainingPlan

if TYPE_CHECKING:
    from common.emulation.compute_profile import Profile


@dataclass(frozen=True)
class Setup:
    """Values fixed before the first step. Ranks differ only in ``launch`` and ``world``.

    resumed_from, entries : path and entries of the checkpoint that the run resumes from; None and
        empty for a fresh start.
    profile : durations of emulated compute; None: compute is real.
    began : ``time.perf_counter()`` when ``run`` was called.
    """

    config: Config
    launch: LaunchSpec
    world: World
    dataset: Dataset
    plan: TrainingPlan
    resumed_from: str | None
    entries: Mapping[str, Any]
    profile: "Profile | None"
    began: float

    @property
    def learning_rate(self) -> float:
        """The peak rate; --scale-lr multiplies it by global batch / reference batch."""
        config = self.config
        if not config.scale_lr:
            return config.peak_learning_rate
        scale = self.plan.batch_size / config.reference_batch_size
        return config.peak_learning_rate * scale

    @property
    def amp(self) -> tuple[torch.dtype | None, str]:
        """The type for autocast (None: float32), and a notice for the user."""
        config = self.config
        alone = self.world.backend is None
        return choose_amp(
            config.amp,
            config.amp_dtype,
            default=config.part == "PartThree",
            device=self.world.device,
            exact=alone or is_exact(config.sync),
        )

    @property
    def sync_batchnorm(self) -> bool | Literal["ours"]:
        """The engine's ``sync_batchnorm``; False if a rank computes several shards in turn."""
        wanted = self.config.sync_batchnorm
        if wanted == "off" or self.plan.shards != self.world.size:
            return False
        return "ours" if wanted == "ours" else True

    @property
    def epochs(self) -> tuple[int, int]:
        """First and last epoch to train, both included; nothing is left if first > last."""
        first = self.entries["epoch"] + 1 if self.entries else 1
        last = -(-self.plan.total_steps // self.plan.steps_per_epoch)  # rounded up
        if self.config.stop_after_epoch:
            last = min(last, self.config.stop_after_epoch)
        return first, last


def prepare_model(
    setup: Setup, model: nn.Module
) -> tuple[nn.Module, nn.Module, Optimizer, LRScheduler]:
    """Return (model, criterion, optimizer, scheduler); load the checkpoint if there is one."""
    config = setup.config
    plan = setup.plan
    model, criterion, optimizer = prepare_model_for_training(
        model,
        setup.world.device,
        setup.learning_rate,
        config.momentum,
        config.weight_decay,
        setup.resumed_from is not None,
        setup.resumed_from or "",
        opt=config.opt,
        nesterov=config.nesterov,
        label_smoothing=config.label_smoothing,
        checkpoint=setup.entries,
    )
    scheduler = build_schedule(
        optimizer,
        plan.schedule,
        total_steps=plan.total_steps,
        warmup_steps=plan.warmup_steps,
        milestones=config.milestone_shares,
        step_factor=config.step_factor,
    )
    return model, criterion, optimizer, scheduler
