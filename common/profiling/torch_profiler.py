"""Trace a few training steps with torch.profiler, for ui.perfetto.dev or chrome://tracing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_SKIP, _WARM_UP, _RECORD = 1, 1, 3


@contextmanager
def step_profiler(path: Path | None) -> Iterator[Callable[[], None]]:
    """Yield a function to call after every step; steps 3 to 5 go to ``path`` as JSON.

    Without a path, the function does nothing.
    """
    if path is None:
        yield lambda: None
        return
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with profile(
        activities=activities,
        schedule=schedule(skip_first=_SKIP, wait=0, warmup=_WARM_UP, active=_RECORD, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        yield profiler.step
