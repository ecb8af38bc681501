"""One run from beginning to end. Read ``run`` downward; setup.py builds what it uses."""

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from common.distributed.collectives import gather_objects
from common.experiment.graceful_stop import interruptible, stop_on_signals
from common.experiment.observers import build_progress, build_trackers, open_logger, open_profiler
from common.experiment.resume import find_checkpoint, open_job
from common.experiment.setup import (
    build_checkpoint_manager,
    build_engine,
    build_network,
    build_validator,
    choose_threads_and_algorithms,
    join_ranks,
    load_compute_profile,
    load_run_dataset,
    write_settings,
)
from common.experiment.validation import CountedLoader, predict_test_set
from common.reporting.header import log_header
from common.reporting.rank_stats import gather_measurements
from common.reporting.summary import report, report_end_of_rank
from common.run_setup import Setup, prepare_model
from common.training import EpochLog
from common.training_engine.checkpoint_manager import CheckpointError
from common.training_engine.evaluation_loop import unwrap
from common.training_plan import make_plan, refuse_other_training
from common.utils.hashing import digest
from common.utils.system import tune_malloc

if TYPE_CHECKING:
    from common.config.schema import Config
    from common.distributed.launch_env import LaunchSpec


def run(config: "Config", launch: "LaunchSpec") -> None:
    """Train, evaluate and report as ``config`` says; ``launch`` says which rank this is.

    Raises UserError, GroupError, Stopped after a signal, RuntimeError if a collective breaks.
    """
    began = time.perf_counter()
    tune_malloc()
    with ExitStack() as locks:  # on the run's folder, until the report is written
        with join_ranks(config, launch) as world:
            choose_threads_and_algorithms(config, world)
            job = open_job(config, launch, world, locks)

            dataset, contents = load_run_dataset(config, world)
            profile = load_compute_profile(config, world, dataset)
            checkpoint, entries = find_checkpoint(config, job, world)
            restarted = entries if job.resuming else {}
            loader, plan = make_plan(config, launch, world, dataset, contents, restarted)
            if checkpoint is not None:
                refuse_other_training(checkpoint, entries, plan)
            setup = Setup(config, launch, world, dataset, plan, checkpoint, entries, profile, began)

            model = build_network(setup)
            write_settings(setup, job.folder)
            log_header(setup, model, job.folder)
            model, criterion, optimizer, scheduler = prepare_model(setup, model)
            engine = build_engine(setup, model)

            progress = build_progress(setup)
            test_loader = CountedLoader(setup, progress)
            validator = build_validator(setup, test_loader)
            with (
                closing(engine),
                open_logger(setup, job, progress) as logger,
                open_profiler(setup, job.folder) as profiler,
                stop_on_signals(
                    engine, build_checkpoint_manager(setup, job, validator, logger)
                ) as checkpoints,
            ):
                engine.prepare(optimizer, criterion, scheduler)
                if checkpoint is not None:
                    engine.load_state(entries)
                callbacks = [
                    *(validator, logger, build_trackers(setup, job.folder), profiler),
                    EpochLog(job.folder.log(world.rank)),
                ]
                if not config.only_times:
                    callbacks.append(checkpoints)
                try:
                    engine.fit(
                        loader,
                        *setup.epochs,
                        callbacks=callbacks,
                        start_step=entries.get("step_in_epoch", 0),
                        max_steps=config.max_steps,
                        seed=config.seed,
                        log_every=config.log_every,
                    )
                except CheckpointError as error:  # raised again once the numbers are reported
                    locks.callback(_fail, error)

            measured = gather_measurements(setup, engine, logger)
            predictions = predict_test_set(setup, engine, test_loader, logger.own_steps)
            digests = gather_objects(world, digest(unwrap(engine.model).state_dict()), schema=str)
        # The group is closed: no rank waits while rank 0 draws.
        if world.is_rank0:
            newest = checkpoints.newest or checkpoint
            equal = len(set(digests)) == 1
            interruptible(
                report, setup, engine, logger, measured, predictions, newest, ranks_equal=equal
            )
        else:
            report_end_of_rank(setup, logger)


def _fail(error: Exception) -> None:
    raise error
