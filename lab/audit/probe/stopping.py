"""Follows the script to its end, and records how it ends; ends one that goes on for too long.

A script runs until it ends by itself, with the short epochs of pace.py. If it still trains after
``MOST_SECONDS``, or after as many updates as the audit asks for, the cut comes: SystemExit before
the same update on all ranks, which agree on it on the ``Board``. A script that is still alive some
seconds later is ended. Errors after the cut have the cut as their cause: they are recorded as such,
and the exit status is 0.

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

from .board import Board
from .pace import Pace, group_size
from .state import Probe, patch

MOST_SECONDS = 24.0  # of training
MOST_WITH_CLOCKS = 96.0  # so that a slow script comes to its times, of 40 steps or more
FEWEST_STEPS = 8  # before the cut, however long they take
STEPS_AHEAD = 2  # between the decision to cut and the cut: no rank is further ahead
STEPS_AFTER_REPORT = 3  # so that a script that ends its loop by itself and reports is not cut
BARRIER_SECONDS = 10.0
CLOCK_SECONDS = 30.0
EXIT_SECONDS = 5.0
# Updates without communication count only after this time, or this number of them.
ALONE_SECONDS = 20.0
ALONE_STEPS = 500
_SILENT_STEPS = 6


class Stopping:
    """Counts the updates of this process, and ends it; records how it ends.

    steps : the updates after which the script is cut; None: after ``MOST_SECONDS``.
    done : the updates that count, of the optimiser that has done the most.
    counted, silent : by optimiser, its updates that count, and those since its last communication.
    spoke : the ranks have communicated since the last update.
    last_spoke : time.monotonic() when they did.
    by_hand : the script has no optimiser and updates its weights itself.
    first_step : time.monotonic() of the first update; None before it.
    patience : seconds after the cut in which the process may end.
    """

    def __init__(self, probe: Probe, board: Board) -> None:
        self.probe = probe
        self.board = board
        self.steps: int | None = probe.settings.get("steps")
        if self.steps is not None and probe.settings.get("clocks"):
            self.steps += STEPS_AFTER_REPORT
        self.by_hand = False
        self.done = 0
        self.counted: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.silent: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.spoke = False
        self.last_spoke = time.monotonic()
        self.first_step: float | None = None
        self.patience = EXIT_SECONDS
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
        enough = min(FEWEST_STEPS, self.steps or FEWEST_STEPS)
        if backwards == enough and self.probe.step == 0:
            self.by_hand = not any(issubclass(type(held), Optimizer) for held in gc.get_objects())
        if self.by_hand:
            self.probe.step = self.done = backwards
            self.first_step = self.first_step or time.monotonic()

    def step_end(self, optimizer: Any) -> None:
        """Count the update: at once if the ranks communicated before it, else when they do again.

        More updates without communication than a few train something else, and never count; unless
        nothing else comes.
        """
        silent = self.silent.get(optimizer, 0) + 1
        counted = self.counted.get(optimizer, 0)
        waited = time.monotonic() > self.last_spoke + ALONE_SECONDS or silent > ALONE_STEPS
        if self.spoke or waited or self.speaks_unseen():
            counted += silent if waited or silent <= _SILENT_STEPS else 1
            silent = 0
        self.counted[optimizer] = counted
        self.silent[optimizer] = silent
        self.spoke = False
        self.done = max(self.done, counted)
        if self.first_step is None and self.done:
            self.first_step = time.monotonic()

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

    def backward_begin(self, *_: Any) -> None:
        """Cut a script that updates its weights by hand."""
        if self.by_hand:
            self.step_begin(None)

    def step_begin(self, _optimizer: Any) -> None:
        """Cut the script before an update if it has gone on for long enough."""
        last = self.steps if self.steps is not None else self.agreed_last()
        if last is not None and self.done >= last:
            self.cut()

    def agreed_last(self) -> int | None:
        """Return after how many updates all ranks are cut; None if they go on."""
        most = MOST_WITH_CLOCKS if self.probe.settings.get("clocks") else MOST_SECONDS
        overdue = self.first_step and time.monotonic() > self.first_step + most
        if overdue and self.done >= FEWEST_STEPS:
            return int(self.board.decide("last step", self.done + STEPS_AHEAD))
        decided = self.board.decided("last step")
        return None if decided is None else int(decided)

    def cut(self) -> None:
        """Raise SystemExit as soon as every rank has come so far, or after ``BARRIER_SECONDS``.

        Without a group no rank waits for another.
        """
        if not self.probe.cutting:
            self.probe.cutting = True
            self.probe.record("cut", step=self.probe.step)
            self.probe.tell("cut")
            if self.probe.settings.get("clocks"):
                self.patience = CLOCK_SECONDS
            self.board.note("cut", self.done)
            self.board.notes("cut", awaited=group_size(), seconds=BARRIER_SECONDS)
            threading.Thread(target=self.end_late, name="lab audit", daemon=True).start()
        raise SystemExit(0)

    def end_late(self) -> None:
        """Run in a thread after the cut: end the process when it has not ended by itself."""
        time.sleep(self.patience)
        self.probe.end()

    # --- the process ---

    def exit_at_once(self, original: Callable[..., Any], status: int) -> None:
        """See os._exit, with which forked processes end."""
        self.probe.record_end(status)
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
            after_cut=self.probe.cutting or bool(self.board.notes("cut")),
        )


def watch(probe: Probe) -> None:
    """Shorten slow epochs, watch for errors, and for the end."""
    board = Board(probe.folder)
    Pace(probe, board)
    Stopping(probe, board)
