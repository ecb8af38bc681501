"""Only with ``clocks``: how the script measures time, and whose losses it prints.

What time.time() and its like return to the script, and ``Tensor.item`` of a loss, is a float that
knows where it comes from: a weighted sum of readings of a clock, or of losses. Sums and differences
add up the weights, factors and divisors scale them; anything else, and pickling, gives plain
values. In the script's own modules a stand-in for ``datetime`` does the same for datetime.now().

The weights of readings that add up to zero are those of intervals: 1 at their ends, -1 where they
begin. Where the script divides such a time by a number, it forms a mean, and the record ``clock``
tells of what. Numbers of steps count each interval with its weight, divided by ``unit``:

``{"event": "mean", divisor, unit (the greatest weight), intervals (without those that begin where
others end), scale (sum of the weights of their ends), steps, backwards, first (whether the first
backward is among these), before_update (intervals that end between the first backward of a step
and its update), update_timed (an interval of this process holds an update), device_pending
(intervals at whose end a GPU was still computing), after_cut, at}``

Where the script prints the loss of one rank's samples, or a sum or a mean of such losses, that gets
a record as well. A loss that has been exchanged is no longer one rank's:

``{"event": "loss_printed", at}``
"""

from __future__ import annotations

import copy
import datetime
import os
import statistics
import sys
import time
import timeit
import weakref
from collections import defaultdict
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from .state import Probe, patch, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_UNITS = (1, 60, 1e3, 3600, 1e6, 1e9)  # dividing by one of these is no mean
_MOST_SOURCES = 4000
# The source of every loss, beside the readings.
_LOSS = "loss"


class _Reading:
    """How far training was when a clock was read.

    backwards, steps : how many had begun, and ended, since the start.
    in_step : a backward of the current step had begun, but not yet ended its update.
    device_pending : the GPU was still computing.
    """

    def __init__(self, watcher: _ClockWatcher) -> None:
        self.backwards = watcher.probe.gradients.backward
        self.steps = watcher.probe.step
        self.in_step = watcher.in_step
        cuda = torch.cuda
        self.device_pending = (  # this does not wait for the GPU
            cuda.is_initialized()
            and not cuda.is_current_stream_capturing()
            and not cuda.current_stream().query()
        )


class _Traced:
    """A number or a time that knows its sources.

    of : the weight of each source: a ``_Reading``, or ``_LOSS``.
    watcher : gets what the script does with it; set by ``watch``.
    """

    of: Mapping[Any, float] = MappingProxyType({})
    watcher: _ClockWatcher

    def __add__(self, other: Any) -> Any:
        result = super().__add__(other)  # type: ignore[misc]  # mixed in
        return _traced(result, (self.of, 1), (getattr(other, "of", {}), 1))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        result = super().__sub__(other)  # type: ignore[misc]  # mixed in
        difference = _traced(result, (self.of, 1), (getattr(other, "of", {}), -1))
        weights = getattr(difference, "of", {})  # none if a plain value came out
        if _is_time(weights) and _advance(weights, "steps") > 0:
            self.watcher.update_timed = True
        return difference

    def __mul__(self, factor: Any) -> Any:
        return _traced(super().__mul__(factor), (self.of, factor))  # type: ignore[misc]  # mixed in

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        quotient = super().__truediv__(divisor)  # type: ignore[misc]  # mixed in
        if type(divisor) not in (int, float):  # such as an array: what comes out is no mean
            return quotient
        if divisor in _UNITS or not _is_time(self.of):
            return _traced(quotient, (self.of, 1 / divisor))
        self.watcher.record_mean(self.of, divisor)
        return quotient

    def __round__(self, digits: Any = None) -> Any:
        return _traced(super().__round__(digits), (self.of, 1))  # type: ignore[misc]  # mixed in

    def __format__(self, specification: str) -> str:
        self.watcher.note_printed(self.of)
        return super().__format__(specification)

    def __repr__(self) -> str:
        self.watcher.note_printed(self.of)
        return super().__repr__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle and copy give a plain value: the unary plus leaves the sources out
        return copy.copy, (+self,)  # type: ignore[operator]  # mixed in


