"""Write checkpoints after every epoch, every few steps if asked for, and on a request to stop.

``CheckpointManager`` is a callback; ``CheckpointWriter`` lets the training go on meanwhile, and
common/checkpoint.py writes and verifies the files. ``state`` and ``load_state`` are methods of
``TrainingEngine``.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

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
from common.utils.processes import in_thread

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine

Entries = Mapping[str, Any]

_ADDITIVE = ("samples", "loss_sum", "correct")
_SUMS = (*_ADDITIVE, "steps", "step_seconds", "steady_steps", "steady_seconds", "seconds")


@dataclass(frozen=True)
class SavePolicy:
    """When to save, and how many checkpoints to keep.

    every_steps : steps between checkpoints within an epoch; None: none. every_epochs : epochs
    between checkpoints; the last epoch always has one. keep : the newest to keep; None: all.
    """

    every_steps: int | None = None
    every_epochs: int = 1
    keep: int | None = None


class CheckpointManager(Callback):
    """Writes ``Epoch_{n}.pt`` after epoch n, and ``Epoch_{n}_Step_{s}.pt`` after step s within it.

    Before each checkpoint the numbers of all its steps are checked: a loss that is not finite ends
    the training, and so does a gradient, except under fp16, where the GradScaler skips the step.

    Parameters
    ----------
    policy : when to save; by default after each epoch.
    extra : additional entries for each checkpoint, with their values at the time of saving.
    writes : whether this rank writes; None: rank 0 alone. Every rank calls every hook in any case.
    copy_to : a second file for the newest checkpoint; rank 0 writes it.
    before : called on each rank before a checkpoint is written, to put the records on the disk;
        by the thread that writes.
    in_background : write in a thread while the training goes on; None: on a GPU.
    """

    def __init__(
        self,
        folder: Path,
        *,
        policy: SavePolicy | None = None,
        extra: Mapping[str, Any] | None = None,
        writes: bool | None = None,
        copy_to: Path | None = None,
        before: Callable[[], None] | None = None,
        in_background: bool | None = None,
    ) -> None:
        self._folder, self._policy, self._extra = folder, policy or SavePolicy(), extra or {}
        self._writes, self._copy_to = writes, copy_to
        self._before = before or (lambda: None)
        self._in_background = in_background
        self.newest: Path | None = None

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        """Keep the engine, whose state is saved."""
        self._engine, self._epoch = engine, first_epoch
        in_background = self._in_background
        if in_background is None:
            in_background = engine.device.type == "cuda"
        self._writer = CheckpointWriter(engine.world, in_background=in_background)

    def on_step_end(self, step_in_epoch: int) -> None:
        """Save every ``every_steps`` steps, and on an agreed request to stop. Collective then."""
        every = self._policy.every_steps
        due = every is not None and self._engine.step % every == 0
        if self._engine.stopping or due:
            self._engine.flush_metrics()  # raises if a number is not finite
            self._engine.agree_on_buffers()
            entries = self._engine.state(
                epoch=self._epoch - 1, loss=math.nan, step_in_epoch=step_in_epoch
            )
            self._save(entries, checkpoint_path(self._folder, self._epoch, self._engine.step))

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Save, unless a stop request ended the epoch early and has saved already. Collective.

        The engine has flushed, and thereby checked, the epoch's metrics.
        """
        last = end.is_last or bool(end.stop_reason) or self._engine.stopping
        due = last or end.epoch % self._policy.every_epochs == 0
        if not end.result.complete:
            due = self.newest is None
        if due or end.is_best:
            entries = self._engine.state(epoch=end.epoch, loss=end.result.loss)
            path = checkpoint_path(self._folder, end.epoch) if due else None
            self._save(entries, path, best=end)
        if end.result.complete:
            self._epoch = end.epoch + 1
        if last:
            self._writer.finish()  # the training's time includes it

    def on_train_end(self) -> None:
        """Wait for the last write, and raise its error on all ranks. Collective."""
        self._writer.finish()

    def close(self) -> None:
        """Wait for the write under way, also after an error."""
        self._writer.close()

    def _save(self, entries: Entries, path: Path | None, *, best: EpochEnd | None = None) -> None:
        """Write the newest checkpoint to ``path``, and ``best.pt`` if the epoch is the best."""
        self._engine.world.activity.enter("checkpoint")
        rank0 = self._engine.world.is_rank0
        writes = rank0 if self._writes is None else self._writes

        def write(entries: Entries) -> None:
            self._before()
            if writes and best is not None and best.is_best:
                assert best.report is not None  # Validator has set both
                loss = {"loss": best.report.train_loss}
                save_checkpoint(self._folder / "best.pt", {**entries, **loss})
            if writes and path is not None:
                save_checkpoint(path, entries)
                if self._policy.keep is not None:
                    for old in checkpoints_by_age(self._folder)[self._policy.keep :]:
                        old.unlink(missing_ok=True)
            if path is not None and self._copy_to is not None and rank0:
                save_checkpoint(self._copy_to, entries)

        self._writer.start(write, {**entries, **self._extra} if writes or rank0 else {})
        self.newest = path or self.newest


class CheckpointWriter:
    """Runs each write in a thread on a copy of the state; without ``in_background`` at once.

    ``start`` each write, ``finish`` after the last one, ``close`` in any case. All ranks call
    ``start`` and ``finish`` in the same order, also those that write nothing.
    """

    def __init__(self, world: World, *, in_background: bool) -> None:
        self._world, self._in_background = world, in_background
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[Entries], None], entries: Entries) -> None:
        """Call ``write`` with the entries as they are now, after the write before it. Collective.

        Raises UserError on all ranks if a write failed on any: this write, or in the background the
        one before it.
        """
        if not self._in_background:
            run_on_all_ranks(self._world, partial(write, entries))
            return
        self.finish()
        # Copied in this thread: the next step overwrites the state.
        self._under_way = in_thread(partial(write, copied_to_cpu(entries)))

    def finish(self) -> None:
        """Wait until the write under way has ended. Collective.

        Raises UserError on all ranks if it failed on any.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            run_on_all_ranks(self._world, under_way.result)

    def close(self) -> None:
        """Wait for the write under way; only warn if it fails, since another error comes first."""
        if self._under_way is not None and (error := self._under_way.exception()) is not None:
            warnings.warn(f"the newest checkpoint was not written: {error}", stacklevel=2)
        self._under_way = None


def copied_to_cpu(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples; its tensors are on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied_to_cpu(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied_to_cpu, value))
    return value  # a plain value


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
            "ema_updates": engine.ema.updates,
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
        engine.ema.updates = entries.get("ema_updates", 0)
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
