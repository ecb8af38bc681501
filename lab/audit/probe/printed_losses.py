"""Only with ``clocks``: whether a loss that the script prints is that of one rank.

``Tensor.item()`` of a loss on which backward() began returns a float that tells when it is
formatted, unless the tensor has been exchanged before; sums and means of such floats tell as well.
Each line of the script that prints such a loss gets one record:

``{"event": "loss_printed", local (true), at}``
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .state import Probe
from .storages import storage_of

_KEPT = 8
"""Losses that are remembered: several may be printed after the last backward."""


def watch_printed_losses(probe: Probe) -> None:
    """Replace ``Tensor.item`` by a function that knows the losses."""
    losses: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_KEPT)
    reported: set[str] = set()

    def remember(roots: Any) -> None:
        for one in roots if isinstance(roots, (list, tuple)) else (roots,):
            if isinstance(one, torch.Tensor) and one.numel() == 1:
                losses.append(weakref.ref(one))

    def forget(tensors: Iterable[torch.Tensor]) -> None:
        exchanged = {storage_of(one) for one in tensors}
        kept = [one for one in losses if _storage(one) not in exchanged]
        losses.clear()
        losses.extend(kept)

    def report() -> None:
        at = probe.place()
        if at is not None and str(at) not in reported:
            reported.add(str(at))
            probe.record("clock", event="loss_printed", local=True, at=at)

    original = torch.Tensor.item

    @functools.wraps(original)
    def item(tensor: torch.Tensor) -> Any:
        value = original(tensor)
        if torch.compiler.is_compiling() or type(value) is not float:
            return value
        storage = storage_of(tensor)
        if storage is None or storage not in [_storage(one) for one in losses]:
            return value
        return _loss_value(value, report)

    probe.hear("backward_begin", remember)
    probe.hear("message", forget)
    setattr(torch.Tensor, "item", item)  # noqa: B010 - mypy refuses an assignment


def _storage(loss: "weakref.ref[torch.Tensor]") -> int | None:
    tensor = loss()
    return None if tensor is None else storage_of(tensor)


class _LossValue(float):
    """The loss of one rank's samples, or a sum or a mean of such losses."""

    report: Callable[[], None]

    def _as_loss(self, result: Any) -> Any:
        return _loss_value(result, self.report) if type(result) is float else result

    def __add__(self, other: Any) -> Any:
        return self._as_loss(float(self) + other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return self._as_loss(float(self) * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._as_loss(float(self) / other)

    def __round__(self, digits: Any = None) -> Any:
        return self._as_loss(round(float(self), digits))

    def __format__(self, specification: str) -> str:
        self.report()
        return format(float(self), specification)

    def __repr__(self) -> str:
        self.report()
        return repr(float(self))

    def __str__(self) -> str:
        self.report()
        return str(float(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


def _loss_value(value: float, report: Callable[[], None]) -> _LossValue:
    loss = _LossValue(value)
    loss.report = report
    return loss
