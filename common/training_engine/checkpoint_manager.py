"""Write checkpoints after every epoch, every few steps if asked for, and on a request to stop.

``CheckpointManager`` is a callback; common/checkpoint.py writes and verifies the files. ``state``
and ``load_state`` are methods of ``TrainingEngine``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from common.checkpoint import (
    checkpoint_path,
    checkpoints_by_age,
    load_model_state,
    load_optimizer_state,
    load_plain_state,
    save_checkpoint,
)
from common.distributed.collectives import gather_states, run_on_all_ranks
from common.distributed.process_group import World
from common.errors import UserError
from common.training_engine.callbacks import Callback, EpochEnd
from common.training_engine.evaluation_loop import unwrap
from common.training_engine.metrics import EpochResult, sum_over_ranks

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine

_ADDITIVE = ("samples", "loss_sum", "correct")
_SUMS = (*_ADDITIVE, "steps", "step_seconds", "steady_steps", "steady_seconds", "seconds")


class CheckpointManager(Callback):
    """Writes ``Epoch_{n}.pt`` after epoch n, and ``Epoch_{n}_Step_{s}.pt`` after step s within it.

    Parameters
    ----------
    every : steps between checkpoints within an epoch; None: none.
    keep : number of checkpoints to keep, the newest; None: all.
    extra : additional entries for each checkpoint, with their values at the time of writing.
    writes : whether this rank writes; None: rank 0 alone. Every rank calls every hook in any case.
    copy_to : a second file for the newest checkpoint; rank 0 writes it.
    before : called on each rank before a checkpoint is written, to put the records on the disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int | None = None,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
        writes: bool | None = None,
        copy_to: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._folder, self._every, self._keep, self._extra = folder, every, keep, extra or {}
        self._writes, self._copy_to = writes, copy_to
        self._before = before or (lambda: None)
        self.newest: Path | None = None

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        """Keep the engine, whose state is saved."""
        self._engine, self._epoch = engine, first_epoch

    def on_step_end(self, step_in_epoch: int) -> None:
        """Save every ``every`` steps, and when the ranks have agreed to stop. Collective then."""
        due = self._every is not None and self._engine.step % self._every == 0
        if self._engine.stopping or due:
            self._engine.flush_metrics()
            self._engine.agree_on_buffers()
            entries = self._engine.state(
                epoch=self._epoch - 1, loss=math.nan, step_in_epoch=step_in_epoch
            )
            self._save(checkpoint_path(self._folder, self._epoch, self._engine.step), entries)

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Save, unless a stop request ended the epoch early and has saved already. Collective."""
        if end.is_best:
            assert end.report is not None  # Validator has set both
            best = self._engine.state(epoch=end.epoch, loss=end.report.train_loss)
            self._save(self._folder / "best.pt", best, newest=False)
        if end.result.complete or self.newest is None:
            entries = self._engine.state(epoch=end.epoch, loss=end.result.loss)
            self._save(checkpoint_path(self._folder, end.epoch), entries)
            self._epoch = end.epoch + 1

    def _save(self, path: Path, entries: Mapping[str, Any], *, newest: bool = True) -> None:
        self._engine.world.activity.enter("checkpoint")
        entries = {**entries, **self._extra}
        rank0 = self._engine.world.is_rank0

        def write() -> None:
            self._before()
            if rank0 if self._writes is None else self._writes:
                save_checkpoint(path, entries)
                if self._keep is not None:
                    for old in checkpoints_by_age(self._folder)[self._keep :]:
                        old.unlink(missing_ok=True)
            if newest and self._copy_to is not None and rank0:
                save_checkpoint(self._copy_to, entries)

        run_on_all_ranks(self._engine.world, write)
        if newest:
            self.newest = path


def state(
    engine: "TrainingEngine", *, epoch: int, loss: float, step_in_epoch: int = 0
) -> dict[str, Any]:
    """Return a checkpoint's entries. Collective. Call ``agree_on_buffers`` first.

    Parameters
    ----------
    epoch : the last completed epoch.
    loss : that epoch's mean training loss on this rank.
    step_in_epoch : number of steps completed in the next epoch; their sums are saved, too.
    """
    entries = {
        "epoch": epoch,
        "step": engine.step,
        "step_in_epoch": step_in_epoch,
        "loss": loss,
        "model_state_dict": unwrap(engine.model).state_dict(),
        "optimizer_state_dict": engine.optimizer.state_dict(),
        "scheduler_state_dict": engine.scheduler.state_dict() if engine.scheduler else None,
        "scaler_state_dict": engine.scaler.state_dict(),
        "sync_state_dicts": gather_states(engine.world, engine.sync.state_dict()),
    }
    if step_in_epoch and engine.metrics is not None:
        entries["epoch_sums"] = _gather_sums(engine.metrics.result, engine.world)
    if engine.ema is not None:
        entries |= {
            "ema_state_dict": engine.ema.module.state_dict(),
            "ema_updates": int(engine.ema.n_averaged),
        }
    return entries


def load_state(engine: "TrainingEngine", entries: Mapping[str, Any]) -> None:
    """Resume from a checkpoint's entries, except weights and optimiser, which are loaded before.

    Call ``prepare`` first. Raises UserError if they belong to another training.
    """
    name = "to resume from"
    if engine.scheduler is not None and entries.get("scheduler_state_dict") is not None:
        load_plain_state(engine.scheduler, entries["scheduler_state_dict"], name=name)
        # Again, since building the scheduler has changed the learning rates.
        load_optimizer_state(engine.optimizer, entries, name=name)
    if entries.get("scaler_state_dict"):
        load_plain_state(engine.scaler, entries["scaler_state_dict"], name=name)
    if engine.ema is not None:
        averages = entries.get("ema_state_dict") or entries["model_state_dict"]
        load_model_state(engine.ema.module, {"model_state_dict": averages}, name=name)
        engine.ema.n_averaged.fill_(entries.get("ema_updates", 0))
    engine.step = entries.get("step", 0)
    engine.resumed_epoch = _own_sums(entries.get("epoch_sums", []), engine.world)
    states = entries.get("sync_state_dicts") or []
    if engine.world.rank < len(states):
        load_plain_state(engine.sync, states[engine.world.rank], name=name, signed=True)


def _gather_sums(result: EpochResult, world: World) -> list[dict[str, float]]:
    """Return what each rank has done in this epoch so far, by rank. Collective."""
    rows = [[0.0] * len(_SUMS) for _ in range(world.size)]
    rows[world.rank] = [getattr(result, name) for name in _SUMS]
    return [dict(zip(_SUMS, row, strict=True)) for row in sum_over_ranks(world, rows)]


def _own_sums(saved: object, world: World) -> EpochResult:
    """Return what this rank has done of the epoch before the resume.

    With another number of ranks, rank 0 takes over the samples of all: the sums over the ranks stay
    the same. Raises UserError if ``saved`` is not what ``_gather_sums`` returned.
    """
    try:
        ranks = msgspec.convert(saved, list[EpochResult], strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"the checkpoint's epoch_sums cannot be used: {error}") from error
    if not ranks:
        return EpochResult()
    own = ranks[world.rank % len(ranks)]
    if len(ranks) == world.size:
        return own
    taken_over = ranks if world.rank == 0 else []
    totals = {name: sum(getattr(one, name) for one in taken_over) for name in _ADDITIVE}
    return replace(own, **totals)
