"""The loops around the step, all methods of ``TrainingEngine``: ``train`` over ``epochs`` over ``train_epoch``.

``report_epoch`` puts an epoch's numbers together over the ranks, ``EarlyStop`` decides when the target is reached.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from common.checkpoint import save_checkpoint
from common.data.sharding import STEP_STREAM, stream_seed
from common.distributed.collectives import (
    check_same_on_all_ranks,
    run_on_all_ranks,
    warn_of_equal_batches,
)
from common.errors import UserError
from common.training_engine.batchnorm import ShardStatistics, hold_frozen_batchnorm
from common.training_engine.evaluation_loop import to_device, unwrap, validate
from common.training_engine.metrics import EpochReport, EpochResult, MetricsBuffer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from common.training_engine.engine import TrainingEngine
    from common.training_engine.metrics import StepRecord

MicroBatch = tuple[Tensor, Tensor]


@runtime_checkable
class ResumableLoader(Protocol):
    """A loader that can begin an epoch after its first steps, as ``common.data.loaders.TrainLoader`` does."""

    def start_at(self, step: int) -> None:
        """Leave out the first ``step`` global batches of the next epoch."""


class EarlyStop:
    """Says when ``target_accuracy`` (0 to 1) is reached in ``patience`` epochs in a row; None is never reached.

    All ranks must give it the same accuracies, as those of ``report_epoch`` are.
    """

    def __init__(self, target_accuracy: float | None, patience: int) -> None:
        if target_accuracy is not None and not 0 < target_accuracy <= 1:
            raise UserError(
                f"target_accuracy: got {target_accuracy}, give a fraction above 0 and of at most 1, e.g. 0.85"
            )
        if patience < 1:
            raise UserError(
                f"patience: got {patience}, give the number of epochs in a row, at least 1"
            )
        self._target, self._patience = target_accuracy, patience
        self.in_a_row = 0

    def reached(self, accuracy: float) -> bool:
        """Count one more epoch."""
        reached = self._target is not None and accuracy >= self._target
        self.in_a_row = self.in_a_row + 1 if reached else 0
        return self.in_a_row >= self._patience


def report_epoch(
    engine: "TrainingEngine",
    epoch: int,
    result: EpochResult,
    val_loader: Iterable[MicroBatch] | None,
    criterion: nn.Module,
) -> EpochReport:
    """Validate the weights, and their average if there is one, and return the epoch's numbers over all ranks. Collective.

    ``result`` is this rank's; buffers must have been agreed on.
    """
    totals = torch.tensor(
        [result.loss_sum, result.correct, result.samples], dtype=torch.float64, device=engine.device
    )
    if engine.world.size > 1:
        dist.all_reduce(totals)
    loss_sum, correct, samples = totals.tolist()
    scores = [(math.nan, math.nan), (math.nan, math.nan)]
    models = [engine.model, *([engine.ema.module] if engine.ema is not None else [])]
    if val_loader is not None:
        for index, model in enumerate(models):
            scores[index] = validate(
                model, engine.world, criterion, val_loader, amp_dtype=engine.amp_dtype
            )
    return EpochReport(
        epoch,
        loss_sum / max(1, samples),
        correct / max(1, samples),
        *scores[0],
        *scores[1],
        engine.optimizer.param_groups[0]["lr"],
        samples / max(result.seconds, 1e-9),
        result.seconds,
    )


def steps_by_epoch(scheduler: LRScheduler | None) -> bool:
    """Whether torch's scheduler counts epochs, as most do; OneCycleLR and CyclicLR count steps."""
    return scheduler is not None and not isinstance(scheduler, OneCycleLR | CyclicLR)


