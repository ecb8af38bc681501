"""Wait for a condition, with a limit. Tests wait in no other way."""

import time

LONG = 120.0
"""Seconds after which a wait fails: more than a busy machine needs."""


def wait_until(condition, what, *, timeout_seconds=LONG, look_seconds=0.02, tell=str):
    """Return once ``condition()`` holds.

    Raises AssertionError after ``timeout_seconds``, with ``what`` and the text that ``tell``
    returns.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_seconds:g} s {tell()}"
        time.sleep(look_seconds)  # between two checks
