"""The loops around the training step: ``fit`` and ``train_epoch``, TrainingEngine's methods."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

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

    Stops early after ``max_steps``, if a callback sets a ``stop_reason``, or if the ranks have
    agreed to stop. Call ``prepare`` first.

    Parameters
    ----------
    start_step : number of steps of the first epoch that are already done.
    options : ``seed``, ``max_steps`` and ``log_every`` of ``train_epoch``.
    """

    def notify(hook: str, *arguments: Any) -> None:
        for callback in callbacks:
            getattr(callback, hook)(*arguments)

    samplers: list[Any] = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    _compile(engine, loader)  # before the callbacks' clocks start
    notify("on_train_begin", engine, first_epoch)
    try:
        for epoch in range(first_epoch, last_epoch + 1):
            for sampler in samplers:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)  # otherwise all epochs would have the same order
            result = engine.train_epoch(
                loader,
                epoch=epoch,
                start_step=start_step,
                on_steps=partial(notify, "on_steps"),
                after_step=partial(notify, "on_step_end"),
                **options,
            )
            if not result.steps and not start_step:  # a resumed epoch may have none left, but ends
                break
            start_step = 0
            engine.world.activity.enter("end of the epoch")
            engine.agree_on_buffers()
            is_last = epoch == last_epoch or engine.step == options.get("max_steps")
            end = EpochEnd(epoch, result, is_last=is_last)
            notify("on_epoch_end", end)
            if end.stop_reason or engine.stopping:
                break
        notify("on_train_end")
    finally:
        notify("close")


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
    loader : yields (inputs, labels). It may have ``global_batch_sizes``, the samples of each step
        over all ranks; without it, each step costs an extra 8-byte all_reduce. It may have
        ``micro_batches``, the numbers of this rank's micro-batches within each global batch;
        without it ``accumulation_steps`` batches make a step.
    seed : sets torch's generator before each micro-batch, with epoch, step and micro-batch.
    start_step : number of steps of this epoch that are done already; ``loader.start_at`` skips
        them.
    on_steps : called on every rank every ``log_every`` steps, or sooner, with their records.
    after_step : called on every rank after every step with the number of steps done in this epoch.

    Raises GroupError on every rank if the loss or the gradients are not finite on any rank.
    """
    _compile(engine, loader)
    metrics = engine.metrics = MetricsBuffer(
        engine.world,
        engine.timer,
        epoch=epoch,
        log_every=log_every,
        overflow_is_normal=engine.scaler.is_enabled(),
        equal_gradients=engine.sync.equal_gradients,
        on_steps=on_steps,
    )
    if engine.timeline is not None:
        engine.sync.recording = engine.timeline.for_thread
    if engine.sync.weights_under_way:
        metrics.exchanges = 2  # before, "sync" waits for messages that began earlier
    if start_step:
        metrics.resume(engine.resumed_epoch, start_step=start_step)
        engine.resumed_epoch = EpochResult()
        _skip_steps(loader, epoch, start_step)
    sizes = getattr(loader, "global_batch_sizes", None)
    engine.model.train()
    hold_frozen_batchnorm(engine.model)
    engine.timer.begin()
    try:
        for index, window, seeds in _windows(engine, loader, epoch, seed, start_step, max_steps):
            local_samples = sum(len(labels) for _, labels in window)
            global_samples = (
                sizes[index] if sizes is not None else engine.sum_over_ranks(local_samples)
            )
            rate = engine.optimizer.param_groups[0]["lr"]
            messages = engine.timeline.around(engine.step + 1) if engine.timeline else nullcontext()
            with messages:
                outcome = engine.train_step(window, global_samples=global_samples, seeds=seeds)
            times = engine.timer.take()
            if engine.timeline is not None:
                engine.timeline.took(engine.step, engine.timer, times)
            metrics.add(
                engine.step, outcome, samples=local_samples, learning_rate=rate, times=times
            )
            if metrics.due:
                flush_metrics(engine, wait=not engine.sync.weights_under_way)
            if after_step is not None:
                after_step(index + 1)
            if engine.stopping:
                metrics.result.complete = sizes is not None and index + 1 == len(sizes)
                break
        flush_metrics(engine)
    except BaseException:
        metrics.flush_local()
        raise
    return metrics.result


def _compile(engine: "TrainingEngine", loader: Iterable[MicroBatch]) -> None:
    """Compile the model for the shape of the first batch, if that is asked for and not yet done."""
    if engine.compiles:
        engine.model.train()
        hold_frozen_batchnorm(engine.model)
        with torch.random.fork_rng():  # a loader may draw
            inputs, labels = next(iter(loader))
        if len(labels):
            engine.compile_for(to_device(inputs, engine.device), labels.to(engine.device))


def flush_metrics(engine: "TrainingEngine", *, wait: bool = True) -> None:
    """Record the steps since the last flush, and agree whether to stop. Collective.

    Call it before a checkpoint within an epoch, which then holds no step that is not recorded.
    ``wait`` : see ``MetricsBuffer.flush``. Raises GroupError on every rank if the loss or the
    gradients are not finite on any rank.
    """
    assert engine.metrics is not None  # train_epoch sets it
    agreed = engine.metrics.flush(stop=engine.stop_requested, wait=wait)
    engine.stopping = agreed or engine.stopping


def _skip_steps(loader: Iterable[MicroBatch], epoch: int, start_step: int) -> None:
    if not hasattr(loader, "start_at"):
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
    """Yield for each step its index, this rank's micro-batches, on the device, and their seeds."""
    numbers = _own_micro_batches(engine, loader)
    batches = iter(loader)
    for index in itertools.count(start_step):
        if max_steps is not None and engine.step >= max_steps:
            return
        seeds = None
        if seed is not None:
            seeds = [stream_seed(seed, STEP_STREAM, epoch, index, number) for number in numbers]
            torch.manual_seed(seeds[0])  # for loaders that draw random numbers
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

    Also make the engine keep BatchNorm statistics for each shard that this rank computes.
    """
    shards = getattr(loader, "shards_here", 1)
    if shards != len(engine.shards):
        engine.shards = ShardStatistics(unwrap(engine.model), shards)
    first = engine.world.rank * engine.accumulation_steps
    return getattr(loader, "micro_batches", range(first, first + engine.accumulation_steps))


def steps_an_epoch(loader: Iterable[MicroBatch]) -> int:
    """Return the number of optimiser steps per epoch if ``loader`` knows it, else of batches.

    Returns -1 for a loader without a length.
    """
    steps = getattr(loader, "global_batch_sizes", loader)
    return len(steps) if isinstance(steps, Sized) else -1
