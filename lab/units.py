"""Parse what a user types with a unit: rates ("200mbit"), latencies ("0.2ms"), parameters."""

import re
from collections.abc import Mapping

from common.errors import UserError

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str | None, flag: str = "--rate") -> float | None:
    """Return bits per second: "200mbit" and "200mbit/s" give 2e8, None gives None.

    Raises UserError if the text is no positive number with a unit.
    """
    return _parse(text, _RATE_UNITS, flag, "1gbit, 200mbit or 10gbit")


def parse_latency(text: str | None, flag: str = "--latency") -> float | None:
    """Return seconds: "0.2ms" gives 2e-4, None gives None.

    Raises UserError if the text is no positive number with a unit.
    """
    return _parse(text, _TIME_UNITS, flag, "0.2ms or 50us")


def parse_parameters(text: str | None) -> float | None:
    """Return a number of parameters: "25.6M" gives 2.56e7, None gives None.

    Raises UserError if the text is no positive number with a unit.
    """
    return _parse(text, {"k": 1e3, "m": 1e6, "b": 1e9}, "--parameters", "25.6M or 7B")


def _parse(text: str | None, units: Mapping[str, float], flag: str, examples: str) -> float | None:
    """Return a number times its unit; None for None. UserError for any other text."""
    if text is None:
        return None
    match = re.fullmatch(
        r"\s*(\d+\.?\d*|\.\d+)\s*([a-zµ]+?)(/s|ps)?\s*", text.lower().replace("µ", "u")
    )
    # "/s" belongs to a rate, never to a time.
    if match is None or match[2] not in units or (match[3] and "s" in units):
        raise UserError(
            f"{flag}: got {text!r}, give a number with a unit ({', '.join(units)}), "
            f"for example {examples}"
        )
    value = float(match[1]) * units[match[2]]
    if value <= 0:
        raise UserError(f"{flag}: got {text!r}, give more than 0, for example {examples}")
    return value
