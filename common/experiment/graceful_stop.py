"""SIGTERM and SIGUSR1 ask a run to save and end, as schedulers send them before they take a machine away."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from common.errors import Stopped


@contextmanager
def stop_on_signals(
    request_stop: Callable[[], None], describe: Callable[[], str]
) -> Iterator[None]:
    """Call ``request_stop`` when a signal comes; where the work inside then ends early, raise Stopped.

    Parameters
    ----------
    describe : what was saved, for the message; empty where the work came to its own end all the same.
    """
    received: list[str] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        request_stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if saved := describe():
        raise Stopped(f"{received[0] if received else 'a signal to another rank'}: {saved}")
