"""What ``run`` trains with, each built from the settings: dataset, profile, model, engine, checkpoints, dashboards."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from common.data import load_dataset
from common.distributed.collectives import check_same_on_all_ranks, run_on_all_ranks
from common.emulation.compute_profile import load_profile
from common.emulation.emulated_model import Emulation
from common.models import PRETRAINED, build_model
from common.profiling.comm_trace import Timeline
from common.reporting.console import say
from common.reporting.trackers import Trackers
from common.sync import build_sync_from
from common.training_engine import TrainingEngine, determinism
from common.training_engine.checkpoint_manager import CheckpointManager
from common.utils.environment import environment
from common.utils.hashing import digest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from common.config.schema import Config
    from common.data.dataset import Dataset
    from common.data.loaders import TrainLoader
    from common.distributed.process_group import World
    from common.emulation.compute_profile import Profile
    from common.experiment.resume import Job
    from common.reporting.run_folder import RunFolder


@contextmanager
def warnings_on_rank0(world: "World") -> Iterator[None]:
    """Show warnings meant for the user as one line, on rank 0; they are the same on every rank."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(
            message: Warning | str, category: type[Warning], *place: Any, **more: Any
        ) -> None:
            if category is not UserWarning:
                show(message, category, *place, **more)
            elif world.is_rank0:
                say(f"warning: {message}")

        warnings.showwarning = show_line
        yield


def load_run_dataset(config: "Config", world: "World") -> "Dataset":
    """Return the dataset, normalised as the settings say. Collective; may download, and takes its time then."""

    def load() -> "Dataset":
        dataset = load_dataset(config.dataset, config.data_folder, mirror=config.mirror)
        return dataset if config.normalise == "dataset" else dataset.normalised_as_imagenet()

    return run_on_all_ranks(world, load, patient=True)


def contents_digest(world: "World", dataset: "Dataset") -> str:
    """Return the SHA-256 of all images and labels; UserError where the ranks' datasets differ. Collective."""
    contents = digest(
        [dataset.train.images, dataset.train.labels, dataset.test.images, dataset.test.labels]
    )
    facts = {
        "classes": list(dataset.class_names),
        "training images": len(dataset.train),
        "test images": len(dataset.test),
        "contents (SHA-256)": contents,
    }
    check_same_on_all_ranks(world, facts, what="their dataset")
    return contents


def load_compute_profile(config: "Config", world: "World", dataset: "Dataset") -> "Profile | None":
    """Return the profile of emulated compute, the same on every rank; None where compute is real. Collective."""
    if not config.emulated:
        return None
    image = (dataset.train.images.shape[1], dataset.train.images.shape[2])
    profile = run_on_all_ranks(
        world,
        lambda: load_profile(
            config.compute, model=config.model, image=image, machine=environment()["cpu"]
        ),
    )
    check_same_on_all_ranks(world, profile.as_json(), what="the profile of --compute")
    return profile


def build_network(
    config: "Config", world: "World", dataset: "Dataset", *, pretrained: bool
) -> "nn.Module":
    """Return the model; rank 0's has its pretrained weights, which the first step gives to all. Collective."""
    classes = len(dataset.class_names)
    if config.model not in PRETRAINED:
        return build_model(config.model, classes)
    model = build_model(
        config.model, classes, input_size=config.input_size, unfreeze=config.unfreeze
    )

    def load() -> None:
        from common.models.transfer import load_pretrained

        if world.is_rank0 and pretrained:
            say(f"pretrained weights from {load_pretrained(model, config.pretrained_weights)}")

    run_on_all_ranks(world, load, patient=True)
    return model


def price_of_determinism(
    config: "Config",
    world: "World",
    model: "nn.Module",
    loader: "TrainLoader",
    amp_dtype: "torch.dtype | None",
) -> dict[str, float]:
    """Measure how much slower deterministic algorithms are, for the summary; nothing without --deterministic on a GPU."""
    if not config.deterministic or world.device.type != "cuda":
        return {}
    images, labels = next(iter(loader))
    times = determinism.cost(model, images, labels, amp_dtype=amp_dtype)
    if world.is_rank0:
        say(
            f"deterministic: forward and backward take {times:.2f} times as long as with the fastest algorithms"
        )
    return {"deterministic_cost": times}


def build_engine(
    config: "Config",
    world: "World",
    model: "nn.Module",
    plan: Mapping[str, Any],
    *,
    amp_dtype: "torch.dtype | None",
    profile: "Profile | None",
    classes: int,
) -> TrainingEngine:
    """Return the engine, with emulated compute and the timeline of the last steps where the settings ask for them."""
    engine = TrainingEngine(
        model,
        world.device,
        distributed=world.backend is not None,
        amp_dtype=amp_dtype,
        sync=build_sync_from(config.sync, vars(config)),
        use_ema=config.ema,
        ema_decay=config.ema_decay,
        clip_norm=config.clip_norm,
        sync_batchnorm=config.sync_batchnorm and plan["shards"] == world.size,
    )
    if profile is not None:
        engine.emulation = Emulation(model, profile, rank=world.rank, classes=classes)
    if config.timeline:
        last = plan["total_steps"]
        engine.timeline = Timeline(last - engine.sync.period + 1, last)
    return engine


def build_checkpoint_manager(
    config: "Config", job: "Job", plan: Mapping[str, Any]
) -> CheckpointManager:
    """Return what writes the checkpoints, each with the plan."""
    return CheckpointManager(
        job.folder.checkpoints,
        every=config.checkpoint_every,
        keep=config.keep_checkpoints,
        writes=job.writes,
        copy_to=config.checkpoint,
        extra={"plan": plan},
        off=config.only_times,
    )


def open_trackers(config: "Config", world: "World", folder: "RunFolder") -> Trackers | None:
    """Return the dashboards on rank 0, None elsewhere; their UserError reaches all ranks. Collective."""

    def build() -> Trackers | None:
        if not world.is_rank0:
            return None
        return Trackers(
            wandb=config.log_wandb,
            tensorboard=config.log_tensorboard,
            folder=folder.path,
            name=f"{config.experiment}/{folder.path.name}",
            settings=config.as_json(),
        )

    return run_on_all_ranks(world, build)
