"""What a training must keep to go on exactly: ``TrainingEngine.state`` collects it, ``load_state`` takes it back."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.distributed import gather_objects
from common.training_engine.prediction import unwrap

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine


def state(engine: "TrainingEngine", *, epoch: int, loss: float, step_in_epoch: int = 0) -> dict[str, Any]:
    """Return a checkpoint's entries. Collective; call ``agree_on_buffers`` before.

    Parameters
    ----------
    epoch : the last complete one.
    loss : its mean training loss on this rank.
    step_in_epoch : steps done of the epoch after it.
    """
    scheduler = engine.scheduler.state_dict() if engine.scheduler is not None else None
    entries = {"epoch": epoch, "step": engine.step, "step_in_epoch": step_in_epoch, "loss": loss,
               "model_state_dict": unwrap(engine.model).state_dict(),
               "optimizer_state_dict": engine.optimizer.state_dict(), "scheduler_state_dict": scheduler,
               "scaler_state_dict": engine.scaler.state_dict(),
               "sync_state_dicts": gather_objects(engine.world, engine.sync.state_dict())}
    if engine.ema is not None:
        entries |= {"ema_state_dict": engine.ema.module.state_dict(), "ema_updates": int(engine.ema.n_averaged)}
    return entries


def load_state(engine: "TrainingEngine", entries: Mapping[str, Any]) -> None:
    """Go on from a checkpoint whose weights and optimiser state are loaded already; after ``prepare``."""
    if engine.scheduler is not None and entries.get("scheduler_state_dict") is not None:
        engine.scheduler.load_state_dict(entries["scheduler_state_dict"])
        engine.optimizer.load_state_dict(entries["optimizer_state_dict"])  # making the scheduler has changed the rates
    if entries.get("scaler_state_dict"):
        engine.scaler.load_state_dict(entries["scaler_state_dict"])
    if engine.ema is not None:
        engine.ema.module.load_state_dict(entries.get("ema_state_dict") or entries["model_state_dict"])
        engine.ema.n_averaged.fill_(entries.get("ema_updates", 0))
    engine.step = entries.get("step", 0)
    states = entries.get("sync_state_dicts") or []
    if engine.world.rank < len(states):
        engine.sync.load_state_dict(states[engine.world.rank])
