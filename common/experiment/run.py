"""One run from beginning to end. ``run`` is the walk; read it downward, and leave it only to go deeper."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from common.config.schema import Config
from common.data import load_dataset
from common.data.dataset import Dataset
from common.data.loaders import TrainLoader
from common.distributed.collectives import check_same_on_all_ranks, gather_objects, run_on_all_ranks
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World, process_group, set_debug
from common.emulation.compute_profile import Profile, load_profile
from common.emulation.emulated_model import Emulation
from common.experiment.graceful_stop import stop_on_signals
from common.experiment.resume import find_checkpoint, open_job
from common.experiment.training_plan import (
    DATASET_CONTENTS,
    epochs_to_train,
    learning_rate,
    make_plan,
    refuse_other_training,
    run_warnings,
)
from common.experiment.validation import Validator, evaluation_loader
from common.models import PRETRAINED, build_model
from common.profiling.comm_trace import Timeline
from common.profiling.torch_profiler import step_profiler
from common.reporting.console import Progress, say
from common.reporting.rank_stats import gather_measurements
from common.reporting.run_logger import RunLogger, log_header
from common.reporting.summary import report
from common.reporting.trackers import Trackers
from common.sync import build_sync_from
from common.training import prepare_model_for_training, train_model
from common.training_engine import Predictions, TrainingEngine, determinism, predict
from common.training_engine.amp import choose_amp
from common.training_engine.checkpoint_manager import CheckpointManager
from common.training_engine.evaluation_loop import unwrap
from common.training_engine.lr_schedules import build_schedule
from common.utils.environment import environment
from common.utils.hashing import digest
from common.utils.source_hash import code_facts
from common.utils.system import tune_malloc, usable_cores


def run(config: Config, launch: LaunchSpec) -> None:
    """Train, evaluate and report as ``config`` says, at the place in the group that ``launch`` says.

    Raises UserError, GroupError, Stopped after a signal, or torch's RuntimeError where a collective breaks.
    """
    if config.debug:
        set_debug()
    tune_malloc()
    backend = "gloo" if config.emulated else config.backend
    with (
        process_group(launch, backend=backend, timeout_seconds=config.timeout) as world,
        _spoken_warnings(world),
    ):
        check_same_on_all_ranks(world, code_facts(), what="their code")
        check_same_on_all_ranks(world, config.shared_settings(), what="their settings")
        torch.set_num_threads(config.threads or max(1, usable_cores() // world.local_size))
        torch.manual_seed(config.seed)
        determinism.choose_algorithms(world.device, deterministic=config.deterministic)
        job = open_job(config, launch, world)
        folder = job.folder

        dataset = run_on_all_ranks(world, lambda: _load_dataset(config), patient=True)
        check_same_on_all_ranks(world, fingerprint := _fingerprint(dataset), what="their dataset")
        profile = _load_profile(config, world, dataset) if config.emulated else None
        path, entries = find_checkpoint(config, job, world)
        train_loader, plan = make_plan(
            config, launch, world, dataset, entries if job.resuming else None
        )
        plan[DATASET_CONTENTS] = fingerprint["contents (SHA-256)"]
        if entries is not None:
            refuse_other_training(path, entries, plan)
        if world.is_rank0:
            folder.write_json(
                "config.json",
                config.as_json() | {"world_size": world.size, "backend": world.backend} | plan,
            )
            folder.write_json("environment.json", environment())

        model = _build_model(
            config, world, dataset, pretrained=entries is None and not config.emulated
        )
        amp_dtype, notice = choose_amp(
            config.amp, config.amp_dtype, default=config.part == "PartThree", device=world.device
        )
        rate = learning_rate(config, plan)
        if world.is_rank0:
            for line in run_warnings(config, launch, world, plan, entries, amp_notice=notice):
                say(f"notice: {line}")
            log_header(
                config,
                world,
                model,
                dataset,
                plan,
                learning_rate=rate,
                amp_dtype=amp_dtype,
                folder=folder,
                profile=profile,
            )
        model, criterion, optimizer = prepare_model_for_training(
            model,
            world.device,
            rate,
            config.momentum,
            config.weight_decay,
            entries is not None,
            path or "",
            opt=config.opt,
            nesterov=config.nesterov,
            label_smoothing=config.label_smoothing,
            checkpoint=entries,
        )
        scheduler = build_schedule(
            optimizer,
            plan["schedule"],
            total_steps=plan["total_steps"],
            warmup_steps=plan["warmup_steps"],
            milestones=config.milestone_shares,
            step_factor=config.step_factor,
        )
        extra = _price_of_determinism(config, world, model, train_loader, amp_dtype)
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
            engine.emulation = Emulation(
                model, profile, rank=world.rank, classes=len(dataset.class_names)
            )
        if config.timeline:
            engine.timeline = Timeline(
                plan["total_steps"] - engine.sync.period + 1, plan["total_steps"]
            )
        first_epoch, last_epoch = epochs_to_train(config, plan, entries)
        saver = CheckpointManager(
            folder.checkpoints,
            every=config.checkpoint_every,
            keep=config.keep_checkpoints,
            writes=job.writes,
            copy_to=config.checkpoint,
            extra={"plan": plan},
            off=config.only_times,
        )
        trackers = _on_rank0_alone(world, lambda: _trackers(config, folder.path))
        with Progress(
            plan["total_steps"],
            done_steps=entries["step"] if entries else 0,
            log_every=config.log_every,
            global_batch_size=plan["batch_size"],
            visible=world.is_rank0,
            emulated=config.emulated,
        ) as progress:
            run_logger = RunLogger(
                world,
                folder,
                progress,
                trackers,
                folder.earlier_steps(entries["step"] if entries else 0) if job.resuming else [],
                engine.timeline,
                engine.sync.period,
            )
            validator = Validator(config, world, engine, saver, run_logger, dataset, entries)
            trace = folder.path / f"profile_rank{world.rank}.json" if config.profile else None
            with (
                step_profiler(trace) as profiled,
                stop_on_signals(engine.request_stop, lambda: _where_it_stopped(engine, saver)),
            ):
                model = train_model(
                    model,
                    world.device,
                    criterion,
                    optimizer,
                    first_epoch,
                    last_epoch,
                    train_loader,
                    folder.log(world.rank),
                    folder.checkpoints,
                    False,
                    rank=world.rank if world.size > 1 else "",
                    engine=engine,
                    scheduler=scheduler,
                    seed=config.seed,
                    max_steps=config.max_steps,
                    resume=entries,
                    saver=saver,
                    log_every=config.log_every,
                    on_steps=run_logger.steps,
                    on_epoch=validator.epoch,
                    after_step=profiled,
                )
        if trace is not None and not trace.exists() and world.is_rank0:
            say(
                "warning: --profile: the training was too short for a trace; give it three steps or more"
            )
        total_seconds = run_logger.total_seconds

        gather_measurements(
            world,
            folder,
            run_logger.own_steps,
            sync=config.sync,
            period=engine.sync.period,
            untimed_steps=config.untimed_steps,
            timeline=engine.timeline,
        )
        predictions = ema_predictions = None
        if not config.only_times:
            predictions = _evaluate(model, dataset, world, amp_dtype)
            ema_predictions = (
                _evaluate(engine.ema.module, dataset, world, amp_dtype)
                if engine.ema is not None
                else None
            )
        equal = len(set(gather_objects(world, digest(unwrap(model).state_dict())))) == 1
        if trackers is not None:
            trackers.close()
    if world.is_rank0:  # the group is closed: nobody waits while rank 0 draws
        report(
            config,
            world,
            folder,
            dataset,
            run_logger,
            predictions=predictions,
            ema_predictions=ema_predictions,
            checkpoint=saver.newest or path,
            ranks_equal=equal,
            resumed_from=path,
            batch_size=plan["batch_size"],
            total_seconds=total_seconds,
            extra=extra,
        )


@contextmanager
def _spoken_warnings(world: World) -> Iterator[None]:
    """Show warnings meant for the user as one line, on rank 0; they are the same on every rank."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def speak(
            message: Warning | str, category: type[Warning], *place: Any, **more: Any
        ) -> None:
            if category is not UserWarning:
                show(message, category, *place, **more)
            elif world.is_rank0:
                say(f"warning: {message}")

        warnings.showwarning = speak
        yield


