"""One run from beginning to end: read ``run`` downward, and leave it only to go deeper; setup.py builds what it uses."""

from typing import TYPE_CHECKING

import torch

from common.distributed.collectives import check_same_on_all_ranks, gather_objects
from common.distributed.process_group import process_group, set_debug
from common.experiment.graceful_stop import stop_on_signals
from common.experiment.resume import find_checkpoint, open_job
from common.experiment.setup import (
    build_checkpoint_manager,
    build_engine,
    build_network,
    contents_digest,
    load_compute_profile,
    load_run_dataset,
    open_trackers,
    price_of_determinism,
    warnings_on_rank0,
)
from common.experiment.training_plan import (
    DATASET_CONTENTS,
    epochs_to_train,
    learning_rate,
    make_plan,
    refuse_other_training,
    run_warnings,
)
from common.experiment.validation import Validator, predict_test_set
from common.profiling.torch_profiler import step_profiler
from common.reporting.console import Progress, say
from common.reporting.rank_stats import gather_measurements
from common.reporting.run_logger import RunLogger, log_header
from common.reporting.summary import report
from common.training import prepare_model_for_training, train_model
from common.training_engine import determinism
from common.training_engine.amp import choose_amp
from common.training_engine.evaluation_loop import unwrap
from common.training_engine.lr_schedules import build_schedule
from common.utils.environment import environment
from common.utils.hashing import digest
from common.utils.source_hash import code_facts
from common.utils.system import tune_malloc, usable_cores

if TYPE_CHECKING:
    from common.config.schema import Config
    from common.distributed.launch_env import LaunchSpec
    from common.training_engine import TrainingEngine
    from common.training_engine.checkpoint_manager import CheckpointManager


def run(config: "Config", launch: "LaunchSpec") -> None:
    """Train, evaluate and report as ``config`` says, at the place in the group that ``launch`` says.

    Raises UserError, GroupError, Stopped after a signal, or torch's RuntimeError where a collective breaks.
    """
    if config.debug:
        set_debug()
    tune_malloc()
    backend = "gloo" if config.emulated else config.backend
    with (
        process_group(launch, backend=backend, timeout_seconds=config.timeout) as world,
        warnings_on_rank0(world),
    ):
        check_same_on_all_ranks(world, code_facts(), what="their code")
        check_same_on_all_ranks(world, config.shared_settings(), what="their settings")
        torch.set_num_threads(config.threads or max(1, usable_cores() // world.local_size))
        torch.manual_seed(config.seed)
        determinism.choose_algorithms(world.device, deterministic=config.deterministic)
        job = open_job(config, launch, world)
        folder = job.folder

        dataset = load_run_dataset(config, world)
        contents = contents_digest(world, dataset)
        profile = load_compute_profile(config, world, dataset)
        path, entries = find_checkpoint(config, job, world)
        train_loader, plan = make_plan(
            config, launch, world, dataset, entries if job.resuming else None
        )
        plan[DATASET_CONTENTS] = contents
        if path is not None and entries is not None:
            refuse_other_training(path, entries, plan)
        if world.is_rank0:
            group = {"world_size": world.size, "backend": world.backend}
            folder.write_json("config.json", config.as_json() | group | plan)
            folder.write_json("environment.json", environment())

        pretrained = entries is None and not config.emulated
        model = build_network(config, world, dataset, pretrained=pretrained)
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
        extra = price_of_determinism(config, world, model, train_loader, amp_dtype)
        engine = build_engine(
            config,
            world,
            model,
            plan,
            amp_dtype=amp_dtype,
            profile=profile,
            classes=len(dataset.class_names),
        )
        first_epoch, last_epoch = epochs_to_train(config, plan, entries)
        checkpoint_manager = build_checkpoint_manager(config, job, plan)
        trackers = open_trackers(config, world, folder)
        done_steps = entries["step"] if entries else 0
        with Progress(
            plan["total_steps"],
            done_steps=done_steps,
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
                folder.earlier_steps(done_steps) if job.resuming else [],
                engine.timeline,
                engine.sync.period,
            )
            validator = Validator(
                config, world, engine, checkpoint_manager, run_logger, dataset, entries
            )
            trace = folder.path / f"profile_rank{world.rank}.json" if config.profile else None
            with (
                step_profiler(trace) as profiled,
                stop_on_signals(
                    engine.request_stop, lambda: _describe_stop(engine, checkpoint_manager)
                ),
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
                    saver=checkpoint_manager,
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
            predictions = predict_test_set(model, dataset, world, amp_dtype=amp_dtype)
            if engine.ema is not None:
                averaged = engine.ema.module
                ema_predictions = predict_test_set(averaged, dataset, world, amp_dtype=amp_dtype)
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
            checkpoint=checkpoint_manager.newest or path,
            ranks_equal=equal,
            resumed_from=path,
            batch_size=plan["batch_size"],
            total_seconds=total_seconds,
            extra=extra,
        )


def _describe_stop(engine: "TrainingEngine", checkpoint_manager: "CheckpointManager") -> str:
    if not engine.stopping:
        return ""
    saved = checkpoint_manager.newest
    return f"stopped after step {engine.step}, saved as {saved}; --resume auto goes on"
