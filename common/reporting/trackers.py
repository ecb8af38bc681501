"""Dashboards: Weights & Biases and TensorBoard, each an optional dependency.

``Trackers`` takes the numbers of every step and epoch; docs/dashboards.md explains each field.
"""

from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Literal

from common.errors import UserError
from common.utils.environment import setting

_WANDB_HOST = "api.wandb.ai"


class Trackers:
    """The dashboards that the settings ask for; without any, every method does nothing.

    Parameters
    ----------
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
        tensorboard: bool,
        folder: Path,
        name: str,
        settings: Mapping[str, Any],
        first_step: int = 1,
    ) -> None:
        self._wandb = self._tensorboard = None
        if wandb:
            try:
                import wandb as library
            except ImportError as error:
                raise _missing("--log-wandb", "wandb") from error
            try:
                self._wandb = library.init(
                    project="data-parallel-lab",
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
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise _missing("--log-tensorboard", "tensorboard") from error
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Write the numbers of an optimiser step by name, e.g. "train/loss"."""
        if self._wandb is not None:
            self._wandb.log(dict(numbers), step=step)
        if self._tensorboard is not None:
            for name, value in numbers.items():
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


def _missing(flag: str, package: str) -> UserError:
    return UserError(
        f"{flag} needs the package {package}: pip install -e '.[{package}]', or leave the flag out"
    )


def _wandb_mode() -> Literal["offline"] | None:
    """Return "offline" without WANDB_MODE and account, or wandb would ask; None: wandb decides."""
    if setting("WANDB_MODE") or setting("WANDB_API_KEY"):
        return None
    try:
        return None if netrc().authenticators(_WANDB_HOST) else "offline"
    except (OSError, NetrcParseError):
        return "offline"
