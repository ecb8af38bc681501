"""The functions that build what ``run`` trains with."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.config.schema import Config
from common.data import load_dataset
from common.data.dataset import Dataset
from common.distributed.collectives import check_same_on_all_ranks, run_on_all_ranks
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World, process_group, set_debug
from common.errors import UserError
from common.experiment.resume import Job
from common.experiment.validation import CountedLoader
from common.models import PRETRAINED, build_model
from common.reporting.console import say
from common.reporting.run_folder import RunFolder
from common.reporting.run_logger import RunLogger
from common.run_setup import Setup
from common.say import listed
from common.sync import build_message_plan_from, strategy_class
from common.training_engine import TrainingEngine, Validator
from common.training_engine.amp import precision_name
from common.training_engine.checkpoint_manager import CheckpointManager, SavePolicy
from common.utils.environment import environment
from common.utils.hashing import digest
from common.utils.source_hash import code_facts
from common.utils.system import usable_cores

if TYPE_CHECKING:
    from common.emulation.compute_profile import Profile


@contextmanager
def join_ranks(config: Config, launch: LaunchSpec) -> Iterator[World]:
    """Open the group of ranks, yield this process's World, and close the group at the end.

    Raises UserError if the ranks do not all run the same code with the same settings.
    """
    if config.debug:
        set_debug()
    backend = "gloo" if config.emulated else config.backend
    with (
        process_group(
            launch,
            backend=backend,
            timeout_seconds=config.timeout,
            meeting_seconds=config.meeting_seconds(by_hand=launch.by_hand),
        ) as world,
        warnings_on_rank0(world),
    ):
        check_same_on_all_ranks(world, code_facts(), what="their code")
        check_same_on_all_ranks(world, config.shared_settings(), what="their settings")
        yield world


@contextmanager
def warnings_on_rank0(world: World) -> Iterator[None]:
    """Print each warning as one line, on rank 0 only, since all ranks raise the same ones."""

    def show(message: Warning | str, *_place: Any, **_more: Any) -> None:
        if world.is_rank0:
            say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def choose_threads_and_algorithms(config: Config, world: World) -> None:
    """Divide the cores among the ranks of this machine, seed torch, choose cuDNN's algorithms."""
    torch.set_num_threads(config.threads or max(1, usable_cores() // world.local_size))
    torch.manual_seed(config.seed)
    if world.device.type == "cuda":
        # Before the first CUDA call, since cuBLAS reads it only once.
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = not config.deterministic
        torch.use_deterministic_algorithms(config.deterministic, warn_only=True)


def load_run_dataset(config: Config, world: World) -> tuple[Dataset, str]:
    """Return the dataset, normalised as configured, and the SHA-256 of its images and labels.

    Collective. May download, without a time limit. Raises UserError if the ranks' data differ, or
    if settings ask for mirror images that the dataset does not allow.
    """

    def load() -> Dataset:
        dataset = load_dataset(config.dataset, config.data_folder, mirror=config.mirror)
        if not dataset.flip:
            _refuse_mirror_images(config, dataset.name)
        return dataset if config.normalise == "dataset" else dataset.normalised_as_imagenet()

    world.activity.enter("dataset")
    dataset = run_on_all_ranks(world, load, patient=True)
    train, test = dataset.train, dataset.test
    contents = digest([train.images, train.labels, test.images, test.labels])
    facts = {
        "classes": list(dataset.class_names),
        "training images": len(train),
        "test images": len(test),
        "contents (SHA-256)": contents,
    }
    check_same_on_all_ranks(world, facts, what="their dataset")
    return dataset, contents


def _refuse_mirror_images(config: Config, name: str) -> None:
    """Raise UserError if settings ask for mirror images of the dataset ``name``."""
    asked = []
    if config.flip == "alternating":
        asked.append("--flip alternating")
    if config.tta == "flip":
        asked.append("--tta flip")
    if asked:
        flags = listed(asked)
        raise UserError(
            f"{flags}: a mirrored image of {name} may belong to no class. Leave {flags} out"
        )


def load_compute_profile(config: Config, world: World, dataset: Dataset) -> "Profile | None":
    """Return the durations of emulated compute; None if compute is real. Collective."""
    if not config.emulated:
        return None
    from common.emulation.compute_profile import load_profile  # few runs emulate

    image = (dataset.train.images.shape[1], dataset.train.images.shape[2])
    profile = run_on_all_ranks(
        world,
        lambda: load_profile(
            config.compute, model=config.model, image=image, machine=environment()["cpu"]
        ),
    )
    check_same_on_all_ranks(world, profile.as_json(), what="the profile of --compute")
    return profile


def write_settings(setup: Setup, folder: RunFolder) -> None:
    """Write settings, plan, environment and the profile of emulated compute, on rank 0."""
    if setup.world.is_rank0:
        settings = {
            **setup.config.as_json(),
            "world_size": setup.world.size,
            "backend": setup.world.backend,
            "precision": precision_name(setup.amp[0]),
            **asdict(setup.plan),
        }
        folder.write_json("config.json", settings)
        folder.write_json("environment.json", environment())
        if setup.profile is not None:
            folder.write_json("profile.json", setup.profile.as_json())


def build_network(setup: Setup) -> nn.Module:
    """Return the model. Rank 0 loads pretrained weights; ``TrainingEngine.prepare`` sends them."""
    config = setup.config
    classes = len(setup.dataset.class_names)
    if config.model not in PRETRAINED:
        return build_model(config.model, classes)
    model = build_model(
        config.model, classes, input_size=config.input_size, unfreeze=config.unfreeze
    )

    def load() -> None:
        from common.models.transfer import load_pretrained

        if setup.world.is_rank0 and not setup.entries and not config.emulated:
            say(f"pretrained weights from {load_pretrained(model, config.pretrained_weights)}")

    run_on_all_ranks(setup.world, load, patient=True)
    return model


def build_engine(setup: Setup, model: nn.Module) -> TrainingEngine:
    """Return the engine, with emulated compute and a record of messages if the settings say so."""
    config = setup.config
    world = setup.world
    engine = TrainingEngine(
        model,
        world.device,
        distributed=world.backend is not None,
        amp_dtype=setup.amp[0],
        sync=strategy_class(config.sync)(build_message_plan_from(config.sync, vars(config))),
        use_ema=config.ema,
        ema_decay=config.ema_decay,
        clip_norm=config.clip_norm,
        sync_batchnorm=setup.sync_batchnorm,
        compile_model=config.compile,
        world=world,
    )
    if config.compile and world.is_rank0:
        say("compiling the model, which may take minutes; then the training begins")
    if setup.profile is not None:
        from common.emulation.emulated_model import Emulation

        classes = len(setup.dataset.class_names)
        engine.emulation = Emulation(model, setup.profile, rank=world.rank, classes=classes)
    if config.timeline:
        from common.distributed.node_groups import ranks_by_node
        from common.profiling.comm_trace import Timeline

        last = setup.plan.total_steps
        nodes = ranks_by_node(getattr(engine.sync.plan, "ranks_per_node", None))
        engine.timeline = Timeline(last - engine.sync.plan.period + 1, last, nodes)
    return engine


def build_validator(setup: Setup, loader: CountedLoader) -> Validator:
    """Return the callback that validates each epoch and stops at --target-accuracy."""
    config = setup.config
    return Validator(
        loader if config.validates else None,
        nn.CrossEntropyLoss(),
        target_accuracy=config.target_accuracy,
        patience=config.patience,
        progress=setup.entries.get("progress"),
        flip=config.tta == "flip",
    )


def build_checkpoint_manager(
    setup: Setup, job: Job, validator: Validator, logger: RunLogger
) -> CheckpointManager:
    """Return the callback that writes checkpoints, with the plan and the best accuracy so far.

    Before each, ``logger`` puts the records of its steps on the disk.
    """
    config = setup.config
    return CheckpointManager(
        job.folder.checkpoints,
        policy=SavePolicy(
            every_steps=config.checkpoint_every,
            every_epochs=config.save_every_epochs,
            keep=config.keep_checkpoints,
        ),
        writes=job.writes,
        copy_to=config.checkpoint,
        before=logger.sync,
        extra={
            "plan": asdict(setup.plan),
            "world_size": setup.world.size,
            "progress": validator.progress,
        },
    )
