"""Only with ``clocks``: how the script measures time. Writes the record ``clock``.

time.time() and its like return to the script a float that knows how far training was. The
difference of two is a float that knows its interval, and sums of those know all of theirs. When
such a sum is divided, the script forms a mean, and a record tells of what:

``{"event": "mean", intervals, divisor, scale (sum of the factors of the intervals, 1 each), steps,
backwards (that fall into the intervals), seconds, first_included (an interval holds a backward of
step 0), first_seconds (of those intervals), before_update (intervals that end between the first
backward of a step and its update), update_timed (an interval of this process holds an update),
device_pending (intervals at whose end a GPU was still computing), after_cut, at}``

In the script's own modules a stand-in for ``datetime`` does the same for datetime.now(). Any other
arithmetic gives plain values, and so does pickling.
"""

import datetime
import functools
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from .data.items import replace
from .printed_losses import watch_printed_losses
from .state import Probe

_UNITS = (60, 1e3, 3600, 1e6, 1e9)
_MOST_INTERVALS = 2000
_watcher: "_ClockWatcher | None" = None


def watch(probe: Probe) -> None:
    """Replace the clocks and the functions that average, if clocks are checked."""
    global _watcher
    if not probe.settings.get("clocks"):
        return
    _watcher = _ClockWatcher(probe)
    _watcher.replace_clocks()
    watch_printed_losses(probe)
    for module, names in (("statistics", ("mean", "fmean")), ("numpy", ("mean", "sum"))):
        for name in names:
            _replace_average(module, name)


class _Moment(NamedTuple):
    """How far training was when a clock was read: events counted since the start."""

    backwards_begun: int
    steps_done: int
    in_step: bool
    device_pending: bool


class _Interval(NamedTuple):
    seconds: float
    begin: _Moment
    end: _Moment
    factor: float

    @property
    def backwards(self) -> int:
        return self.end.backwards_begun - self.begin.backwards_begun


class _Reading(float):
    """What a clock said, in seconds."""

    moment: _Moment

    def __sub__(self, other: Any) -> float:
        difference = float(self) - other
        if not isinstance(other, _Reading):
            return difference
        return _duration(difference, _between(difference, other.moment, self.moment))

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


