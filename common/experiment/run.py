"""One run from beginning to end. Read ``run`` downward; setup.py builds what it uses."""

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from common.distributed.collectives import check_same_on_all_ranks, gather_objects
from common.distributed.process_group import process_group, set_debug
from common.experiment.auto_buckets import auto_buckets
from common.experiment.graceful_stop import stop_on_signals
from common.experiment.observers import build_progress, open_logger, open_profiler
from common.experiment.resume import find_checkpoint, open_job
from common.experiment.setup import (
    Setup,
    build_checkpoint_manager,
    build_engine,
    build_network,
    build_test_loader,
    build_validator,
    choose_threads_and_algorithms,
    load_compute_profile,
    load_run_dataset,
    prepare_model,
    price_of_determinism,
    warnings_on_rank0,
    write_settings,
)
from common.experiment.training_plan import make_plan, refuse_other_training
from common.experiment.validation import predict_test_set
from common.reporting.header import log_header
from common.reporting.rank_stats import gather_measurements
from common.reporting.summary import report, report_end_of_rank
from common.training import train_model
from common.training_engine import Callback
from common.training_engine.evaluation_loop import unwrap
from common.utils.hashing import digest
from common.utils.source_hash import code_facts
from common.utils.system import tune_malloc

if TYPE_CHECKING:
    from common.config.schema import Config
    from common.distributed.launch_env import LaunchSpec


def run(config: "Config", launch: "LaunchSpec") -> None:
    """Train, evaluate and report as ``config`` says; ``launch`` says which rank this is.

    Raises UserError, GroupError, Stopped after a signal, RuntimeError if a collective breaks.
    """
    with ExitStack() as locks:  # on the run's folder, until the report is written
        _run(config, launch, locks)


def _run(config: "Config", launch: "LaunchSpec", locks: ExitStack) -> None:
    began = time.perf_counter()
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
        choose_threads_and_algorithms(config, world)
        job = open_job(config, launch, world, locks)

        dataset, contents = load_run_dataset(config, world)
        profile = load_compute_profile(config, world, dataset)
        checkpoint = find_checkpoint(config, job, world)
        continued = checkpoint.entries if checkpoint and job.resuming else None
        train_loader, plan = make_plan(config, launch, world, dataset, contents, continued)
        if checkpoint is not None:
            refuse_other_training(checkpoint.path, checkpoint.entries, plan)
        setup = Setup(config, launch, world, job, dataset, plan, checkpoint, profile, began)

        model = build_network(setup)
        setup = replace(setup, buckets=auto_buckets(setup, model, train_loader))
        write_settings(setup)
        log_header(setup, model)
        model, criterion, optimizer, scheduler = prepare_model(setup, model)
        extra = price_of_determinism(setup, model, train_loader)
        engine = build_engine(setup, model)

        progress = build_progress(setup)
        test_loader = build_test_loader(setup, progress)
        validator = build_validator(setup, test_loader)
        with (
            open_logger(setup, progress) as logger,
            open_profiler(setup) as profiler,
            stop_on_signals(
                engine, build_checkpoint_manager(setup, validator, logger)
            ) as checkpoints,
        ):
            model = train_model(
                model,
                world.device,
                criterion,
                optimizer,
                *setup.epochs,
                train_loader,
                setup.folder.log(world.rank),
                setup.folder.checkpoints,
                distribute_flag=False,  # the engine's strategy averages
                rank=world.rank if world.size > 1 else "",
                engine=engine,
                scheduler=scheduler,
                seed=config.seed,
                max_steps=config.max_steps,
                resume=setup.entries or None,
                saver=Callback() if config.only_times else checkpoints,
                log_every=config.log_every,
                callbacks=[validator, logger, profiler],
            )

        gather_measurements(setup, engine, logger.own_steps, logger.memory)
        predictions = (
            []
            if config.only_times
            else predict_test_set(engine, test_loader, flip=config.tta == "flip")
        )
        digests = gather_objects(world, digest(unwrap(model).state_dict()), schema=str)
    if world.is_rank0:  # the group is closed: no rank waits while rank 0 draws
        newest = checkpoints.newest or (checkpoint.path if checkpoint else None)
        report(
            setup,
            engine,
            logger,
            predictions,
            newest,
            ranks_equal=len(set(digests)) == 1,
            extra=extra,
        )
    else:
        report_end_of_rank(setup, steps=len(logger.own_steps))
