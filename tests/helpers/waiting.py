"""Wait for a condition, with a limit. Tests wait in no other way."""

import time
from collections.abc import Callable

LONG = 120.0
"""Seconds after which a wait fails: more than a busy machine needs."""


def wait_until(
    condition: Callable[[], object],
    what: str,
    *,
    timeout_seconds: float = LONG,
    look_seconds: float = 0.02,
    tell: Callable[[], str] = str,
) -> None:
    """Return once ``condition()`` holds.

    Raises AssertionError after ``timeout_seconds``, with ``what`` and the text that ``tell``
    returns.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_seconds:g} s {tell()}"
        time.sleep(look_seconds)  # between two checks
