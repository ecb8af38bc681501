"""What ``run`` trains with: the frozen ``Setup``, and the functions that build from it."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.config.schema import Config
from common.cost_model.bucket_choice import BucketChoice
from common.data import load_dataset
from common.data.dataset import Dataset
from common.data.loaders import TrainLoader
from common.distributed.collectives import check_same_on_all_ranks, run_on_all_ranks
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.emulation.compute_profile import Profile, load_profile
from common.emulation.emulated_model import Emulation
from common.errors import UserError
from common.experiment.resume import Job, ResumePoint
from common.experiment.training_plan import TrainingPlan
from common.experiment.validation import CountedLoader
from common.models import PRETRAINED, build_model
from common.profiling import determinism
from common.profiling.comm_trace import Timeline
from common.reporting.console import Progress, say
from common.reporting.run_folder import RunFolder
from common.reporting.run_logger import RunLogger
from common.sync import build_sync_from, is_exact
from common.training import prepare_model_for_training
from common.training_engine import (
    EarlyStop,
    TrainingEngine,
    Validator,
)
from common.training_engine.amp import choose_amp, precision_name
from common.training_engine.checkpoint_manager import CheckpointManager, SavePolicy
from common.training_engine.lr_schedules import build_schedule
from common.utils.environment import environment
from common.utils.hashing import digest
from common.utils.system import usable_cores

_PRETRAINED_BATCH_SIZE = 500  # in evaluation


@dataclass(frozen=True)
class Setup:
    """Values fixed before the first step. Ranks differ only in ``launch``, ``world`` and ``job``.

    checkpoint : what the run resumes from; None: a fresh start.
    profile : durations of emulated compute; None: compute is real.
    began : ``time.perf_counter()`` when ``run`` was called.
    buckets : what --bucket-mb auto chose; None if it was not asked to.
    """

    config: Config
    launch: LaunchSpec
    world: World
    job: Job
    dataset: Dataset
    plan: TrainingPlan
    checkpoint: ResumePoint | None
    profile: Profile | None
    began: float
    buckets: BucketChoice | None = None

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return self.job.folder

    @property
    def entries(self) -> Mapping[str, Any]:
        """The entries of the checkpoint; empty for a fresh start."""
        return self.checkpoint.entries if self.checkpoint is not None else {}

    @property
    def bucket_mb(self) -> float | None:
        """The size of buckets, as given or as chosen; None: the strategy's default."""
        asked = self.config.bucket_mb
        if isinstance(asked, str):
            return self.buckets.bucket_mb if self.buckets else None
        return asked

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


@contextmanager
def warnings_on_rank0(world: World) -> Iterator[None]:
    """Print each user warning as one line, on rank 0 only, since all ranks raise the same ones."""
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