class _Duration(float):
    """A sum of intervals, perhaps in other units."""

    intervals: tuple[_Interval, ...]

    def __add__(self, other: Any) -> float:
        total = float(self) + other
        if isinstance(other, _Duration):
            return _duration(total, self.intervals + other.intervals)
        return _duration(total, self.intervals) if _is_zero(other) else total

    __radd__ = __add__

    def __sub__(self, other: Any) -> float:
        total = float(self) - other
        if isinstance(other, _Duration):
            gone = set(map(id, other.intervals))
            left = tuple(one for one in self.intervals if id(one) not in gone)
            return _duration(total, left) if len(left) < len(self.intervals) else total
        return _duration(total, self.intervals) if _is_zero(other) else total

    def __mul__(self, factor: Any) -> float:
        product = float(self) * factor
        if type(factor) not in (int, float):
            return product
        return _duration(
            product, tuple(one._replace(factor=one.factor * factor) for one in self.intervals)
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> float:
        quotient = float(self) / divisor
        if not isinstance(divisor, (int, float)):
            return quotient
        if divisor in _UNITS or divisor == 1:
            return _duration(quotient, self.intervals)
        if _watcher is not None:
            _watcher.record_mean(self.intervals, float(divisor))
        return quotient

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


class _AnyDatetime(type):
    """Every datetime is an instance of the class that stands in for datetime."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, datetime.datetime)


class _Instant(datetime.datetime, metaclass=_AnyDatetime):
    """What datetime.now() said; without a moment, any other datetime."""

    moment: _Moment | None = None

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        made = super().now(tz)
        made.moment = _watcher.moment() if _watcher else None
        return made

    def __sub__(self, other: Any) -> Any:
        difference = super().__sub__(other)
        begin = getattr(other, "moment", None)
        if self.moment is None or begin is None:
            return difference
        return _span(difference, _between(difference.total_seconds(), begin, self.moment))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return datetime.datetime, super().__reduce_ex__(protocol)[1]


class _Span(datetime.timedelta):
    """A sum of intervals."""

    intervals: tuple[_Interval, ...]

    def total_seconds(self) -> float:
        return _duration(super().total_seconds(), self.intervals)

    def __add__(self, other: Any) -> Any:
        more = other.intervals if isinstance(other, _Span) else ()
        plain = not more and other != datetime.timedelta()
        total = super().__add__(other)
        return total if plain else _span(total, self.intervals + more)

    __radd__ = __add__

    def __truediv__(self, divisor: Any) -> Any:
        if isinstance(divisor, (int, float)) and _watcher is not None:
            _watcher.record_mean(self.intervals, float(divisor))
        return super().__truediv__(divisor)

    def __reduce__(self) -> tuple[Any, ...]:
        return datetime.timedelta, (self.days, self.seconds, self.microseconds)


def _between(seconds: float, begin: _Moment, end: _Moment) -> tuple[_Interval, ...]:
    """Return the interval between two readings."""
    if _watcher is not None:
        _watcher.update_timed |= end.steps_done > begin.steps_done
    return (_Interval(seconds, begin, end, 1.0),)


def _span(total: datetime.timedelta, intervals: tuple[_Interval, ...]) -> datetime.timedelta:
    """Return the sum with its intervals."""
    result = _Span(total.days, total.seconds, total.microseconds)
    result.intervals = intervals
    return result


def _duration(seconds: float, intervals: tuple[_Interval, ...]) -> float:
    """Return the sum with its intervals; a plain float if there are too many."""
    if not isinstance(seconds, float) or len(intervals) > _MOST_INTERVALS:
        return seconds
    result = _Duration(seconds)
    result.intervals = intervals
    return result


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


class _ClockWatcher:
    """Counts the events of training, and makes readings of the clocks."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._users: dict[str, bool] = {}
        self._backwards, self._steps = 0, 0
        self._in_step = False
        self._imported_early = True
        self._replaced: dict[int, Any] = {id(datetime.datetime): _Instant, id(datetime): _dates()}
        self.update_timed = False
        probe.hear("backward_begin", self._begin)
        probe.hear("step_end", self._end)
        probe.hear("forward", lambda *_: self._replace_early())
        replace(DataLoader, "__init__", self._loader_is_built)

    def replace_clocks(self) -> None:
        """Replace the functions of ``time``: for the script's own code they return readings."""
        for name in ("time", "perf_counter", "monotonic"):
            original = getattr(time, name)
            self._replaced[id(original)] = self._reading(original)
            setattr(time, name, self._replaced[id(original)])
        timeit.default_timer = time.perf_counter
        self._replace_early()

    def record_mean(self, intervals: Iterable[_Interval], divisor: float) -> None:
        """Record that the script divides a sum of intervals."""
        timed = list(intervals)
        first = [one for one in timed if one.begin.steps_done == 0 and one.backwards]
        self._probe.record(
            "clock",
            event="mean",
            intervals=len(timed),
            divisor=divisor,
            scale=sum(one.factor for one in timed),
            steps=sum(one.end.steps_done - one.begin.steps_done for one in timed),
            backwards=sum(one.backwards for one in timed),
            seconds=sum(one.seconds for one in timed),
            first_included=bool(first),
            first_seconds=sum(one.seconds for one in first),
            before_update=sum(one.end.in_step for one in timed),
            update_timed=self.update_timed,
            device_pending=sum(one.end.device_pending for one in timed),
            after_cut=self._probe.cutting,
            at=self._probe.place(),
        )

    def is_users(self, filename: str) -> bool:
        """Return whether a file is the script's, from memory where it was asked before."""
        if filename not in self._users:
            self._users[filename] = self._probe.is_users(filename)
        return self._users[filename]

    def _reading(self, original: Callable[[], float]) -> Callable[[], float]:
        @functools.wraps(original)
        def read() -> float:
            if not self.is_users(sys._getframe(1).f_code.co_filename):
                return original()
            moment = self.moment()  # before the clock is read, so that it does not count
            made = _Reading(original())
            made.moment = moment
            return made

        return read

    def moment(self) -> _Moment:
        """Return how far training is."""
        return _Moment(self._backwards, self._steps, self._in_step, _device_computes())

    def _begin(self, *_: Any) -> None:
        self._backwards += 1
        self._in_step = True

    def _end(self, *_: Any) -> None:
        self._steps += 1
        self._in_step = False

    def _loader_is_built(self, original: Callable[..., None], *rest: Any, **named: Any) -> None:
        self._replace_early()
        original(*rest, **named)

    def _replace_early(self) -> None:
        """Replace what the script's own modules imported by name, and their ``datetime``."""
        if not self._imported_early:
            return
        self._imported_early = self._backwards == 0
        for module in list(sys.modules.values()):
            if not self.is_users(getattr(module, "__file__", None) or os.sep):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in self._replaced:
                    setattr(module, name, self._replaced[id(value)])


def _dates() -> ModuleType:
    """Return a module like ``datetime`` whose now() tells how far training was."""
    module = ModuleType("datetime")
    vars(module).update(vars(datetime))
    vars(module)["datetime"] = _Instant
    return module


def _device_computes() -> bool:
    """Return whether a GPU that this process uses has work left; this does not wait for it."""
    try:
        return torch.cuda.is_initialized() and not torch.cuda.current_stream().query()
    except (RuntimeError, AttributeError, AssertionError):  # e.g. while a graph is captured
        return False


def _replace_average(module: str, name: str) -> None:
    """Let a function that averages or adds up a list keep what is known of its intervals."""
    found = statistics if module == "statistics" else sys.modules.get(module)
    original = getattr(found, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def averaged(values: Any, *arguments: Any, **named: Any) -> Any:
        known = values if isinstance(values, (list, tuple)) and not arguments and not named else ()
        if not known or not all(isinstance(one, _Duration) for one in known) or _watcher is None:
            return original(values, *arguments, **named)
        intervals = tuple(interval for one in known for interval in one.intervals)
        if name == "sum":
            return _duration(float(original(values)), intervals)
        _watcher.record_mean(intervals, float(len(known)))
        return original(values)

    setattr(found, name, averaged)
