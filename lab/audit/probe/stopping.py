"""Ends the script in good order after ``steps`` updates, and records how it ends.

The cut follows the last of these updates; but if the first epoch ends within as many steps again on
all ranks, it follows the first update of the next epoch: what happens between epochs is seen.
After the cut every epoch ends by StopIteration once it has given two batches, so that the script
goes on as after a whole one: it evaluates, and another epoch of the training loader shows its
order. Then SystemExit follows, on all ranks at the same step; also after some further steps, and at
once where no loader is used. A script that is still alive some seconds later is ended. Errors after
the cut have the cut as their cause: they are recorded as such, and the exit status is 0.

Updates without communication do not count for a while: a rank may first train a model by itself.
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
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from .data import WatchedEpoch
from .state import Probe, patch, replaced

BATCHES_AFTER_CUT = 2
STEPS_AFTER_CUT = 4
STEPS_AFTER_REPORT = 3  # so that a script that ends its loop by itself and reports is not cut
BARRIER_SECONDS = 10.0
BETWEEN_EPOCHS_SECONDS = 10.0
IDLE_SECONDS = 60.0
CLOCK_SECONDS = 30.0
EXIT_SECONDS = 5.0
# Updates without communication count only after this time, or this number of them.
ALONE_SECONDS = 20.0
ALONE_STEPS = 500


class Stopping:
    """Counts steps and batches of this process, and ends it; records how it ends.

    steps : the updates after which the script is cut.
    latest : the epoch that was asked for a batch last; None before the first.
    evaluating : the last forward was without gradients.
    epoch_ended : a training epoch has been ended after the cut.
    done : the updates that count, of the optimiser that has done the most.
    counted, silent : by optimiser, its updates that count, and those since its last communication.
    spoke : the ranks have communicated since the last update.
    last_spoke : time.monotonic() when they did.
    by_hand : the script has no optimiser and updates its weights itself.
    cut_step : ``done`` when the script was cut.
    last_step, patience : time.monotonic() of the last step, of the cut or of the end, and the
        seconds from then on after which the process is ended, once it is cut.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.steps = int(probe.settings.get("steps") or 6)
        if probe.settings.get("clocks"):
            self.steps += STEPS_AFTER_REPORT
        self.latest: WatchedEpoch | None = None
        self.evaluating = False
        self.epoch_ended = False
        self.by_hand = False
        self.done = 0
        self.counted: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.silent: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.spoke = False
        self.last_spoke = time.monotonic()
        self.last_step = 0.0
        self.patience = IDLE_SECONDS
        self.cut_step = 0
        probe.listeners.append(self)
        patch(os, _exit=self.exit_at_once)
        patch(sys, excepthook=self.fail_in_main)
        patch(threading, excepthook=self.fail_in_thread)
        patch(multiprocessing.process.BaseProcess, run=self.run)
        patch(importlib.import_module("torch.multiprocessing.spawn"), _wrap=self.run_spawned)

    # --- the steps ---

    def backward_end(self) -> None:
        """Count the backwards as steps if the script updates its weights by hand.

        It does if it has done enough backwards, and no optimiser exists.
        """
        backwards = self.probe.gradients.backward
        if backwards == self.steps and self.probe.step == 0:
            self.by_hand = not any(issubclass(type(held), Optimizer) for held in gc.get_objects())
        if self.by_hand:
            self.probe.step = self.done = backwards
            self.cut_if_enough()

    def step_end(self, optimizer: Any) -> None:
        """Count the update: at once if the ranks communicated before it, else when they do again.

        More updates without communication than ``steps`` train something else, and never count;
        unless nothing else comes.
        """
        silent = self.silent.get(optimizer, 0) + 1
        counted = self.counted.get(optimizer, 0)
        waited = time.monotonic() > self.last_spoke + ALONE_SECONDS or silent > ALONE_STEPS
        if self.spoke or waited or self.speaks_unseen():
            counted += silent if waited or silent <= self.steps else 1
            silent = 0
        self.counted[optimizer] = counted
        self.silent[optimizer] = silent
        self.spoke = False
        self.done = max(self.done, counted)
        self.cut_if_enough()

    def communicate(self, tensors: list[torch.Tensor]) -> None:
        """Note that the ranks exchange tensors."""
        if tensors:
            self.ddp_forward()

    def ddp_forward(self) -> None:
        """Note that the ranks will exchange gradients."""
        self.spoke = True
        self.last_spoke = time.monotonic()

    def speaks_unseen(self) -> bool:
        """Return whether the ranks may communicate unseen, or there is no other rank."""
        return group_size() < 2 or bool(self.probe.noted & {"fsdp", "mesh"})

    def cut_if_enough(self) -> None:
        """Cut after ``steps`` updates, or up to twice as many if the first epoch ends soon."""
        self.last_step = time.monotonic()
        enough = self.done >= self.steps and not self.first_epoch_ends_soon()
        if enough or self.done > 2 * self.steps:
            self.cut()

    def first_epoch_ends_soon(self) -> bool:
        """Return whether at most ``steps`` batches are left of the first epoch that trains.

        All ranks have to agree, so the sampler has to be one that gives all equally many.
        """
        epoch = self.latest
        if epoch is None or epoch.over or len(epoch.loader.trained()) != 1:
            return False
        facts = epoch.loader.facts
        if facts.batches is None or facts.replicas is None:
            return False
        return facts.batches - epoch.given <= self.steps

    def cut(self) -> None:
        """Begin to end the script, unless this has been done."""
        if not self.probe.cutting:
            self.probe.cutting = True
            self.cut_step = self.done
            self.probe.record("cut", step=self.probe.step, replaced=replaced())
            self.last_step = time.monotonic()
            threading.Thread(target=self.end_late, name="lab audit", daemon=True).start()

    def cut_if_overdue(self) -> None:
        """Cut if the script has done enough steps, and no further one for a while."""
        idle = time.monotonic() > self.last_step + BETWEEN_EPOCHS_SECONDS
        if idle and self.done >= self.steps:
            self.cut()

    def batch_begin(self, epoch: WatchedEpoch) -> None:
        """Let the script have a batch, or raise StopIteration or SystemExit.

        Before the cut it gets every batch. After it StopIteration ends each epoch with two batches,
        and SystemExit the script once two training epochs have shown their order.
        """
        self.cut_if_overdue()
        self.latest = epoch
        if not self.probe.cutting:
            return
        trained = epoch.loader.trained()
        trains = bool(trained) and (epoch.trains or not self.evaluating)
        shown = [past for past in trained if past.given >= BATCHES_AFTER_CUT]
        if trains and self.epoch_ended and len(shown) >= 2:
            self.end()
        if epoch.over or epoch.given >= BATCHES_AFTER_CUT:
            self.epoch_ended |= trains
            raise StopIteration

    def forward(self, module: torch.nn.Module) -> None:
        """Note what the batches are for, and end a training loop that takes none from a loader."""
        self.cut_if_overdue()
        self.evaluating = not torch.is_grad_enabled()
        if module.training and not self.evaluating:
            self.step_begin(None)

    def step_begin(self, optimizer: Any) -> None:
        """After the cut, raise SystemExit: at once without a loader, else some steps later."""
        if not self.probe.cutting:
            return
        if self.latest is None or self.done >= self.cut_step + STEPS_AFTER_CUT:
            self.end()

    def end(self) -> None:
        """Raise SystemExit as soon as every rank has come so far, or after ``BARRIER_SECONDS``.

        Each rank tells the others by a file, since collectives are the script's. Without a group no
        rank waits for another.
        """
        size = group_size()
        folder = self.probe.folder
        (folder / f"ready-{os.getpid()}").touch()
        limit = time.monotonic() + BARRIER_SECONDS
        while len(list(folder.glob("ready-*"))) < size and time.monotonic() < limit:
            time.sleep(0.02)
        self.last_step = time.monotonic()
        self.patience = CLOCK_SECONDS if self.probe.settings.get("clocks") else EXIT_SECONDS
        raise SystemExit(0)

    def end_late(self) -> None:
        """Run in a thread after the cut: end the process when it has done no step for too long."""
        while time.monotonic() < self.last_step + self.patience:
            time.sleep(0.1)
        self.probe.end()

    # --- the process ---

    def exit_at_once(self, original: Callable[..., Any], status: int) -> None:
        """See os._exit, with which forked processes end."""
        self.probe.record("end", status=status, after_cut=self.probe.cutting)
        original(status)

    def fail_in_main(self, original: Callable[..., Any], kind: Any, error: Any, trace: Any) -> None:
        """See sys.excepthook. After the cut the status is 0."""
        self.record(error)
        if self.probe.cutting and isinstance(error, Exception):
            raise SystemExit(0)  # the cut is its cause
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

    def record(self, error: Any) -> None:
        """Write the record ``error``."""
        frames = list(traceback.walk_tb(error.__traceback__))
        self.probe.record(
            "error",
            type=type(error).__name__,
            message=str(error),
            at=self.probe.place(frames[::-1]),
            after_cut=self.probe.cutting,
        )


def group_size() -> int:
    """Return the number of ranks in the group of all; 0 without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 0


def watch(probe: Probe) -> None:
    """Watch for the step at which the script is to end, and for errors."""
    Stopping(probe)
