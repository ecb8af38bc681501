"""What a run trains: its plan (batches, shards, steps, schedule), and the frozen ``Setup``.

``make_plan`` makes the plan and this rank's loader, for any number of ranks, ``prepare_model`` the
model with its optimiser and schedule; ``refuse_other_training`` compares the plan with that of a
checkpoint.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.config.schema import Config
from common.data.dataset import Dataset
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.emulation.compute_profile import Profile
from common.errors import UserError
from common.sync import is_exact
from common.training import prepare_model_for_training
from common.training_engine.amp import choose_amp
from common.training_engine.lr_schedules import build_schedule


@dataclass(frozen=True)
class TrainingPlan:
    """What a resumed run must share with the original run; saved in each checkpoint.

    batch_size : samples in a global batch. shards : the parts into which each global batch is
    divided; a rank computes one or more. total_steps, warmup_steps : optimiser steps.
    dataset_sha256 : digest of all images and labels.
    """

    dataset: str
    training_images: int
    model: str
    opt: str
    batch_size: int
    shards: int
    accumulation_steps: int
    seed: int
    schedule: str
    total_steps: int
    warmup_steps: int | None
    steps_per_epoch: int
    dataset_sha256: str


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
    profile: Profile | None
    began: float

    @property
    def learning_rate(self) -> float:
        """The peak rate; --scale-lr multiplies it by global batch / reference batch."""
        config = self.config
        scale = self.plan.batch_size / config.reference_batch_size if config.scale_lr else 1.0
        return config.peak_learning_rate * scale

    @property
    def amp(self) -> tuple[torch.dtype | None, str]:
        """The type for autocast (None: float32), and a notice for the user."""
        config = self.config
        return choose_amp(
            config.amp,
            config.amp_dtype,
            default=config.part == "PartThree",
            device=self.world.device,
            exact=self.world.backend is None or is_exact(config.sync),
        )

    @property
    def epochs(self) -> tuple[int, int]:
        """First and last epoch to train, both included; nothing is left if first > last."""
        last = -(-self.plan.total_steps // self.plan.steps_per_epoch)
        first = self.entries["epoch"] + 1 if self.entries else 1
        return first, min(last, self.config.stop_after_epoch or last)


def make_plan(
    config: Config,
    launch: LaunchSpec,
    world: World,
    dataset: Dataset,
    dataset_sha256: str,
    restarted: Mapping[str, Any],
) -> tuple[TrainLoader, TrainingPlan]:
    """Return this rank's loader and the plan.

    ``restarted`` holds the checkpoint's entries if the job was restarted, perhaps with another
    number of ranks; else nothing. Its global batch and its number of shards stay as they were when
    the job began.
    """
    shards = config.shards or launch.largest_size or world.size
    batch_size = config.global_batch_size(shards)
    if restarted:
        batch_size, shards = restarted["plan"]["batch_size"], restarted["plan"]["shards"]
    sampler = GlobalBatchSampler(
        len(dataset.train),
        batch_size=batch_size,
        rank=world.rank,
        world_size=world.size,
        seed=config.seed,
        shards=shards,
        accumulation_steps=config.accumulation_steps,
    )
    steps = len(sampler.global_batch_sizes)
    total_steps = config.max_steps or config.epochs * steps
    warmup_steps = config.warmup_steps
    if config.warmup_epochs is not None:
        # A short trial run (--max-steps) spends at most a fifth of its steps on the warm-up.
        most = total_steps // 5 if config.max_steps else total_steps
        warmup_steps = min(round(config.warmup_epochs * steps), most)
    plan = TrainingPlan(
        dataset=config.dataset,
        training_images=len(dataset.train),
        model=config.model,
        opt=config.opt,
        batch_size=batch_size,
        shards=shards,
        accumulation_steps=config.accumulation_steps,
        seed=config.seed,
        schedule=config.schedule,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        steps_per_epoch=steps,
        dataset_sha256=dataset_sha256,
    )
    loader = TrainLoader(
        dataset, sampler, flip=config.flip, cutout=config.cutout, device=world.device
    )
    return loader, plan


def prepare_model(
    setup: Setup, model: nn.Module
) -> tuple[nn.Module, nn.Module, Optimizer, LRScheduler]:
    """Return (model, criterion, optimizer, scheduler); load the checkpoint if there is one."""
    config, plan = setup.config, setup.plan
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


def refuse_other_training(path: str, entries: Mapping[str, Any], plan: TrainingPlan) -> None:
    """Raise UserError if the checkpoint belongs to another plan, or if the dataset has changed."""
    saved = entries.get("plan")
    if saved is None:
        raise UserError(
            f"checkpoint {path} was written by train_model outside a run, so it does not hold the "
            "run's schedule: resume it with prepare_model_for_training(continue_flag=True) and "
            "train_model"
        )
    here = asdict(plan)
    contents = here.pop("dataset_sha256")
    differing = [
        f"{name} is {saved.get(name)} in the checkpoint, {value} now"
        for name, value in here.items()
        if saved.get(name) != value
    ]
    if differing:
        raise UserError(
            f"checkpoint {path} belongs to another training: {'; '.join(differing)}. Give the "
            "same flags. To stop earlier, use --stop-after-epoch instead of fewer epochs or steps"
        )
    if saved.get("dataset_sha256", contents) != contents:
        raise UserError(
            f"the images or labels of {plan.dataset} have changed since checkpoint {path} was "
            "written: restore the same files, or start a new run without --resume"
        )
