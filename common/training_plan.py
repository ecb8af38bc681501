"""The plan of a training: what a resumed run must share with the run that it continues.

``make_plan`` makes the plan and this rank's loader, for any number of ranks;
``refuse_other_training`` compares the plan with that of a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.config.schema import Config
from common.data.dataset import Dataset
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.errors import UserError


@dataclass(frozen=True)
class TrainingPlan:
    """Saved in each checkpoint.

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
    if restarted:
        batch_size = restarted["plan"]["batch_size"]
        shards = restarted["plan"]["shards"]
    else:
        shards = config.shards or launch.largest_size or world.size
        batch_size = config.global_batch_size(shards)
    sampler = GlobalBatchSampler(
        len(dataset.train),
        batch_size=batch_size,
        rank=world.rank,
        world_size=world.size,
        seed=config.seed,
        shards=shards,
        accumulation_steps=config.accumulation_steps,
    )
    steps_per_epoch = len(sampler.global_batch_sizes)
    total_steps = config.max_steps or config.epochs * steps_per_epoch
    warmup_steps = config.warmup_steps
    if config.warmup_epochs is not None:
        # A short trial run (--max-steps) spends at most a fifth of its steps on the warm-up.
        most_steps = total_steps // 5 if config.max_steps else total_steps
        warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), most_steps)
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
        steps_per_epoch=steps_per_epoch,
        dataset_sha256=dataset_sha256,
    )
    loader = TrainLoader(
        dataset, sampler, flip=config.flip, cutout=config.cutout, device=world.device
    )
    return loader, plan


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
