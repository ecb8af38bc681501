"""``TrainingEngine.train``: train, validate and save in one call, for scripts and notebooks."""

import time
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from common.checkpoint import save_checkpoint
from common.distributed.collectives import check_same_on_all_ranks
from common.errors import UserError
from common.training_engine.callbacks import Callback, EarlyStop, EpochEnd, EpochReport, Validator
from common.training_engine.checkpoint_manager import CheckpointWriter, Entries
from common.training_engine.epochs import steps_an_epoch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from common.training_engine.engine import TrainingEngine


def train(
    engine: "TrainingEngine",
    train_loader: Iterable[tuple[Tensor, Tensor]],
    val_loader: Iterable[tuple[Tensor, Tensor]] | None,
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
    """Train epochs 1 to ``num_epochs``, validate each, and return every epoch's numbers by name.

    Rank 0 writes ``best.pt`` (the best validation accuracy so far) and ``last.pt`` to
    ``output_dir/experiment_name/``; both include the moving average of the weights, if there is
    one. It also prints one line per epoch.

    Parameters
    ----------
    train_loader, val_loader : yield (inputs, labels) of this rank's share; all ranks need the same
        number of training batches. In a group, give them a DistributedSampler. Without
        ``val_loader`` there is no ``best.pt``.
    scheduler : OneCycleLR and CyclicLR are stepped after every optimiser step, others after every
        epoch, unless ``scheduler_by_epoch`` says otherwise. ReduceLROnPlateau gets the validation
        loss.
    target_accuracy : stop once the validation accuracy (0 to 1) has reached it in ``patience``
        epochs in a row.
    seed : sets torch's generator before each micro-batch.

    Returns lists of equal length: ``epoch``, ``train_loss``, ``train_accuracy``, ``val_loss``,
    ``val_accuracy``, ``ema_val_loss``, ``ema_val_accuracy``, ``learning_rate``,
    ``samples_per_second``, ``seconds``. Raises UserError on settings that do not fit, GroupError
    if the loss is not finite.
    """
    if num_epochs < 1:
        raise UserError(f"num_epochs: got {num_epochs}, give at least 1")
    if target_accuracy is not None and val_loader is None:
        raise UserError("target_accuracy needs a val_loader: give one, or leave it out")
    amount = {
        "number of batches in train_loader": steps_an_epoch(train_loader),
        "num_epochs": num_epochs,
    }
    check_same_on_all_ranks(engine.world, amount, what="how much they train")
    counts_steps = isinstance(scheduler, OneCycleLR | CyclicLR)
    by_epoch = not counts_steps if scheduler_by_epoch is None else scheduler_by_epoch
    validator = Validator(val_loader, criterion, EarlyStop(target_accuracy, patience))
    after_epoch = _AfterEpoch(scheduler if by_epoch else None, best=save_best, last=save_last)
    began = time.perf_counter()
    try:
        engine.prepare(optimizer, criterion, scheduler, scheduler_by_epoch=by_epoch)
        engine.fit(train_loader, 1, num_epochs, callbacks=[validator, after_epoch], seed=seed)
        history = after_epoch.history
        samples = sum(
            rate * seconds
            for rate, seconds in zip(history["samples_per_second"], history["seconds"], strict=True)
        )
        total = time.perf_counter() - began
        rate = f"{samples / total:,.0f} samples/s over all ranks"
        after_epoch.print_on_rank0(f"Training time {total:.1f} s with validation; {rate}")
    finally:
        engine.close()
    return history


class _AfterEpoch(Callback):
    """Steps the scheduler, keeps the history, writes ``best.pt`` and ``last.pt``, prints a line."""

    def __init__(self, scheduler: LRScheduler | None, *, best: bool, last: bool) -> None:
        self._scheduler, self._best, self._last = scheduler, best, last
        self.history: dict[str, list[float]] = {field.name: [] for field in fields(EpochReport)}

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        self._engine = engine
        self._writer = CheckpointWriter(engine.world, in_background=engine.device.type == "cuda")

    def on_epoch_end(self, end: EpochEnd) -> None:
        assert end.report is not None  # Validator comes first
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(end.report.val_loss)
        elif self._scheduler is not None:
            self._scheduler.step()
        for name, value in asdict(end.report).items():
            self.history[name].append(value)
        self._save(end, end.report)
        self.print_on_rank0(end.report.line() + (", best so far" if end.is_best else ""))
        if end.stop_reason:
            self.print_on_rank0(end.stop_reason)

    def on_train_end(self) -> None:
        self._writer.finish()

    def close(self) -> None:
        self._writer.close()

    def _save(self, end: EpochEnd, report: EpochReport) -> None:
        wanted = {"best.pt": self._best and end.is_best, "last.pt": self._last}
        names = [name for name in wanted if wanted[name]]
        state = self._engine.state(epoch=end.epoch, loss=report.train_loss)

        def write(entries: Entries) -> None:
            if entries:
                for name in names:
                    save_checkpoint(self._engine.output_folder / name, entries)

        entries = state | {"val_accuracy": report.val_accuracy}
        self._writer.start(write, entries if self._engine.world.is_rank0 and names else {})

    def print_on_rank0(self, text: str) -> None:
        if self._engine.world.is_rank0:
            print(text, flush=True)
