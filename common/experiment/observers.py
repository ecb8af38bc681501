"""What shows and records a run while it trains: progress, logger, dashboards and profiler."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.distributed.collectives import run_on_all_ranks
from common.experiment.resume import Job
from common.reporting.console import Progress, say
from common.reporting.run_folder import RunFolder
from common.reporting.run_logger import RunLogger
from common.run_setup import Setup
from common.training_engine import AfterEachStep, Callback, StepRecord


def build_progress(setup: Setup) -> Progress:
    """Return what shows the steps and the evaluated images; rank 0 alone prints."""
    return Progress(
        setup.plan.total_steps,
        done_steps=setup.entries.get("step", 0),
        log_every=setup.config.log_every,
        global_batch_size=setup.plan.batch_size,
        visible=setup.world.is_rank0,
    )


@contextmanager
def open_logger(setup: Setup, job: Job, progress: Progress) -> Iterator[RunLogger]:
    """Yield the callback that reports the training: progress and metrics. Collective.

    First remove what the folder records of steps that this run repeats.
    """
    world = setup.world
    folder = job.folder

    def take_over() -> list[StepRecord]:
        if job.keeps:
            folder.cut(step=setup.entries.get("step", 0), epoch=setup.entries.get("epoch", 0))
        return folder.earlier_steps() if world.is_rank0 else []

    history = run_on_all_ranks(world, take_over) if job.resuming else []
    with progress.bar:
        yield RunLogger(world, folder, progress, history)


def build_trackers(setup: Setup, folder: RunFolder) -> Callback:
    """Return the callback that fills the dashboards, on rank 0 if there are any. Collective."""
    config = setup.config

    def build() -> Callback:
        if not setup.world.is_rank0 or not (config.log_wandb or config.log_tensorboard):
            return Callback()
        from common.reporting.trackers import Trackers  # a run imports what it uses

        return Trackers(
            wandb=config.log_wandb,
            wandb_project=config.experiment,
            tensorboard=config.log_tensorboard,
            folder=folder.path,
            name=f"{config.experiment_name}/{folder.path.name}",
            settings=config.as_json(),
            first_step=setup.entries.get("step", 0) + 1,
        )

    return run_on_all_ranks(setup.world, build)


@contextmanager
def open_profiler(setup: Setup, folder: RunFolder) -> Iterator[Callback]:
    """Yield the callback that writes profile_rank<r>.json if --profile is set.

    The file holds steps 3 to 5, for ui.perfetto.dev or chrome://tracing.
    """
    if not setup.config.profile:
        yield Callback()
        return
    from torch.profiler import profile, schedule

    trace = folder.path / f"profile_rank{setup.world.rank}.json"
    with profile(
        schedule=schedule(skip_first=1, wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
    ) as profiler:
        yield AfterEachStep(profiler.step)
    if not trace.exists() and setup.world.is_rank0:
        say(
            "warning: --profile: the training was too short for a trace: train for at least 3 steps"
        )
