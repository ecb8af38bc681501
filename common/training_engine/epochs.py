"""Training over epochs with validation: ``TrainingEngine.train``, and the parts of it that other loops share.

``report_epoch`` puts an epoch's numbers together over the ranks, ``EarlyStop`` decides when the target is reached.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from common.checkpoint import save_checkpoint
from common.distributed.collectives import check_same_on_all_ranks, run_on_all_ranks
from common.errors import UserError
from common.training_engine.evaluation_loop import validate
from common.training_engine.metrics import EpochResult

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine


@dataclass(frozen=True)
class EpochReport:
    """One epoch over all ranks: losses are means over samples, accuracies from 0 to 1, ``samples_per_second`` those of
    training over all ranks, ``ema_*`` of the averaged weights. NaN where there was no validation or no average, and all of
    them where compute was emulated."""

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    ema_val_loss: float
    ema_val_accuracy: float
    learning_rate: float
    samples_per_second: float
    seconds: float

    @property
    def deciding_accuracy(self) -> float:
        """The one that chooses the best epoch and reaches the target: of the averaged weights where they are kept."""
        return self.val_accuracy if math.isnan(self.ema_val_accuracy) else self.ema_val_accuracy

    def line(self) -> str:
        """The numbers for a person."""
        learned = f"train loss {self.train_loss:.4f}, accuracy {self.train_accuracy:.4f}"
        parts = [f"Epoch {self.epoch}: {'EMULATED' if math.isnan(self.train_loss) else learned}"]
        if not math.isnan(self.val_accuracy):
            parts.append(f"validation loss {self.val_loss:.4f}, accuracy {self.val_accuracy:.4f}")
        if not math.isnan(self.ema_val_accuracy):
            parts.append(
                f"EMA validation loss {self.ema_val_loss:.4f}, accuracy {self.ema_val_accuracy:.4f}"
            )
        return "; ".join(
            [*parts, f"{self.samples_per_second:,.0f} samples/s, {self.seconds:.1f} s"]
        )


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
        self.in_a_row = (
            self.in_a_row + 1 if self._target is not None and accuracy >= self._target else 0
        )
        return self.in_a_row >= self._patience


def report_epoch(
    engine: "TrainingEngine",
    epoch: int,
    result: EpochResult,
    val_loader: Iterable[tuple[Tensor, Tensor]] | None,
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
    train_loader: Iterable[tuple[Tensor, Tensor]],
    val_loader: Iterable[tuple[Tensor, Tensor]] | None,
    optimizer: Optimizer,
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
    check_same_on_all_ranks(
        engine.world,
        {
            "number of batches in train_loader": len(train_loader)
            if hasattr(train_loader, "__len__")
            else -1,
            "num_epochs": num_epochs,
        },
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
                scheduler.step(
                    *([report.val_loss] if isinstance(scheduler, ReduceLROnPlateau) else [])
                )
            for name, value in asdict(report).items():
                history.setdefault(name, []).append(value)
            samples += report.samples_per_second * report.seconds
            entries = engine.state(epoch=epoch, loss=report.train_loss) | {
                "val_accuracy": report.val_accuracy
            }
            is_best = report.deciding_accuracy > best
            best = max(best, report.deciding_accuracy)
            _save(engine, entries, best=save_best and is_best, last=save_last)
            _say(engine, report.line() + (", best so far" if is_best else ""))
            if stop.reached(report.deciding_accuracy):
                _say(
                    engine,
                    f"Target accuracy reached: {target_accuracy:g} in {patience} epochs in a row",
                )
                break
        total = time.perf_counter() - began
        _say(
            engine,
            f"Total time {total:.1f} s, {samples / total:,.0f} samples/s over all ranks, validation included",
        )
    finally:
        engine.close()
    return history


def _save(engine: "TrainingEngine", entries: dict[str, Any], *, best: bool, last: bool) -> None:
    def write() -> None:
        for name, wanted in (("best.pt", best), ("last.pt", last)):
            if wanted and engine.world.is_rank0:
                save_checkpoint(engine.output_folder / name, entries)

    run_on_all_ranks(engine.world, write)


def _say(engine: "TrainingEngine", text: str) -> None:
    if engine.world.is_rank0:
        print(text, flush=True)
