"""What signals do to a run: ``stop_on_signals`` while it trains, ``interruptible`` at its end.

Schedulers send SIGTERM or SIGUSR1 before they end a job. Ctrl-C raises KeyboardInterrupt in the
main thread, wherever that is: see common/cli.py.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from common.errors import Stopped
from common.training_engine import TrainingEngine
from common.training_engine.checkpoint_manager import CheckpointManager
from common.utils.processes import in_thread, on_signals


@contextmanager
def stop_on_signals(
    engine: TrainingEngine, checkpoints: CheckpointManager
) -> Iterator[CheckpointManager]:
    """On a signal to any rank, stop all ranks at the same step and save; then raise Stopped."""
    received: list[str] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        engine.request_stop()

    with on_signals((signal.SIGTERM, signal.SIGUSR1), handle):
        yield checkpoints
    if not engine.stopping:
        return
    why = received[0] if received else "a signal to another rank"
    saved = (
        "nothing was saved, since this run writes no checkpoints"
        if checkpoints.newest is None
        else f"saved as {checkpoints.newest}; resume with --resume auto"
    )
    raise Stopped(f"{why}: stopped after step {engine.step}, {saved}")


def interruptible(action: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """Run ``action`` in a thread and wait for it, so that Ctrl-C raises here, at once.

    Within foreign code the exception may be lost: Python prints and drops what is raised in a
    callback of a weak reference, of which matplotlib has many.
    """
    in_thread(partial(action, *arguments, **named)).result()
