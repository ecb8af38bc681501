"""The network that fits measured messages. Imports no torch.

lab/calibrate/link_measurements.py measures them. An operation takes max(alpha1, ideal x 1.06 +
alpha0), with alpha1 from messages of 1 KB and alpha0 from messages of 2 MB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from common.sync.message_cost import Operation
from common.utils.typed_json import Count, Ranks, Text
from lab.predict.event_model import (
    HEADERS,
    ByteSeconds,
    MessageSeconds,
    Network,
    Rate,
    Stage,
    exchange_stage,
    loads,
    stages_of,
)

_HALVINGS = 40  # of an interval, to a billionth of a millisecond
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


class ProbedLinks(Struct):
    """The file of lab/calibrate/link_probe.py, by who sends: see ``Operation.among``."""

    all: MeasuredLinks | None = None
    node: MeasuredLinks | None = None
    leaders: MeasuredLinks | None = None


def network_from(found: MeasuredLinks, *, rate_bits: float | None) -> Network:
    """Return the network from what ``measure_links`` returned, of ranks with a link each.

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


@dataclass(frozen=True)
class SharedLinks:
    """Networks of nodes with several ranks, as measured: None if no strategy needs one.

    flat : for operations among all ranks. grouped : for those in each node and between leaders.
    """

    flat: Network | None
    grouped: Network | None


def shared_links_from(found: ProbedLinks, *, rate_bits: float, ranks_per_node: int) -> SharedLinks:
    """Return the networks of nodes of which ``ranks_per_node`` ranks each share a link.

    rate_bits : of the links, in a second.
    """
    inside = None
    if found.node is not None:
        inside = network_from(found.node, rate_bits=None)
    flat = None
    if found.all is not None:
        flat = _shared_network(found.all, rate_bits, ranks_per_node, inside)
    grouped = None
    if found.leaders is not None:
        grouped = network_from(found.leaders, rate_bits=rate_bits).over(
            rate_bits=None, latency_seconds=None, ranks_per_node=ranks_per_node, inside=inside
        )
    return SharedLinks(flat, grouped)


def _shared_network(
    found: MeasuredLinks, rate_bits: float, ranks_per_node: int, inside: Network | None
) -> Network:
    """Return the network of operations among all ranks, of which several share each link."""
    beta = 8 * HEADERS / rate_bits
    quick = Rate(0.0, 0.0)  # unless messages inside a node were measured
    kinds = {}
    for kind, rows in found.kinds.items():
        (_, floor), (nbytes, seconds), *_ = rows
        if kind == "exchange":
            stages = [exchange_stage(Operation(kind, nbytes), found.nodes, ranks_per_node)]
        else:
            stages = [*stages_of(kind, found.nodes, ranks_per_node)]
        within = quick if inside is None else inside.rate(kind)
        kinds[kind] = Rate(_alpha(stages, nbytes, seconds, beta, within), beta, floor)
    first = next(iter(kinds.values()))
    measured = Network(first.alpha_seconds, beta, found.sum, found.copy, kinds)
    free = Network(0.0, 0.0, found.sum, found.copy)
    return measured.over(
        rate_bits=None,
        latency_seconds=None,
        ranks_per_node=ranks_per_node,
        inside=inside or free,
    )


def _alpha(
    stages: Sequence[Stage], nbytes: float, seconds: float, beta: float, inside: Rate
) -> float:
    """Return the alpha with which these stages take ``seconds``, which more alpha makes longer."""
    low = 0.0
    high = seconds
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        between = Rate(middle, beta)
        if sum(sum(stage.seconds(nbytes, between, inside)) for stage in stages) < seconds:
            low = middle
        else:
            high = middle
    return low