def _load_profile(config: Config, world: World, dataset: Dataset) -> Profile:
    """Return the profile of emulated compute, the same on every rank."""
    image = (dataset.train.images.shape[1], dataset.train.images.shape[2])
    profile = run_on_all_ranks(
        world,
        lambda: load_profile(
            config.compute, model=config.model, image=image, machine=environment()["cpu"]
        ),
    )
    check_same_on_all_ranks(world, profile.as_json(), what="the profile of --compute")
    return profile


def _load_dataset(config: Config) -> Dataset:
    dataset = load_dataset(config.dataset, config.data_folder, mirror=config.mirror)
    return dataset if config.normalise == "dataset" else dataset.normalised_as_imagenet()


def _fingerprint(dataset: Dataset) -> dict[str, Any]:
    return {
        "classes": list(dataset.class_names),
        "training images": len(dataset.train),
        "test images": len(dataset.test),
        "contents (SHA-256)": digest(
            [dataset.train.images, dataset.train.labels, dataset.test.images, dataset.test.labels]
        ),
    }


def _build_model(config: Config, world: World, dataset: Dataset, *, pretrained: bool) -> nn.Module:
    """Return the model; rank 0's has its pretrained weights, which the first step gives to all."""
    if config.model not in PRETRAINED:
        return build_model(config.model, len(dataset.class_names))
    model = build_model(
        config.model,
        len(dataset.class_names),
        input_size=config.input_size,
        unfreeze=config.unfreeze,
    )

    def load() -> None:
        from common.models.transfer import load_pretrained

        if world.is_rank0 and pretrained:
            say(f"pretrained weights from {load_pretrained(model, config.pretrained_weights)}")

    run_on_all_ranks(world, load, patient=True)
    return model