def choose_threads_and_algorithms(config: Config, world: World) -> None:
    """Divide the cores among the ranks of this machine, seed torch, choose cuDNN's algorithms."""
    torch.set_num_threads(config.threads or max(1, usable_cores() // world.local_size))
    torch.manual_seed(config.seed)
    determinism.choose_algorithms(world.device, deterministic=config.deterministic)


def load_run_dataset(config: Config, world: World) -> tuple[Dataset, str]:
    """Return the dataset, normalised as configured, and the SHA-256 of its images and labels.

    Collective. May download, without a time limit. Raises UserError if the ranks' data differ.
    """

    def load() -> Dataset:
        dataset = load_dataset(config.dataset, config.data_folder, mirror=config.mirror)
        _refuse_mirror_images(config, dataset)
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


def _refuse_mirror_images(config: Config, dataset: Dataset) -> None:
    """Raise UserError if settings ask for mirror images that the dataset does not allow."""
    asked = (
        ("--flip alternating", config.flip == "alternating"),
        ("--tta flip", config.tta == "flip"),
    )
    flags = " and ".join(flag for flag, given in asked if given)
    if flags and not dataset.flip:
        raise UserError(
            f"{flags}: a mirrored image of {dataset.name} may belong to no class. Leave {flags} out"
        )


def load_compute_profile(config: Config, world: World, dataset: Dataset) -> Profile | None:
    """Return the durations of emulated compute; None if compute is real. Collective."""
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


def write_settings(setup: Setup) -> None:
    """Write the settings, the plan and the environment to the run's folder, on rank 0."""
    if setup.world.is_rank0:
        group = {
            "world_size": setup.world.size,
            "backend": setup.world.backend,
            "precision": precision_name(setup.amp[0]),
            "auto_buckets": asdict(setup.buckets) if setup.buckets else None,
        }
        settings = setup.config.as_json() | group | asdict(setup.plan)
        setup.folder.write_json("config.json", settings)
        setup.folder.write_json("environment.json", environment())


def build_network(setup: Setup) -> nn.Module:
    """Return the model. Rank 0 loads pretrained weights; ``TrainingEngine.prepare`` sends them."""
    config, classes = setup.config, len(setup.dataset.class_names)
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
        setup.checkpoint is not None,
        setup.checkpoint.path if setup.checkpoint is not None else "",
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


def price_of_determinism(setup: Setup, model: nn.Module, loader: TrainLoader) -> dict[str, float]:
    """Measure the slowdown of --deterministic for the summary; {} without it or on a CPU."""
    if not setup.config.deterministic or setup.world.device.type != "cuda":
        return {}
    images, labels = next(iter(loader))
    times = determinism.cost(model, images, labels, amp_dtype=setup.amp[0])
    if setup.world.is_rank0:
        say(
            f"--deterministic: forward and backward take {times:.2f} times as long as with the "
            "fastest algorithms"
        )
    return {"deterministic_cost": times}


def build_engine(setup: Setup, model: nn.Module) -> TrainingEngine:
    """Return the engine, with emulated compute and a record of messages if the settings say so."""
    config, world = setup.config, setup.world
    engine = TrainingEngine(
        model,
        world.device,
        distributed=world.backend is not None,
        amp_dtype=setup.amp[0],
        sync=build_sync_from(config.sync, vars(config) | {"bucket_mb": setup.bucket_mb}),
        use_ema=config.ema,
        ema_decay=config.ema_decay,
        clip_norm=config.clip_norm,
        sync_batchnorm=config.sync_batchnorm and setup.plan.shards == world.size,
        capture=config.capture == "auto" and not config.profile,
        compile_model=config.compile,
        world=world,
    )
    if config.compile and world.is_rank0:
        say("compiling the model, which may take minutes; then the training begins")
    if setup.profile is not None:
        classes = len(setup.dataset.class_names)
        engine.emulation = Emulation(model, setup.profile, rank=world.rank, classes=classes)
    if config.timeline:
        last = setup.plan.total_steps
        engine.timeline = Timeline(last - engine.sync.period + 1, last)
    return engine


def build_test_loader(setup: Setup, progress: Progress) -> CountedLoader:
    """Return this rank's share of the test set."""
    # A pretrained model enlarges its images to 49 times as many pixels: large batches may not fit.
    size = _PRETRAINED_BATCH_SIZE if setup.config.model in PRETRAINED else None
    return CountedLoader(setup.dataset, setup.world, progress, batch_size=size)


def build_validator(setup: Setup, loader: CountedLoader) -> Validator:
    """Return the callback that validates each epoch and stops at --target-accuracy."""
    config = setup.config
    return Validator(
        loader if config.validates else None,
        nn.CrossEntropyLoss(),
        EarlyStop(config.target_accuracy, config.patience),
        setup.entries.get("progress"),
        flip=config.tta == "flip",
    )


def build_checkpoint_manager(
    setup: Setup, validator: Validator, logger: RunLogger
) -> CheckpointManager:
    """Return the callback that writes checkpoints, with the plan and the best accuracy so far.

    Before each, ``logger`` puts the records of its steps on the disk.
    """
    config = setup.config
    return CheckpointManager(
        setup.folder.checkpoints,
        policy=SavePolicy(
            every_steps=config.checkpoint_every,
            every_epochs=config.save_every_epochs,
            keep=config.keep_checkpoints,
        ),
        writes=setup.job.writes,
        copy_to=config.checkpoint,
        before=logger.sync,
        extra={
            "plan": asdict(setup.plan),
            "world_size": setup.world.size,
            "auto_buckets": asdict(setup.buckets) if setup.buckets else None,
            "progress": validator.progress,
        },
    )
