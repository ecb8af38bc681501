"""Save and end on SIGTERM or SIGUSR1, which schedulers send before they end a job."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from common.errors import Stopped
from common.training_engine import TrainingEngine
from common.training_engine.checkpoint_manager import CheckpointManager


@contextmanager
def stop_on_signals(
    engine: TrainingEngine, checkpoints: CheckpointManager
) -> Iterator[CheckpointManager]:
    """On a signal to any rank, stop all ranks at the same step and save; then raise Stopped."""
    received: list[str] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        engine.request_stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield checkpoints
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if engine.stopping:
        why = received[0] if received else "a signal to another rank"
        saved = f"saved as {checkpoints.newest}; resume with --resume auto"
        if checkpoints.newest is None:
            saved = "nothing was saved, since this run writes no checkpoints"
        raise Stopped(f"{why}: stopped after step {engine.step}, {saved}")
