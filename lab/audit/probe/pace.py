"""Makes the epochs of a slow script short, alike on all ranks, so that it comes to its end.

A script runs whole as long as it is fast. Where it is not, its first training epoch ends early, and
every later one has as few batches as two updates need and as the whole one leaves over for the
last; a rank that has more batches than another one keeps some more. ``len()`` of the loader follows
from the second epoch on. Evaluations are shortened likewise. The ranks agree on each length on the
``Board``.
"""

from __future__ import annotations

import dis
import os
import sys
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from .board import Board
from .data import WatchedEpoch, WatchedLoader
from .state import Probe, patch

# After so many seconds of training, epochs are short. One epoch that takes longer is, too.
WHOLE_SECONDS = 8.0
# Batches of the first epoch after which its pace is judged, and the fewest that it has.
JUDGED = 4
FEWEST = 6
NO_UPDATE = 32  # the fewest where no update came within ``JUDGED`` batches
WITH_CLOCKS = 48  # the fewest of any epoch where clocks are checked
EVALUATED = 4
MOST_APART = 8  # batches that a rank keeps of those that it has more than another one
MOST_WINDOW = 64  # batches of an update
WAIT_SECONDS = 2.0
# The instructions by which a loop or a generator asks an iterator.
_LOOPS = ("FOR_ITER", "SEND", "YIELD_FROM")
_LOADERS = os.path.join("torch", "utils", "data", "")


class Pace:
    """Limits the batches of epochs.

    window : the most batches of one epoch that an update took.
    hurried : epochs have been made short.
    """

    def __init__(self, probe: Probe, board: Board) -> None:
        self.window = 0
        self.hurried = False
        self._probe = probe
        self._board = board
        self._fewest = WITH_CLOCKS if probe.settings.get("clocks") else FEWEST
        self._batches = 0  # of this epoch since the last update
        self._first_update: float | None = None
        self._judged_since: WeakKeyDictionary[WatchedEpoch, float] = WeakKeyDictionary()
        self._lengths: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        patch(DataLoader, __len__=self.length)
        probe.listeners.append(self)

    def length(self, original: Any, loader: Any) -> int:
        """See len() of a DataLoader."""
        limit = self._lengths.get(loader)
        return int(original(loader)) if limit is None else limit

    def epoch_begin(self, epoch: WatchedEpoch, loader: Any) -> None:
        """Set how many batches a new iteration over a loader has at most."""
        watched = epoch.loader
        batches = watched.facts.batches
        if batches is None:
            return
        self._board.note(("batches", watched.key), batches)
        if watched.trained():
            self._limit_training(epoch, batches)
            if epoch.limit is not None:
                self._lengths[loader] = epoch.limit
        elif self.hurried or self._board.decided("hurried"):
            epoch.limit = _limit(batches, EVALUATED, self._least(watched))

    def _limit_training(self, epoch: WatchedEpoch, batches: int) -> None:
        """Agree with the other ranks on the length of a training epoch after the first."""
        watched = epoch.loader
        proposal = None
        if self.hurried or self._seconds() > WHOLE_SECONDS:
            window = min(max(1, self.window), MOST_WINDOW)
            short = max(2 * window + batches % window, self._least_of_clocks())
            proposal = [short, self._least(watched)]
        decided = self._board.decide(("epoch", watched.key, epoch.names["epoch"]), proposal)
        if decided is not None:
            self._hurry()
            epoch.limit = _limit(batches, *decided)

    def _least_of_clocks(self) -> int:
        return self._fewest if self._fewest > FEWEST else 0

    def _least(self, watched: WatchedLoader) -> int:
        """Return the fewest batches that a rank has noted for a loader."""
        return int(min(self._board.notes(("batches", watched.key))))

    def _seconds(self) -> float:
        """Return the seconds since the first update."""
        return 0.0 if self._first_update is None else time.monotonic() - self._first_update

    def _hurry(self) -> None:
        if not self.hurried:
            self.hurried = True
            self._board.decide("hurried", True)

    def batch_begin(self, epoch: WatchedEpoch) -> None:
        """Let the script have a batch, or raise StopIteration where the epoch is to end."""
        if epoch.trains and len(epoch.loader.trained()) == 1:
            if epoch.given == 1:
                self._judged_since[epoch] = time.monotonic()
            elif epoch.given == JUDGED and self._is_loop():
                self._judge(epoch)
        if epoch.limit is not None and epoch.given >= epoch.limit and self._is_loop():
            raise StopIteration
        if epoch.given == 0:
            self._batches = 0
        if epoch.loader.trained():
            self._batches += 1

    def _judge(self, epoch: WatchedEpoch) -> None:
        """Agree with the other ranks on the length of the first training epoch."""
        watched = epoch.loader
        batches = watched.facts.batches
        since = self._judged_since.get(epoch)
        if batches is None or since is None:
            return
        pace = (time.monotonic() - since) / (JUDGED - 1)
        proposal = None
        if pace * batches > WHOLE_SECONDS:
            fewest = max(self._fewest, 2 * self.window) if self.window else NO_UPDATE
            self._board.notes(("batches", watched.key), awaited=group_size(), seconds=WAIT_SECONDS)
            proposal = [max(fewest, int(WHOLE_SECONDS / pace)), self._least(watched)]
        decided = self._board.decide(("first epoch", watched.key), proposal)
        if decided is not None:
            self._hurry()
            epoch.limit = _limit(batches, *decided)

    def step_end(self, _optimizer: Any) -> None:
        """Count the batches of an update."""
        if self._first_update is None:
            self._first_update = time.monotonic()
        self.window = max(self.window, self._batches)
        self._batches = 0

    def _is_loop(self) -> bool:
        """Return whether a loop asks for the batch; a next() of the script may expect no end."""
        frame: Any = sys._getframe(1)
        here = os.path.dirname(__file__)
        while frame is not None:
            name = frame.f_code.co_filename
            if not (name.startswith(here) or _LOADERS in name):
                break
            frame = frame.f_back
        if frame is None or not self._probe.is_users(frame.f_code.co_filename):
            return True  # a library's loop
        return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _LOOPS


def _limit(batches: int, short: int, least: int) -> int | None:
    """Return how many of its batches a rank's epoch has; None if it has no more.

    short : of the rank that has the least batches, which are ``least``.
    """
    limit = short + min(max(0, batches - least), MOST_APART)
    return limit if limit < batches else None


def group_size() -> int:
    """Return the number of ranks in the group of all; 0 without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 0
