"""Where the script enters autocast while it trains, and whether a model runs within it.

Written here: the record ``autocast``.
"""

from __future__ import annotations

from typing import Any

import torch

from .state import Probe, patch


class AutocastWatch:
    """The autocast contexts of this process.

    _forwards : how many outermost forwards have begun.
    _running : one of them is under way.
    _entered : for each context that is entered, ``_forwards`` when it was; -1 within a forward.
    _written : the lines, and whether a model ran, of the records so far.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._forwards = 0
        self._running = False
        self._entered: list[int] = []
        self._written: set[str] = set()
        patch(torch.autocast, __enter__=self.enter, __exit__=self.leave)
        probe.listeners.append(self)

    def forward_begin(self, _module: Any) -> None:
        """Count a forward."""
        self._forwards += 1
        self._running = True

    def forward(self, _module: Any) -> None:
        """See a forward end."""
        self._running = False

    def enter(self, original: Any, autocast: Any) -> Any:
        """See a context begin."""
        self._entered.append(-1 if self._running else self._forwards)
        return original(autocast)

    def leave(self, original: Any, autocast: Any, *error: Any) -> Any:
        """See a context end."""
        result = original(autocast, *error)
        self._probe.guard(self._left)(autocast)
        return result

    def _left(self, autocast: Any) -> None:
        """Write the record of a context that is switched on in training, once for each line."""
        before = self._entered.pop()
        trains = torch.is_grad_enabled() and not self._probe.in_backward
        if not (autocast._enabled and trains):
            return
        fields = {
            "at": self._probe.place(),
            "dtype": str(autocast.fast_dtype)[len("torch.") :],
            "model": before != self._forwards,
        }
        if str(fields) not in self._written:
            self._written.add(str(fields))
            self._probe.record("autocast", **fields)


def watch(probe: Probe) -> None:
    """Watch autocast."""
    AutocastWatch(probe)