class _Number(_Traced, float):
    """A time in seconds or in other units, or a loss."""


class _Span(_Traced, datetime.timedelta):
    """A time."""

    def total_seconds(self) -> float:
        return _traced(super().total_seconds(), (self.of, 1))


class _AnyDatetime(type):
    """Every datetime is an instance of the class that stands in for datetime."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, datetime.datetime)


class _Instant(_Traced, datetime.datetime, metaclass=_AnyDatetime):
    """What datetime.now() said; without sources, any other datetime."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        reading = _Reading(cls.watcher)
        made = super().now(tz)
        made.of = {reading: 1}
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return datetime.datetime, datetime.datetime.__reduce_ex__(self, protocol)[1]


_KINDS: dict[type, Any] = {
    float: _Number,
    datetime.timedelta: lambda span: _Span(span.days, span.seconds, span.microseconds),
}


def _traced(value: Any, *terms: tuple[Mapping[Any, float], Any]) -> Any:
    """Return a value that knows its sources: those of all terms, with their weights added up.

    terms : of each, the weights of its sources, and the factor by which they count.

    The value stays plain if its type cannot hold sources, none or too many are left, or a factor
    is no plain number.
    """
    if type(value) not in _KINDS:
        return value
    weights: dict[Any, float] = defaultdict(int)
    for of, factor in terms:
        if type(factor) not in (int, float):
            return value
        for source, weight in of.items():
            weights[source] += weight * factor
    remaining = {source: weight for source, weight in weights.items() if weight}
    if not 0 < len(remaining) <= _MOST_SOURCES:
        return value
    made = _KINDS[type(value)](value)
    made.of = remaining
    return made


def _is_time(weights: Mapping[Any, float]) -> bool:
    """Return whether a value is a sum of intervals, not what a clock or a loss says.

    An interval is the difference of two readings, so the weights of all readings add up to 0.
    """
    if not weights or _LOSS in weights:
        return False
    return abs(sum(weights.values())) <= 1e-9 * max(weights.values())


def _advance(weights: Mapping[Any, float], name: str) -> float:
    """Return how many events training advances in a sum of intervals, each by its weight.

    name : the attribute of ``_Reading`` that counts the events.
    """
    return sum(weight * getattr(reading, name) for reading, weight in weights.items())


def _spans_first_backward(weights: Mapping[Any, float], unit: float) -> bool:
    """Return whether an interval begins before the first backward and ends after it.

    Of the readings after the first backward, those of a later interval add up to 0. Of an interval
    that spans it, only the end is among these: one unit is left.
    """
    after_first = sum(weight for reading, weight in weights.items() if reading.backwards)
    return after_first / unit > 0.5