def train(
    engine: "TrainingEngine",
    train_loader: Iterable[MicroBatch],
    val_loader: Iterable[MicroBatch] | None,
    optimizer: "Optimizer",
    criterion: nn.Module,
    *,
    num_epochs: int,
    scheduler: LRScheduler | None = None,
    scheduler_by_epoch: bool | None = None,
    save_best: bool = True,
    save_last: bool = True,
    target_accuracy: float | None = None,
    patience: int = 2,
    seed: int | None = None,
) -> dict[str, list[float]]:
    """Train epochs 1 to ``num_epochs``, validate each, and return the numbers of every epoch, by name.

    ``best.pt``, of the best validation accuracy so far, and ``last.pt`` go to ``output_dir/experiment_name/``, with the
    average of the weights beside them where it is kept; rank 0 writes and prints a line an epoch.

    Parameters
    ----------
    train_loader, val_loader : yield (inputs, labels) of this rank's share; every rank needs as many training batches.
        In a group, give them a DistributedSampler. Without ``val_loader`` there is no ``best.pt``.
    scheduler : stepped after every epoch, or after every optimiser step where it counts these: OneCycleLR and CyclicLR.
        ``scheduler_by_epoch`` says it for others. ReduceLROnPlateau gets the validation loss.
    target_accuracy : end once validation accuracy (0 to 1) has reached it in ``patience`` epochs in a row, on all ranks.
    seed : torch's generator is set from it before each micro-batch.

    Returns lists of equal length: ``epoch``, ``train_loss``, ``train_accuracy``, ``val_loss``, ``val_accuracy``,
    ``ema_val_loss``, ``ema_val_accuracy``, ``learning_rate``, ``samples_per_second``, ``seconds``. Raises UserError on
    settings that do not fit, GroupError where the loss is not finite.
    """
    if num_epochs < 1:
        raise UserError(f"num_epochs: got {num_epochs}, give at least 1")
    if target_accuracy is not None and val_loader is None:
        raise UserError("target_accuracy needs a val_loader: give one, or leave it out")
    batches = len(train_loader) if isinstance(train_loader, Sized) else -1
    check_same_on_all_ranks(
        engine.world,
        {"number of batches in train_loader": batches, "num_epochs": num_epochs},
        what="how much they train",
    )
    stop = EarlyStop(target_accuracy, patience)
    by_epoch = steps_by_epoch(scheduler) if scheduler_by_epoch is None else scheduler_by_epoch
    history: dict[str, list[float]] = {}
    best, began, samples = -1.0, time.perf_counter(), 0.0
    try:
        engine.prepare(optimizer, criterion, scheduler, scheduler_by_epoch=by_epoch)
        for epoch, result in engine.epochs(train_loader, 1, num_epochs, seed=seed):
            report = report_epoch(engine, epoch, result, val_loader, criterion)
            if by_epoch:
                _step_scheduler(scheduler, report)
            for name, value in asdict(report).items():
                history.setdefault(name, []).append(value)
            samples += report.samples_per_second * report.seconds
            entries = engine.state(epoch=epoch, loss=report.train_loss)
            entries["val_accuracy"] = report.val_accuracy
            is_best = report.deciding_accuracy > best
            best = max(best, report.deciding_accuracy)
            _save(engine, entries, best=save_best and is_best, last=save_last)
            _print_on_rank0(engine, report.line() + (", best so far" if is_best else ""))
            if stop.reached(report.deciding_accuracy):
                target = f"{target_accuracy:g} in {patience} epochs in a row"
                _print_on_rank0(engine, f"Target accuracy reached: {target}")
                break
        total = time.perf_counter() - began
        rate = f"{samples / total:,.0f} samples/s over all ranks"
        _print_on_rank0(engine, f"Total time {total:.1f} s, {rate}, validation included")
    finally:
        engine.close()
    return history


def _step_scheduler(scheduler: LRScheduler | None, report: EpochReport) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(report.val_loss)
    elif scheduler is not None:
        scheduler.step()


def _save(engine: "TrainingEngine", entries: dict[str, Any], *, best: bool, last: bool) -> None:
    def write() -> None:
        for name, wanted in (("best.pt", best), ("last.pt", last)):
            if wanted and engine.world.is_rank0:
                save_checkpoint(engine.output_folder / name, entries)

    run_on_all_ranks(engine.world, write)


