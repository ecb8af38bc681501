"""What a training is: its global batches, shards, steps and rate, fixed when a job begins, whoever computes them later.

``make_plan`` makes the plan and this rank's loader; ``refuse_other_training`` compares a checkpoint's plan with it.
"""

from collections.abc import Mapping
from typing import Any

from common.config.schema import Config
from common.data.dataset import Dataset
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.errors import UserError

DATASET_CONTENTS = "dataset_sha256"
"""The plan's entry with the digest of all images and labels, which ``run`` adds."""


def make_plan(
    config: Config,
    launch: LaunchSpec,
    world: World,
    dataset: Dataset,
    resumed: Mapping[str, Any] | None,
) -> tuple[TrainLoader, dict[str, Any]]:
    """Return this rank's loader, and the plan: what a resumed run must share with the run that it resumes.

    The global batch and the number of shards are fixed when a job begins; ``resumed`` is the checkpoint of a job that was
    started again, perhaps with another number of ranks.
    """
    shards = config.shards or launch.largest_size or world.size
    fixed = {"batch_size": config.global_batch_size(shards), "shards": shards}
    if resumed is not None:
        fixed = resumed["plan"]
    sampler = GlobalBatchSampler(
        len(dataset.train),
        batch_size=fixed["batch_size"],
        rank=world.rank,
        world_size=world.size,
        seed=config.seed,
        shards=fixed["shards"],
        accumulation_steps=config.accumulation_steps,
    )
    steps = len(sampler.global_batch_sizes)
    warmup = config.warmup_steps
    if config.warmup_epochs is not None:
        # A trial of a few steps warms up over a fifth of them at most.
        most = config.max_steps // 5 if config.max_steps else config.epochs * steps
        warmup = min(round(config.warmup_epochs * steps), most)
    plan = {
        "dataset": config.dataset,
        "training_images": len(dataset.train),
        "model": config.model,
        "opt": config.opt,
        "batch_size": fixed["batch_size"],
        "shards": fixed["shards"],
        "accumulation_steps": config.accumulation_steps,
        "seed": config.seed,
        "schedule": config.schedule,
        "total_steps": config.max_steps or config.epochs * steps,
        "warmup_steps": warmup,
        "steps_per_epoch": steps,
    }
    return TrainLoader(dataset, sampler, device=world.device), plan


def refuse_other_training(path: str, entries: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """UserError where the checkpoint's ``plan`` differs from this run's, or the dataset's contents have changed since."""
    saved = entries.get("plan")
    if saved is None:
        raise UserError(
            f"checkpoint {path} was written by train_model alone and does not tell its schedule: go on with "
            "prepare_model_for_training(continue_flag=True) and train_model"
        )
    differing = [
        f"{name} {saved.get(name)} there, {value} here"
        for name, value in plan.items()
        if name != DATASET_CONTENTS and saved.get(name) != value
    ]
    if differing:
        raise UserError(
            f"checkpoint {path} belongs to another training: {'; '.join(differing)}. Give the same flags, and "
            "stop early with --stop-after-epoch, not by a shorter training"
        )
    contents = plan.get(DATASET_CONTENTS)
    if saved.get(DATASET_CONTENTS, contents) != contents:
        raise UserError(
            f"the images or labels of {plan['dataset']} have changed since checkpoint {path} was written: bring "
            "back the same ones, or start anew without --resume"
        )


def learning_rate(config: Config, plan: Mapping[str, Any]) -> float:
    """The peak rate, scaled by the global batch where --scale-lr asks for it."""
    scale = plan["batch_size"] / config.reference_batch_size if config.scale_lr else 1.0
    return config.peak_learning_rate * scale


def epochs_to_train(
    config: Config, plan: Mapping[str, Any], entries: Mapping[str, Any] | None
) -> tuple[int, int]:
    """Return the first and the last epoch to train, both included; none is left where the first is the later one."""
    last = -(-plan["total_steps"] // plan["steps_per_epoch"])
    return (entries["epoch"] + 1 if entries else 1), min(last, config.stop_after_epoch or last)


def run_warnings(
    config: Config,
    launch: LaunchSpec,
    world: World,
    plan: Mapping[str, Any],
    entries: Mapping[str, Any] | None,
    *,
    amp_notice: str,
) -> list[str]:
    """Return what is done in another way than one might expect, a sentence each."""
    found = [amp_notice] if amp_notice else []
    idle = world.size - plan["shards"]
    if idle > 0:
        found.append(
            f"{idle} of {world.size} ranks have no shard and compute nothing: begin a job with "
            "--shards, the most ranks that it may have"
        )
    earlier = entries.get("world_size") if entries is not None else None
    if earlier not in (None, world.size):
        found.append(
            f"the job has {world.size} rank{'s' if world.size > 1 else ''} now, {earlier} before; "
            f"its {plan['shards']} shards and its batch stay the same"
        )
    if config.deterministic and world.device.type == "cpu":
        found.append("a CPU run repeats bit for bit as it is, with the same threads")
    on_gpus = world.device.type == "cuda"
    if config.sync_batchnorm and on_gpus and plan["shards"] != world.size:
        found.append("SyncBatchNorm is off: the job has another number of shards than ranks")
    if launch.restarts > 0 and launch.stale_addresses and world.backend == "gloo":
        found.append(
            "torchrun may start these workers again, but under Gloo they would then read the old "
            "ranks' addresses: end this, and start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before the command, and --rdzv-backend c10d "
            "(on one machine --standalone)"
        )
    return found
