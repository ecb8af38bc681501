"""Write times, bandwidths and bytes with three digits in units that people read."""

from collections.abc import Sequence

_BANDWIDTHS = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))
_DURATIONS = (("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def bandwidth_text(seconds_per_byte: float) -> str:
    """Return the inverse of a time per byte: 8.07e-10 is ``1.24 GB/s``, 0 is ``unlimited``."""
    if seconds_per_byte <= 1e-15:
        return "unlimited"
    return _scaled(1 / seconds_per_byte, _BANDWIDTHS)


def duration_text(seconds: float) -> str:
    """Return a time as text: ``12.3 µs``, ``563 ms``, ``2 h``."""
    if seconds <= 0:
        return "0 s"
    return _scaled(seconds, _DURATIONS)


def range_text(
    low: float, high: float, *, between: str = " to ", typical: float | None = None
) -> str:
    """Return a range of times in one unit, that of the typical time: ``182 to 240 ms``."""
    unit = duration_text(high if typical is None else typical).rpartition(" ")[2]
    seconds = dict(_DURATIONS)[unit]
    ends = [_without_exponent(f"{end / seconds:.3g}") for end in (low, high)]
    return f"{between.join(ends)} {unit}"


def bytes_text(count: float) -> str:
    """Return a number of bytes as text: ``36.9 MB``."""
    if count <= 0:
        return "0 B"
    return _scaled(count, _BYTES)


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return ``value`` in the largest unit that leaves at least 1, with three digits."""
    for name, size in units:
        digits = f"{value / size:.3g}"
        if float(digits) >= 1:
            return f"{_without_exponent(digits)} {name}"
    return f"{_without_exponent(digits)} {name}"


def _without_exponent(digits: str) -> str:
    return f"{float(digits):,.0f}" if "e" in digits else digits