def _print_on_rank0(engine: "TrainingEngine", text: str) -> None:
    if engine.world.is_rank0:
        print(text, flush=True)


def epochs(
    engine: "TrainingEngine",
    loader: Iterable[MicroBatch],
    first: int,
    last: int,
    *,
    start_step: int = 0,
    **options: Any,
) -> Iterator[tuple[int, EpochResult]]:
    """Train epochs ``first`` to ``last``, both included, and yield each one's number and result, buffers agreed on.

    ``start_step`` : steps of the first epoch that are done already. ``options`` are those of ``train_epoch``. Ends
    early where ``max_steps`` are done or the ranks have agreed to stop.
    """
    samplers: list[Any] = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    for epoch in range(first, last + 1):
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        done = start_step if epoch == first else 0
        result = engine.train_epoch(loader, epoch=epoch, start_step=done, **options)
        if not result.step_seconds:
            return
        engine.agree_on_buffers()
        yield epoch, result
        if engine.stopping:
            return


def train_epoch(
    engine: "TrainingEngine",
    loader: Iterable[MicroBatch],
    *,
    epoch: int,
    seed: int | None = None,
    start_step: int = 0,
    max_steps: int | None = None,
    log_every: int = 10,
    on_steps: Callable[[list["StepRecord"]], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> EpochResult:
    """Train on every batch of ``loader`` once, or until ``engine.step`` reaches ``max_steps``.

    Parameters
    ----------
    loader : yields (inputs, labels). If it has ``global_batch_sizes`` (samples of each step over all ranks), these
        weight the loss; else each step costs an 8-byte all_reduce. If it has ``micro_batches``, these are the numbers of
        its micro-batches within each global batch; else ``accumulation_steps`` of its batches make a step.
    seed : if given, torch's generator is set before each micro-batch from (seed, epoch, step, micro-batch).
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
    sizes = getattr(loader, "global_batch_sizes", None)
    micro_batches = _own_micro_batches(engine, loader)
    if start_step:
        if not isinstance(loader, ResumableLoader):
            raise UserError(
                f"resuming within epoch {epoch}, after step {start_step}, needs a loader with a method "
                f"start_at(step), and {type(loader).__name__} has none: resume from the checkpoint of an epoch"
            )
        loader.start_at(start_step)
    batches = iter(loader)
    engine.model.train()
    hold_frozen_batchnorm(engine.model)
    try:
        for index in itertools.count(start_step):
            if max_steps is not None and engine.step >= max_steps:
                break
            seeds = None
            if seed is not None:
                seeds = [stream_seed(seed, STEP_STREAM, epoch, index, n) for n in micro_batches]
                torch.manual_seed(seeds[0])  # the loader may draw, too
            with engine.timer.section("data"):
                window = [
                    (to_device(inputs, engine.device), labels.to(engine.device, non_blocking=True))
                    for inputs, labels in itertools.islice(batches, len(micro_batches))
                ]
            if not window:
                break
            if not engine.first_batch_compared:
                engine.first_batch_compared = True
                warn_of_equal_batches(engine.world, *window[0])
            local = sum(len(labels) for _, labels in window)
            global_samples = sizes[index] if sizes is not None else engine.sum_over_ranks(local)
            rate = engine.optimizer.param_groups[0]["lr"]
            with _recording(engine):
                outcome = engine.train_step(window, global_samples=global_samples, seeds=seeds)
            times = engine.timer.take()
            if engine.timeline is not None:
                engine.timeline.took(engine.step, engine.timer.spans(times))
            metrics.add(engine.step, outcome, samples=local, learning_rate=rate, times=times)
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


def _own_micro_batches(engine: "TrainingEngine", loader: Iterable[MicroBatch]) -> Sequence[int]:
    """Return which micro-batches of each global batch this rank computes; keep statistics for each of its shards."""
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
