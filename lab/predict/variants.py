"""What a user types about a strategy: the values of its options, and names such as "ddp-auto"."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

from common.errors import UserError
from common.sync import strategy_options
from common.sync.plans.base import AUTO


def parse_bucket_mb(text: str | None) -> float | str | None:
    """Return MiB, or "auto" itself; None gives None.

    Raises UserError if the text is neither a positive number nor "auto".
    """
    if text is None or text == AUTO:
        return text
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise UserError(f"--bucket-mb: got {text!r}, give a number above 0, or {AUTO}")


def option_parsers() -> dict[str, Callable[[str], Any]]:
    """Return what parses a value of each strategy's option, by the option's name.

    Raises ValueError if the text is no such value.
    """
    parsers: dict[str, Callable[[str], Any]] = {}
    for name, option in strategy_options().items():
        parsers[name] = parse_bucket_mb if option.auto else option.kind
    return parsers


def split_variant(sync: str) -> tuple[str, float | str | None]:
    """Return the strategy and the size of its buckets: "ddp-auto" gives "ddp" and "auto".

    "ddp-9" gives "ddp" and 9.0; any other text gives itself and None.
    """
    strategy, dash, size = sync.partition("-")
    with contextlib.suppress(UserError):
        if dash:
            return strategy, parse_bucket_mb(size)
    return sync, None
