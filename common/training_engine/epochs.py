"""The loops around the training step: ``fit`` and ``train_epoch``, TrainingEngine's methods."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from common.data.sharding import STEP_STREAM, stream_seed
from common.distributed.collectives import warn_of_equal_batches
from common.errors import UserError
from common.training_engine.batchnorm import ShardStatistics, hold_frozen_batchnorm
from common.training_engine.callbacks import Callback, EpochEnd
from common.training_engine.evaluation_loop import to_device, unwrap
from common.training_engine.metrics import EpochResult, MetricsBuffer, StepRecord

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine

MicroBatch = tuple[Tensor, Tensor]
"""Inputs of shape (samples, ...) and labels of shape (samples,) for one forward pass."""


@runtime_checkable
class ResumableLoader(Protocol):
    """A loader that can begin within an epoch, such as common.data.loaders.TrainLoader."""

    def start_at(self, step: int) -> None:
        """Leave out the first ``step`` global batches of the next epoch."""


def fit(
    engine: "TrainingEngine",
    loader: Iterable[MicroBatch],
    first_epoch: int,
    last_epoch: int,
    *,
    callbacks: Sequence[Callback] = (),
    start_step: int = 0,
    **options: Any,
) -> None:
    """Train epochs ``first_epoch`` to ``last_epoch``, both included, and call the callbacks' hooks.

    Stops early after ``max_steps``, when a callback gives a reason to, or when the ranks have
    agreed to stop. Call ``prepare`` before.

    Parameters
    ----------
    start_step : steps of the first epoch that are done already.
    options : ``seed``, ``max_steps`` and ``log_every`` of ``train_epoch``.
    """

    def on_steps(records: list[StepRecord]) -> None:
        for callback in callbacks:
            callback.on_steps(records)

    def after_step(step_in_epoch: int) -> None:
        for callback in callbacks:
            callback.on_step_end(step_in_epoch)

    options |= {"on_steps": on_steps, "after_step": after_step}
    samplers: list[Any] = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    for callback in callbacks:
        callback.on_train_begin(engine, first_epoch)
    for epoch in range(first_epoch, last_epoch + 1):
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # else every epoch would come in the first one's order
        result = engine.train_epoch(loader, epoch=epoch, start_step=start_step, **options)
        start_step = 0
        if not result.step_seconds:
            break
        engine.agree_on_buffers()
        end = EpochEnd(epoch, result)
        for callback in callbacks:
            callback.on_epoch_end(end)
        if end.stop_reason or engine.stopping:
            break
    for callback in callbacks:
        callback.on_train_end()


def train_epoch(
    engine: "TrainingEngine",
    loader: Iterable[MicroBatch],
    *,
    epoch: int,
    seed: int | None = None,
    start_step: int = 0,
    max_steps: int | None = None,
    log_every: int = 10,
    on_steps: Callable[[list[StepRecord]], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> EpochResult:
    """Train on every batch of ``loader`` once, or until ``engine.step`` reaches ``max_steps``.

    Parameters
    ----------
    loader : yields (inputs, labels). If it has ``global_batch_sizes`` (samples of each step over
        all ranks), these weight the loss; else each step costs an 8-byte all_reduce. If it has
        ``micro_batches``, these are the numbers of its micro-batches within each global batch; else
        ``accumulation_steps`` of its batches make a step.
    seed : torch's generator is set before each micro-batch from (seed, epoch, step, micro-batch).
    start_step : steps of this epoch that are done already; ``loader.start_at`` leaves them out.
    on_steps : called on every rank every ``log_every`` steps, or sooner, with their records.
    after_step : called on every rank after every step with the number of steps done in this epoch.

    Raises GroupError on every rank where loss or gradients are not finite on one.
    """
    began = time.perf_counter()
    metrics = MetricsBuffer(
        engine.world,
        engine.timer,
        epoch=epoch,
        log_every=log_every,
        overflow_is_normal=engine.scaler.is_enabled(),
        equal_gradients=engine.sync.equal_gradients,
        on_steps=on_steps,
    )
    if start_step:
        _skip_steps(loader, epoch, start_step)
    sizes = getattr(loader, "global_batch_sizes", None)  # samples over all ranks, by step
    engine.model.train()
    hold_frozen_batchnorm(engine.model)
    try:
        for index, window, seeds in _windows(engine, loader, epoch, seed, start_step, max_steps):
            local_samples = sum(len(labels) for _, labels in window)
            global_samples = sizes[index] if sizes else engine.sum_over_ranks(local_samples)
            rate = engine.optimizer.param_groups[0]["lr"]
            with _recording(engine):
                outcome = engine.train_step(window, global_samples=global_samples, seeds=seeds)
            times = engine.timer.take()
            if engine.timeline is not None:
                engine.timeline.took(engine.step, engine.timer.spans(times))
            metrics.add(
                engine.step, outcome, samples=local_samples, learning_rate=rate, times=times
            )
            if metrics.due:
                engine.stopping = metrics.flush(stop=engine.stop_requested)
            if after_step is not None:
                after_step(index + 1)
            if engine.stopping:
                metrics.result.complete = sizes is not None and index + 1 == len(sizes)
                break
        engine.timer.take()
        engine.stopping = metrics.flush(stop=engine.stop_requested) or engine.stopping
    except BaseException:
        metrics.flush_local()
        raise
    metrics.result.seconds = time.perf_counter() - began
    return metrics.result


def _skip_steps(loader: Iterable[MicroBatch], epoch: int, start_step: int) -> None:
    if not isinstance(loader, ResumableLoader):
        raise UserError(
            f"resuming within epoch {epoch}, after step {start_step}, needs a loader with a method "
            f"start_at(step), and {type(loader).__name__} has none: resume from the checkpoint of "
            "an epoch"
        )
    loader.start_at(start_step)


def _windows(
    engine: "TrainingEngine",
    loader: Iterable[MicroBatch],
    epoch: int,
    seed: int | None,
    start_step: int,
    max_steps: int | None,
) -> Iterator[tuple[int, list[MicroBatch], list[int] | None]]:
    """Yield for each step its index, this rank's micro-batches on the device, and their seeds."""
    numbers = _own_micro_batches(engine, loader)
    batches = iter(loader)
    for index in itertools.count(start_step):
        if max_steps is not None and engine.step >= max_steps:
            return
        seeds = None
        if seed is not None:
            seeds = [stream_seed(seed, STEP_STREAM, epoch, index, number) for number in numbers]
            torch.manual_seed(seeds[0])  # the loader may draw, too
        with engine.timer.section("data"):
            window = [
                (to_device(inputs, engine.device), labels.to(engine.device, non_blocking=True))
                for inputs, labels in itertools.islice(batches, len(numbers))
            ]
        if not window:
            return
        if not engine.first_batch_compared:
            engine.first_batch_compared = True
            warn_of_equal_batches(engine.world, *window[0])
        yield index, window, seeds


def _own_micro_batches(engine: "TrainingEngine", loader: Iterable[MicroBatch]) -> Sequence[int]:
    """Return the numbers of this rank's micro-batches within each global batch.

    The engine then keeps BatchNorm statistics for each shard that this rank computes.
    """
    shards = getattr(loader, "shards_here", 1)
    if shards != len(engine.shards):
        engine.shards = ShardStatistics(unwrap(engine.model), shards)
    first = engine.world.rank * engine.accumulation_steps
    return getattr(loader, "micro_batches", range(first, first + engine.accumulation_steps))


def _recording(engine: "TrainingEngine") -> AbstractContextManager:
    """Record the next step's messages, if it is one of the timeline's."""
    if engine.timeline is None:
        return nullcontext()
    return engine.timeline.around(engine.step + 1)
