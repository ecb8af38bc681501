"""What shows and records a run while it trains: the progress, the logger and the profiler."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.distributed.collectives import run_on_all_ranks
from common.experiment.resume import Job
from common.reporting.console import Progress, say
from common.reporting.run_folder import RunFolder
from common.reporting.run_logger import RunLogger
from common.reporting.trackers import Trackers
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
    """Yield the callback that reports the training: progress, metrics, dashboards. Collective.

    First remove what the folder records of steps that this run repeats.
    """
    config = setup.config
    world = setup.world
    folder = job.folder
    done_steps = setup.entries.get("step", 0)

    def build() -> Trackers:
        return Trackers(
            wandb=config.log_wandb and world.is_rank0,
            wandb_project=config.experiment,
            tensorboard=config.log_tensorboard and world.is_rank0,
            folder=folder.path,
            name=f"{config.experiment_name}/{folder.path.name}",
            settings=config.as_json(),
            first_step=done_steps + 1,
        )

    def take_over() -> list[StepRecord]:
        if job.keeps:
            folder.cut(step=done_steps, epoch=setup.entries.get("epoch", 0))
        return folder.earlier_steps() if world.is_rank0 else []

    history = run_on_all_ranks(world, take_over) if job.resuming else []
    trackers = run_on_all_ranks(world, build)
    with progress.bar:
        yield RunLogger(world, folder, progress, trackers, history)
    trackers.close()  # not after an error: it may take minutes before the other ranks are told


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