class _ClockWatcher:
    """Counts the events of training, and makes readings of the clocks.

    in_step : see ``_Reading``.
    update_timed : an interval so far held an update.
    _losses : the tensors from which backwards began, while they live and are one rank's.
    _stand_ins : what replaces a function, class or module that a module of the script has imported
        by name: by the id of the original.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.in_step = False
        self.update_timed = False
        self._losses: list[weakref.ref[torch.Tensor]] = []
        self._stand_ins: dict[int, Any] = {
            id(datetime.datetime): _Instant,
            id(datetime): SimpleNamespace(**{**vars(datetime), "datetime": _Instant}),
        }
        probe.listeners.append(self)
        patch(torch.Tensor, item=self._item)
        patch(DataLoader, __init__=self._loader_is_built)
        self._patch_everywhere(time, ("time", "perf_counter", "monotonic"), self._read)
        self._patch_everywhere(statistics, ("mean", "fmean"), self._combine)
        if sys.modules.get("numpy"):
            self._patch_everywhere(sys.modules["numpy"], ("mean", "sum"), self._combine)
        timeit.default_timer = time.perf_counter  # replaced above, but timeit holds the original
        self._replace_imported_names()

    def _patch_everywhere(
        self, owner: Any, names: Iterable[str], wrapper: Callable[..., Any]
    ) -> None:
        """Replace functions, later also where the script's modules have imported them by name."""
        for name in names:
            original = getattr(owner, name)
            patch(owner, **{name: wrapper})
            self._stand_ins[id(original)] = getattr(owner, name)

    def record_mean(self, weights: Mapping[Any, float], divisor: float) -> None:
        """Record that the script divides a sum of intervals."""
        unit = max(weights.values())  # the weight of a single interval
        ends = [reading for reading, weight in weights.items() if weight > 0]
        self.probe.record(
            "clock",
            event="mean",
            divisor=divisor,
            unit=unit,
            intervals=len(ends),
            scale=round(sum(weights[end] for end in ends) / unit, 6),
            steps=round(_advance(weights, "steps") / unit, 6),
            backwards=round(_advance(weights, "backwards") / unit, 6),
            first=_spans_first_backward(weights, unit),
            before_update=sum(end.in_step for end in ends),
            update_timed=self.update_timed,
            device_pending=sum(end.device_pending for end in ends),
            after_cut=self.probe.cutting,
            at=self.probe.place(),
        )

    def note_printed(self, weights: Mapping[Any, float]) -> None:
        """Record that the script prints a loss."""
        if _LOSS in weights and self.probe.place():
            self.probe.record("clock", event="loss_printed", at=self.probe.place())

    def _read(self, original: Any) -> Any:
        """Read a clock; in the script's own code, the time knows its reading."""
        # frame 0 is this one, 1 the wrapper of ``patch``, and 2 the caller's
        if not self.probe.is_users(sys._getframe(2).f_code.co_filename):
            return original()
        reading = _Reading(self)  # before the clock is read, so that it does not count
        return _traced(original(), ({reading: 1}, 1))

    def _item(self, original: Any, tensor: torch.Tensor) -> Any:
        """Return ``tensor.item()``; of this rank's loss, a number that knows it."""
        value = original(tensor)
        storage = storage_of(tensor)
        if storage is not None and any(storage_of(loss()) == storage for loss in self._losses):
            return _traced(value, ({_LOSS: 1}, 1))
        return value

    def _combine(self, original: Any, values: Any, *rest: Any, **named: Any) -> Any:
        """Call a function that averages or adds up; of a list of numbers, the sources are known.

        Dividing their sum here records the mean, as if the script had divided.
        """
        result = original(values, *rest, **named)
        if not isinstance(values, (list, tuple)) or set(map(type, values)) != {_Number}:
            return result
        known: Any = sum(values)
        if original.__name__ != "sum":
            known = known / len(values)
        return _traced(float(result), (getattr(known, "of", {}), 1))

    def backward_begin(self, roots: list[torch.Tensor]) -> None:
        """Begin a step, unless one has begun, and remember the losses."""
        self.in_step = True
        for root in roots:
            if root.numel() == 1:
                self._losses.append(weakref.ref(root))

    def step_end(self, _optimizer: Any) -> None:
        self.in_step = False

    def communicate(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget the losses among the tensors of a message: they are no longer one rank's."""
        exchanged = {storage_of(tensor) for tensor in tensors}
        self._losses = [loss for loss in self._losses if storage_of(loss()) not in exchanged]

    def _loader_is_built(self, original: Any, *rest: Any, **named: Any) -> None:
        self._replace_imported_names()
        original(*rest, **named)

    def forward_begin(self, *_: Any) -> None:
        """Replace what modules have imported since the last forward."""
        self._replace_imported_names()

    def _replace_imported_names(self) -> None:
        """Put stand-ins for what the script's own modules imported by name, until training begins.

        ``from time import perf_counter`` keeps the original, which ``patch`` does not reach.
        """
        if self.probe.gradients.backward:
            return
        for module in list(sys.modules.values()):
            if not self.probe.is_users(getattr(module, "__file__", None) or os.sep):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in self._stand_ins:
                    setattr(module, name, self._stand_ins[id(value)])


def watch(probe: Probe) -> None:
    """Replace the clocks and the functions that average, if clocks are checked."""
    if probe.settings.get("clocks"):
        _Traced.watcher = _ClockWatcher(probe)
