"""Dashboards: Weights & Biases and TensorBoard, each an optional dependency.

``Trackers`` is the callback that logs every step and epoch; docs/settings.md explains each field.
Only a run that asks for a dashboard imports this module.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Literal

from common.errors import UserError
from common.training_engine import Callback, EpochEnd, StepRecord, TrainingEngine
from common.utils.environment import setting


class Trackers(Callback):
    """The dashboards that the settings ask for, one or both. Only rank 0 has them.

    Parameters
    ----------
    wandb_project : None: that of WANDB_PROJECT, else data-parallel-lab. Weights & Biases reads
        WANDB_ENTITY by itself.
    folder : the run's folder, where both write. Weights & Biases also writes to its server if the
        user has an account.
    first_step : the step that the run begins or resumes with; TensorBoard hides what an earlier
        part of the run wrote from this step on.

    Raises UserError if a package is missing.
    """

    def __init__(
        self,
        *,
        wandb: bool,
        wandb_project: str | None = None,
        tensorboard: bool,
        folder: Path,
        name: str,
        settings: Mapping[str, Any],
        first_step: int = 1,
    ) -> None:
        self._wandb = None
        self._tensorboard = None
        if wandb:
            library = _library("wandb", "wandb")
            try:
                self._wandb = library.init(
                    project=wandb_project or setting("WANDB_PROJECT") or "data-parallel-lab",
                    name=name,
                    config=dict(settings),
                    dir=str(folder),
                    mode=_wandb_mode(),
                )
            except library.Error as error:
                raise UserError(
                    f"--log-wandb: {' '.join(str(error).split())}: set WANDB_MODE=offline, or "
                    "leave the flag out"
                ) from error
        if tensorboard:
            library = _library("tensorboard", "torch.utils.tensorboard")
            self._tensorboard = library.SummaryWriter(
                str(folder / "tensorboard"), purge_step=first_step
            )

    def on_train_begin(self, engine: TrainingEngine, first_epoch: int) -> None:
        """Keep the engine, which counts the steps."""
        self._engine = engine

    def on_steps(self, records: list[StepRecord]) -> None:
        """Log the steps."""
        for record in records:
            self.log(
                {
                    "train/loss": record.loss,
                    "train/accuracy": record.accuracy,
                    "train/learning_rate": record.learning_rate,
                    "train/epoch": record.epoch,
                    "seconds/step": record.step_seconds,
                    **{f"seconds/{name}": value for name, value in record.seconds.items()},
                },
                step=record.step,
            )

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Log the epoch, unless a request to stop ended it early."""
        report = end.report
        assert report is not None  # the Validator comes first
        if end.result.complete:
            self.log(
                {
                    "val/loss": report.val_loss,
                    "val/accuracy": report.val_accuracy,
                    "val/ema_loss": report.ema_val_loss,
                    "val/ema_accuracy": report.ema_val_accuracy,
                    "epoch/train_loss": report.train_loss,
                    "epoch/train_accuracy": report.train_accuracy,
                    "epoch/samples_per_second": report.samples_per_second,
                },
                step=self._engine.step,
            )

    def on_train_end(self) -> None:
        """Close the dashboards; after a request to stop, at once, the end of the process does."""
        if not self._engine.stopping:
            self.close()

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Write the numbers of an optimiser step by name, e.g. "train/loss", but those not NaN.

        TensorBoard's files then hold them, before a checkpoint does; Weights & Biases writes by
        itself.
        """
        known = {name: value for name, value in numbers.items() if not math.isnan(value)}
        if self._wandb is not None:
            self._wandb.log(known, step=step)
        if self._tensorboard is not None:
            for name, value in known.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def close(self) -> None:
        """Write what is still in memory."""
        if self._wandb is not None:
            self._wandb.finish()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _library(package: str, module: str) -> Any:
    """Return the module of an optional package. UserError if the package is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"--log-{package} needs the package {package}: pip install -e '.[{package}]', or leave "
            "the flag out"
        ) from error


def _wandb_mode() -> Literal["offline"] | None:
    """Return "offline" without WANDB_MODE and account, or wandb would ask; None: wandb decides."""
    account: object = setting("WANDB_MODE") or setting("WANDB_API_KEY")
    with suppress(OSError, NetrcParseError):
        account = account or netrc().authenticators("api.wandb.ai")
    return None if account else "offline"
