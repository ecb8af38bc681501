"""Ends the script in good order after ``steps`` updates, and records how it ends.

After the cut the training loader's epoch ends by StopIteration, so that the script goes on as after
a whole epoch. Other loaders then give two batches; a further epoch of the training loader gives two
steps, which show its order. Then SystemExit follows, on all ranks at the same step. A script that
is still alive some seconds later is ended. Errors after the cut have the cut as their cause: they
are recorded as such, and the exit status is 0.
"""

import atexit
import gc
import importlib
import linecache
import multiprocessing
import multiprocessing.process
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from .data.items import replace
from .data.loaders import WatchedEpoch
from .state import Probe

BATCHES_AFTER_CUT = 2
STEPS_OF_NEXT_EPOCH = 2
STEPS_AFTER_REPORT = 3  # so that a script that ends its loop by itself and reports is not cut
BARRIER_SECONDS = 10.0
IDLE_SECONDS, CLOCK_SECONDS, EXIT_SECONDS, REPLAY_SECONDS = 60.0, 30.0, 5.0, 120.0


class Stopping:
    """Counts steps and batches of this process, and ends it.

    last_batch, longest : the step at the last batch, and the most steps between two batches.
    second : the step at which the training loader's epoch after the cut began.
    deadline : time.monotonic() after which the process is ended.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.steps = int(probe.settings.get("steps") or 6)
        if probe.settings.get("clocks"):
            self.steps += STEPS_AFTER_REPORT
        self.last_batch: int | None = None
        self.longest = 0
        self.second: int | None = None
        self.deadline, self.observed = 0.0, False
        self.backwards, self.by_hand = 0, False
        probe.stopping = self
        probe.hear("backward_end", self.after_backward)
        probe.hear("step_end", self.after_step)
        probe.hear("step_begin", self.stop_without_loader)
        probe.hear("forward", self.after_forward)
        atexit.register(self.leave)

    @property
    def done(self) -> int:
        """The updates so far; the backwards in a script without an optimiser."""
        return self.backwards if self.by_hand else self.probe.step

    def after_backward(self) -> None:
        """Count the backwards: the script may update its weights by hand."""
        self.backwards += 1
        if self.backwards == self.steps and self.probe.step == 0:
            self.by_hand = not any(issubclass(type(one), Optimizer) for one in gc.get_objects())
        if self.by_hand:
            self.after_step(None)

    def after_step(self, optimizer: Any) -> None:
        """Begin the cut after the last of ``steps`` updates."""
        if self.probe.cutting:
            self.deadline = max(self.deadline, time.monotonic() + IDLE_SECONDS)
        elif self.done >= self.steps:
            self.probe.cutting = True
            self.probe.record("cut", step=self.done, why=f"{self.steps} steps")
            self.deadline = time.monotonic() + IDLE_SECONDS
            threading.Thread(target=self.end_late, name="lab audit", daemon=True).start()

    def before_batch(self, epoch: WatchedEpoch) -> None:
        """Let the script have a batch, or raise StopIteration or SystemExit."""
        step = self.done
        if self.last_batch is not None:
            self.longest = max(self.longest, step - self.last_batch)
        self.last_batch = step
        if not self.probe.cutting:
            return
        if epoch.over:
            raise StopIteration
        if not epoch.loader.trained or (epoch.evaluating and not epoch.trains):
            if epoch.given_late >= BATCHES_AFTER_CUT:
                raise StopIteration
        elif not epoch.late:
            raise StopIteration
        else:
            self.go_on_or_end(epoch)

    def go_on_or_end(self, epoch: WatchedEpoch) -> None:
        """Let an epoch that began after the cut show its order, then end the script."""
        shown = sum(batches >= 2 for batches in epoch.loader.trained.values())
        if self.second is None:
            if shown >= 2 and epoch.given == 0:
                self.end()
            self.second = self.done
        enough = STEPS_OF_NEXT_EPOCH if shown >= 2 else 2 * STEPS_OF_NEXT_EPOCH
        if self.done >= self.second + enough:
            self.end()

    def after_forward(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """End a loop that takes no batches from a loader."""
        if torch.is_grad_enabled() and module.training:
            self.stop_without_loader(None)

    def stop_without_loader(self, optimizer: Any) -> None:
        """Raise SystemExit after the cut if batches come from elsewhere."""
        if not self.probe.cutting:
            return
        idle = self.done - (self.last_batch or 0)
        if self.last_batch is None or idle > self.longest + STEPS_OF_NEXT_EPOCH:
            self.end()

    def end(self) -> None:
        """Raise SystemExit as soon as every rank has come so far."""
        self.leave()
        self.wait_for_ranks()
        after = CLOCK_SECONDS if self.probe.settings.get("clocks") else EXIT_SECONDS
        self.deadline = min(self.deadline, time.monotonic() + after)
        raise SystemExit(0)

    def leave(self) -> None:
        """Tell the event "cut", once, when the script has been cut and is ending."""
        if self.probe.cutting and not self.observed:
            self.observed = True
            self.probe.tell("cut", f"{self.steps} steps")

    def wait_for_ranks(self) -> None:
        """Wait until all ranks are ready to end; files tell, since collectives are the script's."""
        rank, size = self.place_in_group()
        (self.probe.folder / f"ready-{rank}").touch()
        limit = time.monotonic() + BARRIER_SECONDS
        while size and time.monotonic() < limit:
            if len(list(self.probe.folder.glob("ready-*"))) >= size:
                return
            time.sleep(0.02)

    def place_in_group(self) -> tuple[Any, int | None]:
        """Return this rank, and the number of ranks or None."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        rank = self.probe.settings.get("rank")
        known = os.environ.get("RANK", self.probe.pid) if rank is None else rank
        return known, self.probe.settings.get("size")

    def end_late(self) -> None:
        """End the process after the deadline, but not while it replays."""
        while time.monotonic() < self.deadline:
            time.sleep(0.1)
        limit = time.monotonic() + REPLAY_SECONDS
        while getattr(self.probe, "busy", False) and time.monotonic() < limit:
            time.sleep(0.1)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
        self.probe.end()


class Failures:
    """Records the errors that end a process."""

    def __init__(self, probe: Probe, stopping: Stopping) -> None:
        self.probe, self.stopping = probe, stopping
        self.recorded: BaseException | None = None
        self.hook, self.thread_hook = sys.excepthook, threading.excepthook
        sys.excepthook = self.in_main
        threading.excepthook = self.in_thread
        replace(multiprocessing.process.BaseProcess, "run", self.call)
        replace(multiprocessing.process.BaseProcess, "_bootstrap", self.whole_process)
        replace(importlib.import_module("torch.multiprocessing.spawn"), "_wrap", self.in_spawned)

    def in_main(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """See sys.excepthook. After the cut the status is 0."""
        self.record(error)
        if self.probe.cutting and isinstance(error, Exception):
            raise SystemExit(0)
        self.hook(kind, error, trace)

    def in_thread(self, arguments: Any) -> None:
        """See threading.excepthook."""
        if arguments.exc_value is not None:
            self.record(arguments.exc_value)
        self.thread_hook(arguments)

    def in_spawned(
        self, original: Callable[..., Any], function: Any, *rest: Any, **named: Any
    ) -> Any:
        """Run a function of torch.multiprocessing.spawn, which catches errors itself."""

        def watched(*arguments: Any) -> None:
            self.call(function, *arguments)

        return original(watched, *rest, **named)

    def whole_process(
        self, original: Callable[..., Any], process: Any, *rest: Any, **named: Any
    ) -> Any:
        """Record the end of a multiprocessing.Process: a forked one runs no atexit functions."""
        status = original(process, *rest, **named)
        self.probe.record("end", status=status, after_cut=self.probe.cutting)
        return status

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function that is a process's whole work; after the cut its errors end here."""
        try:
            function(*arguments)
        except Exception as error:
            self.record(error)
            if not self.probe.cutting:
                raise
        finally:
            self.stopping.leave()

    def record(self, error: BaseException) -> None:
        """Write the record ``error``, once for each."""
        if error is self.recorded:
            return
        self.recorded = error
        at = None
        for frame, line in traceback.walk_tb(error.__traceback__):
            name = os.path.realpath(frame.f_code.co_filename)
            if self.probe.is_users(name):
                text = linecache.getline(name, line).strip()
                at = [os.path.relpath(name, self.probe.script), line, text]
        trace = "".join(traceback.format_exception(error))
        self.probe.record(
            "error",
            type=type(error).__name__,
            message=str(error),
            traceback=trace[-8000:],
            at=at,
            after_cut=self.probe.cutting,
        )


def watch(probe: Probe) -> None:
    """Watch for the step at which the script is to end, and for errors."""
    Failures(probe, Stopping(probe))
