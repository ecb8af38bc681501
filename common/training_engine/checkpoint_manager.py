"""Write checkpoints: after epochs, every few steps if asked for, and on a request to stop.

``CheckpointManager`` is the callback that decides when; ``TrainingEngine.state`` says what a
checkpoint holds, and common/checkpoint.py writes and verifies the files.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.checkpoint import checkpoint_path, checkpoints_by_age, save_checkpoint
from common.distributed.collectives import run_on_all_ranks
from common.errors import UserError
from common.say import bytes_text
from common.training_engine.callbacks import Callback, EpochEnd
from common.training_engine.evaluation_loop import unwrap

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine


class CheckpointError(UserError):
    """A checkpoint could not be written; the numbers of the training are as good as before."""


@dataclass(frozen=True)
class SavePolicy:
    """Which checkpoints to write, and how many to keep.

    every_steps : steps between checkpoints within an epoch; None: none.
    every_epochs : epochs between checkpoints; the last epoch always has one. 0: none at all.
    keep : how many of the newest to keep; None: all.
    best : whether the best epoch so far is written to ``best.pt`` as well.
    single : name of the one file that each epoch's checkpoint replaces. No checkpoint is then
        written within an epoch, even on a request to stop.
    """

    every_steps: int | None = None
    every_epochs: int = 1
    keep: int | None = None
    best: bool = True
    single: str | None = None


class CheckpointManager(Callback):
    """Writes ``Epoch_{n}.pt`` after epoch n, and ``Epoch_{n}_Step_{s}.pt`` after step s within it.

    Before each checkpoint the numbers of all its steps are checked: a loss that is not finite ends
    the training, and so does a gradient, except under fp16, where the GradScaler skips the step.

    Parameters
    ----------
    extra : additional entries for each checkpoint, with their values at the time of saving.
    writes : whether this rank writes; None: rank 0 alone. Every rank calls every hook in any case.
    copy_to : a second file for the newest checkpoint; rank 0 writes it.
    before : called on each rank before a checkpoint is written, to put the records on the disk.

    The attribute ``newest`` is the last checkpoint written; None: there is none yet.
    """

    def __init__(
        self,
        folder: Path,
        *,
        policy: SavePolicy | None = None,
        extra: Mapping[str, Any] | None = None,
        writes: bool | None = None,
        copy_to: Path | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._policy = policy or SavePolicy()
        self._extra = {} if extra is None else extra
        self._writes = writes
        self._copy_to = copy_to
        self._before = before
        self.newest: Path | None = None

    def on_train_begin(self, engine: "TrainingEngine", first_epoch: int) -> None:
        """Keep the engine, whose state is saved. Collective.

        Raises UserError if there is no room for a checkpoint.
        """
        self._engine = engine
        self._epoch = first_epoch
        if self._writes is None:
            self._writes = engine.world.is_rank0
        run_on_all_ranks(engine.world, self._check_room)

    def _check_room(self) -> None:
        """Raise UserError if the folder has no room for one checkpoint."""
        needed = checkpoint_bytes(self._engine)
        folder = self._folder.absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(there).free
        if self._writes and free < needed:
            raise UserError(
                f"a checkpoint has about {bytes_text(needed)}, and {self._folder} has room for "
                f"{bytes_text(free)}: free some disk space, or write elsewhere (--output-dir)"
            )

    def on_step_end(self, step_in_epoch: int) -> None:
        """Save every ``every_steps`` steps, and on an agreed request to stop. Collective then."""
        engine = self._engine
        every = self._policy.every_steps
        due = engine.stopping or (every is not None and engine.step % every == 0)
        if due and self._policy.single is None:
            engine.flush_metrics()  # raises if a number is not finite
            engine.agree_on_buffers()
            path = checkpoint_path(self._folder, self._epoch, engine.step)
            self._save([path], epoch=self._epoch - 1, loss=math.nan, step_in_epoch=step_in_epoch)

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Save, unless a stop request ended the epoch early and has saved already. Collective.

        The engine has flushed, and thereby checked, the epoch's metrics.
        """
        policy = self._policy
        if not end.result.complete:
            return
        self._epoch = end.epoch + 1
        last = end.is_last or bool(end.stop_reason) or self._engine.stopping
        files = []
        if policy.best and end.is_best:
            files.append(self._folder / "best.pt")
        if policy.every_epochs and (last or end.epoch % policy.every_epochs == 0):
            path = checkpoint_path(self._folder, end.epoch)
            files.append(self._folder / policy.single if policy.single else path)
        if files:
            loss = end.result.loss if end.report is None else end.report.train_loss
            self._save(files, epoch=end.epoch, loss=loss)

    def _save(self, files: list[Path], **progress: Any) -> None:
        """Write the state to each of ``files`` and to ``copy_to``. Collective.

        Raises CheckpointError on all ranks if a write failed on any.
        """
        engine = self._engine
        engine.world.activity.enter("checkpoint")
        entries = engine.state(**progress) | dict(self._extra)
        only_best = files[-1].name == "best.pt"

        def write() -> None:
            self._before()
            if self._writes:
                for path in files:
                    save_checkpoint(path, entries)
                if self._policy.keep is not None and not only_best:
                    for old in checkpoints_by_age(self._folder)[self._policy.keep :]:
                        old.unlink(missing_ok=True)
            if engine.world.is_rank0 and self._copy_to is not None and not only_best:
                save_checkpoint(self._copy_to, entries)

        try:
            run_on_all_ranks(engine.world, write)
        except UserError as error:
            raise CheckpointError(str(error)) from error
        if not only_best:
            self.newest = files[-1]


def checkpoint_bytes(engine: "TrainingEngine") -> int:
    """Return about how many bytes a checkpoint will have; the optimiser may have no state yet."""
    weights = sum(tensor.nbytes for tensor in unwrap(engine.model).state_dict().values())
    state = 0
    for group in engine.optimizer.param_groups:
        copies = 2 if "betas" in group else bool(group.get("momentum"))
        state += copies * sum(parameter.nbytes for parameter in group["params"])
    return len(engine.evaluated_models) * weights + state