def _price_of_determinism(
    config: Config,
    world: World,
    model: nn.Module,
    loader: TrainLoader,
    amp_dtype: torch.dtype | None,
) -> dict[str, float]:
    if not config.deterministic or world.device.type != "cuda":
        return {}
    images, labels = next(iter(loader))
    times = determinism.cost(model, images, labels, amp_dtype=amp_dtype)
    if world.is_rank0:
        say(
            f"deterministic: forward and backward take {times:.2f} times as long as with the fastest algorithms"
        )
    return {"deterministic_cost": times}


def _on_rank0_alone(world: World, action: Any) -> Any:
    """Run ``action`` on rank 0 and return its result there, None elsewhere; its UserError reaches all ranks."""
    return run_on_all_ranks(world, lambda: action() if world.is_rank0 else None)


def _trackers(config: Config, folder: Any) -> Trackers:
    return Trackers(
        wandb=config.log_wandb,
        tensorboard=config.log_tensorboard,
        folder=folder,
        name=f"{config.experiment}/{folder.name}",
        settings=config.as_json(),
    )


def _where_it_stopped(engine: TrainingEngine, saver: CheckpointManager) -> str:
    return (
        f"stopped after step {engine.step}, saved as {saver.newest}; --resume auto goes on"
        if engine.stopping
        else ""
    )


def _evaluate(
    model: nn.Module, dataset: Dataset, world: World, amp_dtype: torch.dtype | None
) -> Predictions:
    """Share the test set out, without padding, and return the whole set's predictions, on every rank."""
    loader = evaluation_loader(dataset, world)
    mine = predict(model, world.device, nn.CrossEntropyLoss(), loader, amp_dtype=amp_dtype)
    parts = gather_objects(world, (loader.ids.numpy(), mine))
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    return Predictions(
        np.concatenate([part.labels for _, part in parts])[order],
        np.concatenate([part.predicted for _, part in parts])[order],
        sum(part.loss_sum for _, part in parts),
    )
