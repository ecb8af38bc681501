"""Words and numbers for people: counts, lists, ranks, times, rates, bytes, shares and factors.

Each has one form wherever the project speaks. lab/units.py reads what a person types with a unit.
Touches nothing else of the project, and no torch.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

_DURATIONS = (("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_RATES = (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_BANDWIDTHS = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))
_MOST_NAMES = 20
_MOST_RANKS = 8

# --- words ---


def count(number: int, noun: str) -> str:
    """Return "1 rank", "0 ranks", "4,096 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def counts(numbers: Iterable[int], noun: str) -> str:
    """Return different numbers of one thing in order: "2 and 3 ranks", "1 rank", "no ranks"."""
    different = sorted(set(numbers))
    if different == [1]:
        return count(1, noun)
    return f"{listed(f'{number:,}' for number in different) or 'no'} {noun}s"


def listed(names: Iterable[object], *, most: int = _MOST_NAMES) -> str:
    """Return "a, b and c"; of more than ``most`` names, how many others there are; "" of none."""
    texts = [str(name) for name in names]
    if len(texts) > most:
        texts[most:] = [f"{len(texts) - most:,} more"]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 1", "ranks 0, 1 and 2", "no rank"; of more than eight, how many others."""
    numbers = list(ranks)
    if not numbers:
        return "no rank"
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {listed(numbers, most=_MOST_RANKS)}"


def spans(numbers: Sequence[int]) -> list[str]:
    """Return ascending numbers as ranges: 0, 1, 2 and 5 are "0-2" and "5"."""
    texts = []
    # Within a range, numbers rise as fast as their places.
    for _, members in groupby(enumerate(numbers), key=lambda placed: placed[1] - placed[0]):
        [(_, first), *others] = members
        texts.append(f"{first}-{others[-1][1]}" if others else str(first))
    return texts


# --- numbers with a unit ---


def duration_text(seconds: float) -> str:
    """Return a measured or predicted time with three digits: "12.3 µs", "563 ms", "2 h"."""
    if seconds <= 0:
        return "0 s"
    return _scaled(seconds, _DURATIONS)


def range_text(
    low: float, high: float, *, between: str = " to ", typical: float | None = None
) -> str:
    """Return a range of times in one unit, that of the typical time: "182 to 240 ms"."""
    unit = duration_text(high if typical is None else typical).rpartition(" ")[2]
    seconds = dict(_DURATIONS)[unit]
    ends = [_without_exponent(f"{end / seconds:.3g}") for end in (low, high)]
    return f"{between.join(ends)} {unit}"


def minutes_text(seconds: float) -> str:
    """Return how long a person waits: "4 s", "2 min 05 s", "3 h 12 min"."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def rate_text(bits: float, *, digits: int = 3) -> str:
    """Return the rate of a link, given in bits per second: "200 Mbit/s"."""
    return _scaled(bits, _RATES, digits)


def bandwidth_text(seconds_per_byte: float) -> str:
    """Return the inverse of a time per byte: 8.07e-10 is "1.24 GB/s", 0 is "unlimited"."""
    if seconds_per_byte <= 1e-15:
        return "unlimited"
    return _scaled(1 / seconds_per_byte, _BANDWIDTHS)


def bytes_text(number: float) -> str:
    """Return a number of bytes: "36.9 MB"."""
    if number <= 0:
        return "0 B"
    return _scaled(number, _BYTES)


def percent(share: float, digits: int = 0, *, signed: bool = False) -> str:
    """Return a share: "25 %", or "+25 %" where it is a difference."""
    sign = "+" if signed else ""
    return f"{100 * share:{sign}.{digits}f} %"


def factor_text(value: float) -> str:
    """Return how many times as much: "1.36", "16.7", "1,234"; "<0.01" below that."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.01 else "<0.01"


def _scaled(value: float, units: Sequence[tuple[str, float]], digits: int = 3) -> str:
    """Return ``value`` in the largest unit that leaves at least 1."""
    texts = [f"{value / size:.{digits}g}" for _, size in units]
    place = next((place for place, text in enumerate(texts) if float(text) >= 1), -1)
    return f"{_without_exponent(texts[place])} {units[place][0]}"


def _without_exponent(text: str) -> str:
    return f"{float(text):,.0f}" if "e" in text else text
