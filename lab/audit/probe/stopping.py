"""Ends the script in good order after ``steps`` updates, and records how it ends.

The cut follows the last of these updates; but if the first epoch ends within as many steps again on
all ranks, it follows the first update of the next epoch: what happens between epochs is seen.
After the cut the training loader's epoch ends by StopIteration, so that the script goes on as after
a whole one. Other loaders then give two batches; a further epoch of the training loader gives two,
too, which show its order. Then SystemExit follows, on all ranks at the same step. A script that is
still alive some seconds later is ended. Errors after the cut have the cut as their cause: they are
recorded as such, and the exit status is 0.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.process
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .data import WatchedEpoch
from .state import Probe, patch

BATCHES_AFTER_CUT = 2
STEPS_AFTER_CUT = 4  # of epochs with fewer than two batches
STEPS_WITHOUT_BATCH = 2
STEPS_AFTER_REPORT = 3  # so that a script that ends its loop by itself and reports is not cut
BARRIER_SECONDS = 10.0
BETWEEN_EPOCHS_SECONDS = 10.0
IDLE_SECONDS, CLOCK_SECONDS, EXIT_SECONDS = 60.0, 30.0, 5.0


class Stopping:
    """Counts steps and batches of this process, and ends it; records how it ends.

    latest : the epoch that gave the last batch. last_batch : the step at which it did.
    longest : the most steps between two batches.
    last_step, deadline : time.monotonic() of the last step, and when the process is ended.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.steps = int(probe.settings.get("steps") or 6)
        if probe.settings.get("clocks"):
            self.steps += STEPS_AFTER_REPORT
        self.latest: WatchedEpoch | None = None
        self.last_batch, self.longest, self.cut_step = 0, 0, 0
        self.last_step, self.deadline = 0.0, 0.0
        self.backwards, self.by_hand = 0, False
        self.recorded: BaseException | None = None
        probe.stopping = self
        probe.hear("backward_end", self.after_backward)
        probe.hear("step_end", self.after_step)
        probe.hear("step_begin", self.stop_without_loader)
        probe.hear("forward", self.after_forward)
        patch(os, "_exit", self.exit_at_once)
        patch(sys, "excepthook", self.fail_in_main)
        patch(threading, "excepthook", self.fail_in_thread)
        patch(multiprocessing.process.BaseProcess, "run", self.run)
        patch(importlib.import_module("torch.multiprocessing.spawn"), "_wrap", self.run_spawned)

    # --- the steps ---

    def after_backward(self) -> None:
        """Count the backwards as steps if the script updates its weights by hand."""
        self.backwards += 1
        if self.backwards == self.steps and self.probe.step == 0:
            self.by_hand = not any(issubclass(type(one), Optimizer) for one in gc.get_objects())
        if self.by_hand:
            self.probe.step = self.backwards
            self.after_step(None)

    def after_step(self, optimizer: Any) -> None:
        """Cut after the last of ``steps`` updates, or let the first epoch end before."""
        self.last_step = time.monotonic()
        if self.probe.cutting:
            self.deadline = max(self.deadline, self.last_step + IDLE_SECONDS)
        elif self.probe.step >= self.steps and not self.first_epoch_ends_soon():
            self.cut()

    def first_epoch_ends_soon(self) -> bool:
        """Return whether the last batch is one of the last in the first epoch that trains.

        All ranks have to agree, so the sampler has to be one that gives all equally many.
        """
        epoch = self.latest
        if epoch is None or epoch.over or len(epoch.loader.trained) != 1:
            return False
        facts, idle = epoch.loader.facts, self.probe.step - self.last_batch
        equal = facts["replicas"] is not None and facts["batches"] is not None
        return (
            equal and idle <= max(1, self.longest) and facts["batches"] - epoch.given <= self.steps
        )

    def cut(self) -> None:
        """Begin to end the script."""
        self.probe.cutting, self.cut_step = True, self.probe.step
        self.probe.record("cut", step=self.probe.step, why=f"{self.steps} steps")
        epoch = self.latest
        if epoch is not None and epoch.given == 1 and len(epoch.loader.trained) > 1:
            epoch.late = True  # it has just begun, and still shows its order
        self.deadline = time.monotonic() + IDLE_SECONDS
        threading.Thread(target=self.end_late, name="lab audit", daemon=True).start()

    def cut_if_overdue(self) -> None:
        """Cut if the script has done enough steps, and other things for a while."""
        idle = time.monotonic() > self.last_step + BETWEEN_EPOCHS_SECONDS
        if idle and self.probe.step >= self.steps and not self.probe.cutting:
            self.cut()

    def before_batch(self, epoch: WatchedEpoch) -> None:
        """Let the script have a batch, or raise StopIteration or SystemExit."""
        self.longest = max(self.longest, self.probe.step - self.last_batch)
        self.cut_if_overdue()
        self.latest, self.last_batch = epoch, self.probe.step
        if not self.probe.cutting:
            return
        if epoch.loader.trained and (epoch.trains or not epoch.evaluating):
            if not epoch.late or epoch.over:
                raise StopIteration
            shown = sum(batches >= 2 for batches in epoch.loader.trained.values())
            if shown >= 2 or self.probe.step >= self.cut_step + STEPS_AFTER_CUT:
                self.end()
        elif epoch.over or epoch.given_late >= BATCHES_AFTER_CUT:
            raise StopIteration

    def after_forward(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """End a loop that takes no batches from a loader."""
        self.cut_if_overdue()
        if torch.is_grad_enabled() and module.training:
            self.stop_without_loader(None)

    def stop_without_loader(self, optimizer: Any) -> None:
        """Raise SystemExit after the cut if batches come from elsewhere."""
        idle = self.probe.step - self.last_batch
        if self.probe.cutting and (
            self.latest is None or idle > self.longest + STEPS_WITHOUT_BATCH
        ):
            self.end()

    def end(self) -> None:
        """Raise SystemExit as soon as every rank has come so far.

        Files tell when: collectives are the script's.
        """
        folder, size = self.probe.folder, self.probe.settings.get("size") or 0
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
        (folder / f"ready-{os.getpid()}").touch()
        limit = time.monotonic() + BARRIER_SECONDS
        while len(list(folder.glob("ready-*"))) < size and time.monotonic() < limit:
            time.sleep(0.02)
        after = CLOCK_SECONDS if self.probe.settings.get("clocks") else EXIT_SECONDS
        self.deadline = min(self.deadline, time.monotonic() + after)
        raise SystemExit(0)

    def end_late(self) -> None:
        """End the process after the deadline."""
        while time.monotonic() < self.deadline:
            time.sleep(0.1)
        self.probe.end()

    # --- the process ---

    def exit_at_once(self, original: Callable[..., Any], status: int) -> None:
        """See os._exit, with which forked processes end."""
        try:
            self.probe.record("end", status=status, after_cut=self.probe.cutting)
        finally:
            original(status)

    def fail_in_main(self, original: Callable[..., Any], kind: Any, error: Any, trace: Any) -> None:
        """See sys.excepthook. After the cut the status is 0."""
        self.record(error)
        if self.probe.cutting and isinstance(error, Exception):
            raise SystemExit(0)
        original(kind, error, trace)

    def fail_in_thread(self, original: Callable[..., Any], arguments: Any) -> None:
        """See threading.excepthook."""
        self.record(arguments.exc_value)
        original(arguments)

    def run_spawned(self, original: Callable[..., Any], function: Any, *rest: Any) -> Any:
        """Run a function of torch.multiprocessing.spawn, which catches errors itself."""
        return original(lambda *arguments: self.run(function, *arguments), *rest)

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function that is a process's whole work; after the cut its errors end here."""
        try:
            function(*arguments)
        except Exception as error:
            self.record(error)
            if not self.probe.cutting:
                raise

    def record(self, error: BaseException | None) -> None:
        """Write the record ``error``, once for each."""
        if error is None or error is self.recorded:
            return
        self.recorded, trace = error, error.__traceback__
        lines = [self.probe.line(at.f_code.co_filename, n) for at, n in traceback.walk_tb(trace)]
        self.probe.record(
            "error",
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(type(error), error, trace))[-8000:],
            at=next((line for line in reversed(lines) if line is not None), None),
            after_cut=self.probe.cutting,
        )


def watch(probe: Probe) -> None:
    """Watch for the step at which the script is to end, and for errors."""
    Stopping(probe)
