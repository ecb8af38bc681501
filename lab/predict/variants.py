"""Names of strategies that also give the size of their buckets, such as "ddp-auto" or "ddp-9"."""

import contextlib

from common.errors import UserError
from lab.units import parse_bucket_mb


def split_variant(sync: str) -> tuple[str, float | str | None]:
    """Return the strategy and the size of its buckets: "ddp-auto" gives "ddp" and "auto".

    "ddp-9" gives "ddp" and 9.0; any other text gives itself and None.
    """
    strategy, dash, size = sync.partition("-")
    with contextlib.suppress(UserError):
        if dash:
            return strategy, parse_bucket_mb(size)
    return sync, None
