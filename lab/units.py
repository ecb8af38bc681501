"""Parse what a user types with a unit: rates ("200mbit"), latencies ("0.2ms"), parameters."""

import math
import re
from collections.abc import Mapping

from common.errors import UserError

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNT_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_MOST_PARAMETERS = 1e13  # no model has more, and each matrix that stands for them keeps a size


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
    """Return a number of parameters: "25.6M" and "25600000" give 2.56e7, None gives None.

    Raises UserError if the text is no whole number of at least 1, with a unit or without.
    """
    examples = "25600000, 25.6M or 7B"
    parameters = _parse(text, _COUNT_UNITS, "--parameters", examples)
    if parameters is None:
        return None
    whole = round(parameters)
    if not math.isclose(whole, parameters, rel_tol=1e-12):
        raise UserError(f"--parameters: got {text!r}, give a whole number, for example {examples}")
    if parameters > _MOST_PARAMETERS:
        raise UserError(f"--parameters: got {text!r}, give at most {_MOST_PARAMETERS:g}")
    return whole


def _parse(text: str | None, units: Mapping[str, float], flag: str, examples: str) -> float | None:
    """Return a number times its unit; None for None. UserError for any other text."""
    if text is None:
        return None
    match = re.fullmatch(
        r"((?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([a-zµ]*?)(/s|ps)?",
        text.strip().lower().replace("µ", "u"),
    )
    # "/s" belongs to a rate, never to a time.
    if match is None or match[2] not in units or (match[3] and "gbit" not in units):
        kind = "a number, alone or" if "" in units else "a number"
        raise UserError(
            f"{flag}: got {text!r}, give {kind} with a unit ({', '.join(filter(None, units))}), "
            f"for example {examples}"
        )
    value = float(match[1]) * units[match[2]]
    if value <= 0:
        raise UserError(f"{flag}: got {text!r}, give more than 0, for example {examples}")
    if value == math.inf:
        raise UserError(f"{flag}: got {text!r}, give a smaller number, for example {examples}")
    return value
