"""What a run prints before it trains: its notices, then what it trains, on what, and how."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from common.reporting.console import say
from common.training import get_model_parameters

if TYPE_CHECKING:
    from common.experiment.setup import Setup


def log_header(setup: "Setup", model: nn.Module) -> None:
    """Print the notices and the header on rank 0; write the profile of emulated compute."""
    config, world, plan, profile = setup.config, setup.world, setup.plan, setup.profile
    if not world.is_rank0:
        return
    for line in run_warnings(setup):
        say(f"notice: {line}")
    amp_dtype, _ = setup.amp
    sync = "gradients stay here" if world.size == 1 else f"sync {config.sync}"
    say(
        f"{config.recipe or config.part}: {config.model} ({get_model_parameters(model):,} "
        f"parameters) on {config.dataset} ({plan.training_images:,} training images), {sync}, "
        f"{world.backend or 'one process'} on {world.device.type}, "
        f"{'fp32' if amp_dtype is None else str(amp_dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads a rank"
    )
    parts = f"{plan.batch_size / (plan.shards * plan.accumulation_steps):g} a rank"
    if plan.accumulation_steps > 1:
        parts += f" x {plan.accumulation_steps} accumulated"
    ranks = f"{plan.shards} rank{'s' if plan.shards > 1 else ''}"
    if plan.shards != world.size:
        ranks = f"{plan.shards} shards on {world.size} rank{'s' if world.size > 1 else ''}"
    say(
        f"batch: {parts} x {ranks} = {plan.batch_size} global; {plan.total_steps} steps, "
        f"{plan.steps_per_epoch} an epoch; {config.opt}, {plan.schedule}, rate "
        f"{setup.learning_rate:g}"
    )
    if profile is not None:
        say(
            f"EMULATED: layers and update sleep as long as {profile.name} says ({profile.machine}, "
            f"{profile.made}); nothing is learned, and there are no losses or accuracies"
        )
        setup.folder.write_json("profile.json", profile.as_json())
    say(f"writing to {setup.folder.path}")


def run_warnings(setup: "Setup") -> list[str]:
    """Return, a sentence each, what the run does in another way than the user might expect."""
    config, launch, world, shards = setup.config, setup.launch, setup.world, setup.plan.shards
    _, amp_notice = setup.amp
    earlier = setup.entries.get("world_size", world.size)
    sentences = (
        (bool(amp_notice), amp_notice),
        (
            world.size > shards,
            f"{world.size - shards} of {world.size} ranks have no shard and compute nothing: begin "
            "a job with --shards, the most ranks that it may have",
        ),
        (
            earlier != world.size,
            f"the job has {world.size} rank{'s' if world.size > 1 else ''} now, {earlier} before; "
            f"its {shards} shards and its batch stay the same",
        ),
        (
            config.deterministic and world.device.type == "cpu",
            "a CPU run repeats bit for bit as it is, with the same threads",
        ),
        (
            config.sync_batchnorm and world.device.type == "cuda" and shards != world.size,
            "SyncBatchNorm is off: the job has another number of shards than ranks",
        ),
        (
            launch.restarts > 0 and launch.stale_addresses and world.backend == "gloo",
            "torchrun may start these workers again, but under Gloo they would then read the old "
            "ranks' addresses: end this, and start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before the command, and --rdzv-backend c10d "
            "(on one machine --standalone)",
        ),
    )
    return [sentence for applies, sentence in sentences if applies]
