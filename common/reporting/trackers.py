"""Dashboards: Weights & Biases and TensorBoard, each an optional dependency.

``Trackers`` takes the numbers of every step and epoch; docs/settings.md explains each field.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Literal

from common.errors import UserError
from common.utils.environment import setting


class Trackers:
    """The dashboards that the settings ask for; without any, every method does nothing.

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

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Write the numbers of an optimiser step by name, e.g. "train/loss", but those not NaN."""
        known = {name: value for name, value in numbers.items() if not math.isnan(value)}
        if self._wandb is not None:
            self._wandb.log(known, step=step)
        if self._tensorboard is not None:
            for name, value in known.items():
                self._tensorboard.add_scalar(name, value, step)

    def sync(self) -> None:
        """Write to the files what is still in memory; Weights & Biases writes by itself."""
        if self._tensorboard is not None:
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
