"""What a run prints before it trains: its notices, then what it trains, on what, and how."""

import torch
from torch import nn

from common.config.recipes import find_recipe, read_recipe
from common.config.schema import flag, settings
from common.data import DATASETS
from common.reporting.console import say
from common.reporting.run_folder import RunFolder
from common.run_setup import Setup
from common.say import count, listed
from common.training import get_model_parameters
from common.training_engine.amp import precision_name
from common.training_plan import TrainingPlan
from common.utils.grouping import grouped

_RECIPE_OF = {
    "target_accuracy": "wide-resnet-cifar100",
    "patience": "wide-resnet-cifar100",
    "dataset": "wide-resnet-cifar100 or resnet50-cifar100",
    "gpu_ids": "resnet50-cifar100",
    "log_wandb": "resnet50-cifar100",
    "accumulation_steps": "resnet18-transfer-cifar10",
}
"""The recipes of scripts whose users know these settings."""


def log_header(setup: Setup, model: nn.Module, folder: RunFolder) -> None:
    """Print the notices and the header on rank 0."""
    config = setup.config
    world = setup.world
    plan = setup.plan
    if not world.is_rank0:
        return
    for line in run_warnings(setup):
        say(f"notice: {line}")
    sync = f"sync {config.sync}"
    threads = count(torch.get_num_threads(), "thread")
    if world.size == 1:
        sync = "no gradient exchange"
    else:
        threads += " per rank"
    say(
        f"{config.recipe or config.part}: {config.model} ({get_model_parameters(model):,} "
        f"parameters) on {config.dataset} ({plan.training_images:,} training images), {sync}, "
        f"{world.backend or 'one process'} on {world.device.type}, "
        f"{precision_name(setup.amp[0])}, {threads}"
    )
    say(
        f"batch: {_batch_text(plan, world.size)}; {count(plan.total_steps, 'step')}, "
        f"{plan.steps_per_epoch} per epoch; {config.opt}, {plan.schedule} schedule, learning rate "
        f"{setup.learning_rate:g}"
    )
    for name, text in unusual_methods(setup).items():
        say(f"{name}: {text}")
    profile = setup.profile
    if profile is not None:
        say(
            f"EMULATED: layers and update sleep for the times in profile {profile.name} "
            f"({profile.machine}, {profile.made}). The model learns nothing, so there are no "
            "losses or accuracies"
        )
    say(f"writing to {folder.path}")


def _batch_text(plan: TrainingPlan, ranks: int) -> str:
    """Return how the global batch is shared, e.g. "10 or 11 per rank x 3 ranks = 32 global"."""
    least, rest = divmod(plan.batch_size, plan.shards * plan.accumulation_steps)
    each = f"{least} or {least + 1}" if rest else str(least)
    holder = "rank" if plan.shards == ranks else "shard"
    parts = [f"{each} per {holder}"]
    if plan.accumulation_steps > 1:
        parts.append(f"{plan.accumulation_steps} micro-batches")
    parts.append(count(plan.shards, holder))
    text = " x ".join(parts)
    if plan.shards != ranks:
        text += f" on {count(ranks, 'rank')}"
    return f"{text} = {plan.batch_size} global"


def unusual_methods(setup: Setup) -> dict[str, str]:
    """Return how the run augments and evaluates, each only if not in the default way."""
    config = setup.config
    methods = {}
    if config.flip != "random" or config.cutout:
        is_off = config.flip == "none" or not setup.dataset.flip
        flip = "no" if is_off else config.flip
        methods["augmentation"] = f"crop, {flip} flip"
        if config.cutout:
            methods["augmentation"] += f", cutout of {config.cutout} x {config.cutout} pixels"
    synchronised = setup.sync_batchnorm
    if synchronised and setup.world.size > 1:
        pytorchs = synchronised is True and setup.world.device.type == "cuda"
        whose = "PyTorch's" if pytorchs else "this project's"
        methods["normalisation"] = (
            f"BatchNorm over the batches of all ranks, by {whose} SyncBatchNorm"
        )
    if config.tta == "flip":
        methods["evaluation"] = "mean of each image and its mirror image (--tta flip)"
    return methods


def run_warnings(setup: Setup) -> list[str]:
    """Return a sentence for each way in which the run differs from what the user may expect."""
    config = setup.config
    world = setup.world
    shards = setup.plan.shards
    warnings = _batch_size_meant(setup)
    _, amp_notice = setup.amp
    if amp_notice:
        warnings.append(amp_notice)
    if world.size > shards:
        warnings.append(
            f"{world.size - shards} of {world.size} ranks have no shard and compute nothing. Give "
            "--shards the largest number of ranks when you start a new job"
        )
    earlier = setup.entries.get("world_size", world.size)
    if earlier != world.size:
        warnings.append(
            f"the job now has {count(world.size, 'rank')} (before: {earlier}). Its "
            f"{count(shards, 'shard')} and its global batch stay the same"
        )
    if config.deterministic and world.device.type == "cpu":
        warnings.append(
            "--deterministic changes nothing on a CPU: a run repeats bit for bit if the number of "
            "threads is the same"
        )
    if config.sync_batchnorm != "off" and shards != world.size:
        warnings.append(
            "--sync-batchnorm: it needs as many ranks as shards, so each shard's BatchNorm uses "
            "the statistics of its own samples"
        )
    launch = setup.launch
    if launch.restarts > 0 and launch.stale_addresses and world.backend == "gloo":
        warnings.append(
            "torchrun may restart these workers, but with Gloo the restarted workers would read "
            "the old ranks' addresses. Stop this run and start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d ... (on one "
            "machine: --standalone)"
        )
    return warnings + _recipes_meant(setup)


def _batch_size_meant(setup: Setup) -> list[str]:
    """Return a sentence if a recipe that gives a rank's batch size was given a global one."""
    config = setup.config
    if config.recipe is None or config.batch_size is None:
        return []
    if "local_batch_size" not in read_recipe(find_recipe(config.recipe)):
        return []
    per_pass = setup.plan.batch_size // (setup.plan.shards * config.accumulation_steps)
    if config.batch_size == per_pass:
        return []
    return [
        f"--batch-size {config.batch_size} counts the samples of all ranks together, so each "
        f"pass of a rank has {per_pass}; the recipe says how many a pass has. For that give "
        f"-b {config.batch_size}"
    ]


def _recipes_meant(setup: Setup) -> list[str]:
    """Return a sentence for each recipe whose settings are given without it, for VGG-11."""
    config, rules = setup.config, settings()
    if config.recipe is not None or config.model != rules["model"].default:
        return []
    given = grouped(
        (recipe, flag(name))
        for name, recipe in _RECIPE_OF.items()
        if getattr(config, name) != rules[name].default and not DATASETS[config.dataset].comes_with
    )
    return [
        f"this trains {config.model} for {count(config.epochs, 'epoch')}. If you know "
        f"{listed(flags)} from the script of another network, add --recipe {recipe}"
        for recipe, flags in given.items()
    ]
