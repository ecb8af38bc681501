"""Moments on the CPU's clock or on a GPU, and the seconds between two of them."""

import time
from typing import Any

import torch

Moment = Any  # a ``time.perf_counter`` on the CPU, a recorded ``torch.cuda.Event`` on a GPU


def now(device: torch.device) -> Moment:
    """Return this moment on ``device``.

    On a GPU this queues an event behind all earlier work, without waiting for it.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))  # the current device may be another one
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return the seconds from ``begin`` to ``end``, two moments of one device.

    Waits until a GPU has reached ``end``.
    """
    if isinstance(end, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000
