"""The network that fits measured messages. Imports no torch.

lab/calibrate/link_measurements.py measures them. An operation takes max(alpha1, ideal x 1.06 +
alpha0), with alpha1 from messages of 1 KB and alpha0 from messages of 2 MB.
"""

from typing import Annotated

from msgspec import Meta, Struct

from common.utils.typed_json import Count, Ranks, Text
from lab.predict.event_model import HEADERS, ByteSeconds, MessageSeconds, Network, Rate, loads

_Rows = Annotated[list[tuple[Count, MessageSeconds]], Meta(min_length=2, max_length=3)]


class MeasuredLinks(Struct):
    """What ``measure_links`` found, and the file of it.

    kinds : rows (bytes, seconds of one message) by kind of operation, the smallest first.
    sum, copy : seconds a byte in memory.
    """

    nodes: Ranks
    kinds: Annotated[dict[Text, _Rows], Meta(min_length=1)]
    sum: ByteSeconds
    copy: ByteSeconds


def network_from(found: MeasuredLinks, *, rate_bits: float | None) -> Network:
    """Return the network from what ``measure_links`` returned.

    rate_bits : of the links in a second; None: from the measured times of the two large message
        sizes.
    """
    kinds = {}
    for kind, rows in found.kinds.items():
        (_, floor), *larger = rows
        nbytes, seconds = larger[0]
        messages, link_bytes, _ = loads(kind, nbytes, found.nodes)
        if rate_bits is not None:
            beta = 8 * HEADERS / rate_bits
        else:  # the slope between the two
            most_bytes, most_seconds = larger[-1]
            _, most_link_bytes, _ = loads(kind, most_bytes, found.nodes)
            beta = max(0.0, (most_seconds - seconds) / (most_link_bytes - link_bytes))
        kinds[kind] = Rate(max(0.0, seconds - beta * link_bytes) / messages, beta, floor)
    first = next(iter(kinds.values()))
    return Network(first.alpha_seconds, first.beta_seconds_per_byte, found.sum, found.copy, kinds)
