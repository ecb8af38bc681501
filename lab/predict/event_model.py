"""The time of a training step, predicted from a strategy's message plan.

Read downward: ``loads`` holds the closed formula of each collective, ``operation_terms`` turns it
into seconds (alpha-beta-gamma model), ``exposed_seconds`` lets messages overlap with backward and
with the next forward, and ``predict_step`` adds up the step. Imports no torch, so that a table for
100,000 nodes takes a moment. The formulas are those of the algorithms that Gloo uses (Thakur,
Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, NamedTuple

from msgspec import Meta

from common.sync.message_cost import Operation
from common.sync.plans.base import MessagePlan
from common.utils.typed_json import Share, Text
from lab.predict.compute_model import StepCompute, Wait

# Bytes on a link for each byte of payload: TCP, IP and Ethernet headers (measured on shaped links).
HEADERS = 1.06

# What a message adds on the link, however small: the headers of TCP and IP, Ethernet's frame and
# gap. ``HEADERS`` counts them for long messages; this counts the many short messages of a root,
# which pass its link one after the other.
PACKET_BYTES = 90

LARGEST_NODES = 100_000
_SAMPLED_RANKS = 32


MessageSeconds = Annotated[float, Meta(ge=0, le=1e3)]
ByteSeconds = Annotated[float, Meta(ge=0, le=1)]

# Seconds of operations by what they are spent on, as shown to readers; the parts do not overlap.
Terms = dict[str, float]
TERMS = ("latency", "bandwidth", "root's link", "summation")


@dataclass(frozen=True)
class Rate:
    """The cost of one kind of operation: seconds per message, and per byte on the busiest link.

    An operation never takes less than ``floor_seconds``: where ranks share cores, waking them all
    takes longer than a small message does.
    """

    alpha_seconds: MessageSeconds
    beta_seconds_per_byte: ByteSeconds
    floor_seconds: MessageSeconds = 0.0

    def at_least(self, beta_seconds_per_byte: float) -> "Rate":
        """Return this rate on links where a byte takes so long, if that is longer."""
        beta = max(beta_seconds_per_byte, self.beta_seconds_per_byte)
        return replace(self, beta_seconds_per_byte=beta)


@dataclass(frozen=True)
class Network:
    """What messages and memory cost.

    Parameters
    ----------
    alpha_seconds : of one message, however small: the latency, and the time that Python and Gloo
        spend on it.
    beta_seconds_per_byte : of payload on a link.
    gamma_seconds_per_byte, copy_seconds_per_byte : of adding two buffers in memory, and of copying
        one.
    kinds : rates of single kinds of operation, where they were measured. Over loopback they differ:
        the bytes pass memory, as often as the algorithm copies them.
    overlap_cost : fraction of the time that the software spends on a message by which it delays a
        concurrent backward. 0: not at all, as with a free core; 1: the two take turns.
    """

    alpha_seconds: MessageSeconds
    beta_seconds_per_byte: ByteSeconds
    gamma_seconds_per_byte: ByteSeconds = 0.0
    copy_seconds_per_byte: ByteSeconds = 0.0
    kinds: Mapping[Text, Rate] = field(default_factory=dict)
    overlap_cost: Share = 0.0

    def rate(self, kind: str) -> Rate:
        """Return the rate of operations of that kind."""
        return self.kinds.get(kind) or Rate(self.alpha_seconds, self.beta_seconds_per_byte)

    @property
    def software_bits(self) -> float:
        """Bits per second on a link at which the measured all_reduce sends, ``HEADERS`` included.

        On loopback that is the speed of the software: no link is faster.
        """
        return 8 * HEADERS / max(1e-15, self.rate("all_reduce").beta_seconds_per_byte)

    def faster(self, factor: float) -> "Network":
        """Return this network with ``factor`` times the bytes a second."""
        kinds = {
            kind: replace(rate, beta_seconds_per_byte=rate.beta_seconds_per_byte / factor)
            for kind, rate in self.kinds.items()
        }
        beta = self.beta_seconds_per_byte / factor
        return replace(self, beta_seconds_per_byte=beta, kinds=kinds)

    def over(self, *, rate_bits: float | None, latency_seconds: float | None) -> "Network":
        """Return this network with other links; None keeps the measured value.

        rate_bits : bits per second on a link, ``HEADERS`` included. latency_seconds : per message.
        A byte never takes less time than measured here, since it still passes the same software. It
        also slows backward by as many seconds as here.
        """
        default = Rate(self.alpha_seconds, self.beta_seconds_per_byte)
        kinds = self.kinds
        software = self
        if rate_bits is not None:
            beta = 8 * HEADERS / rate_bits
            default = default.at_least(beta)
            kinds = {kind: rate.at_least(beta) for kind, rate in kinds.items()}
        if latency_seconds is not None:
            default = replace(default, alpha_seconds=latency_seconds)
            kinds = {
                kind: replace(rate, alpha_seconds=latency_seconds) for kind, rate in kinds.items()
            }
            software = self.without_latency()
        return OtherLinks(
            default.alpha_seconds,
            default.beta_seconds_per_byte,
            self.gamma_seconds_per_byte,
            self.copy_seconds_per_byte,
            kinds,
            self.overlap_cost,
            software=software,
        )

    def without_latency(self) -> "Network":
        """Return this network with messages that cost nothing but their bytes."""
        kinds = {kind: replace(rate, alpha_seconds=0.0) for kind, rate in self.kinds.items()}
        return replace(self, alpha_seconds=0.0, kinds=kinds)

    def delay_share(self, operation: Operation, ranks: int) -> float:
        """Return the fraction of a message's time by which it delays a concurrent backward."""
        return self.overlap_cost


@dataclass(frozen=True, kw_only=True)
class OtherLinks(Network):
    """Links that the same ``software`` uses: what they take longer than it, a message waits."""

    software: Network

    def delay_share(self, operation: Operation, ranks: int) -> float:
        """Return the fraction of a message's time by which it delays a concurrent backward."""
        seconds = sum(operation_terms(operation, ranks, self).values())
        if seconds == 0:
            return 0.0
        busy = sum(operation_terms(operation, ranks, self.software).values())
        return self.overlap_cost * busy / seconds


def loads(kind: str, nbytes: float, ranks: int) -> tuple[int, float, float]:
    """Return an operation's messages in a row, bytes on the busiest link, and bytes summed.

    N ranks, a tensor of M bytes; ``formulas`` below holds the closed forms.
    """
    if ranks == 1 and kind != "exchange":
        return 0, 0.0, 0.0
    # A ring cuts the tensor into N parts; N-1 of them pass each link.
    parts = (ranks - 1) / ranks * nbytes
    rounds = (ranks - 1).bit_length()  # log2 N, rounded up
    # A root's messages pass its link one after the other; each but the first adds PACKET_BYTES.
    through_root = (ranks - 1) * nbytes + (ranks - 2) * PACKET_BYTES
    formulas = {
        "all_reduce": (2 * (ranks - 1), 2 * parts, parts),  # ring: reduce-scatter, then all-gather
        "reduce": (ranks, 2 * parts, parts),  # ring: reduce-scatter, then the parts go to the root
        "all_gather": (ranks - 1, (ranks - 1) * nbytes, 0.0),  # ring
        "reduce_scatter": (ranks - 1, parts, parts),  # the first half of all_reduce's ring
        "broadcast": (rounds, rounds * nbytes, 0.0),  # binomial tree
        "gather": (1, through_root, 0.0),  # every rank straight to the root: one latency
        "scatter": (1, through_root, 0.0),  # and back
        "exchange": (1, nbytes, 0.0),  # one message of each rank, all at once
    }
    return formulas[kind]


def operation_terms(operation: Operation, ranks: int, network: Network) -> Terms:
    """Return the time of ``operation.count`` operations; time added by the floor is latency.

    One operation takes max(messages x alpha + bytes x beta, floor) + summed x gamma + copied x the
    cost of a copy.
    """
    messages, link_bytes, summed = loads(operation.kind, operation.nbytes, ranks)
    rate = network.rate(operation.kind)
    count = operation.count
    passing = link_bytes * rate.beta_seconds_per_byte
    adding = (summed + operation.summed_bytes) * network.gamma_seconds_per_byte
    copying = operation.copied_bytes * network.copy_seconds_per_byte
    # Through a root, the bytes of all ranks share one link: more ranks make it slower, so it is a
    # term of its own.
    by_root = operation.kind in ("gather", "scatter")
    return {
        "latency": count * max(messages * rate.alpha_seconds, rate.floor_seconds - passing),
        "bandwidth": 0.0 if by_root else count * passing,
        "root's link": count * passing if by_root else 0.0,
        "summation": count * (adding + copying),
    }


@dataclass(frozen=True)
class StepPrediction:
    """One step, the mean over the strategy's period.

    ``compute_seconds`` : data, forward, backward and update, with ``slowed_seconds``, the time that
        messages take from forward and backward.
    ``sync_seconds`` : exposed communication, the messages left after backward and those that
        computing waits for. Both add up to ``step_seconds``.
    ``batchnorm_seconds`` : of these, the messages of SyncBatchNorm.
    ``bytes_sent_root``, ``bytes_sent_others`` : payload that rank 0 sends, and the mean over the
        other ranks (over some of them if they are many).
    """

    step_seconds: float
    compute_seconds: float
    slowed_seconds: float
    sync_seconds: float
    batchnorm_seconds: float
    bytes_sent_root: float
    bytes_sent_others: float


def predict_step(
    plan: MessagePlan,
    sizes: Sequence[int],
    ranks: int,
    *,
    network: Network,
    compute: StepCompute,
) -> StepPrediction:
    """Return the predicted step of ``plan`` on ``ranks`` ranks.

    sizes : bytes of each parameter's gradient, in the order of the parameters.
    """
    alone, slowed, sync = _busy_and_exposed(plan, sizes, ranks, network, compute)
    busy = alone + slowed
    root, others = _bytes_sent(plan, sizes, ranks)
    if compute.waits_for is not None:
        root_waits, others_wait = _bytes_sent(compute.waits_for, sizes, ranks)
        root += root_waits
        others += others_wait
    return StepPrediction(busy + sync, busy, slowed, sync, compute.wait_seconds, root, others)


def step_seconds(
    plan: MessagePlan,
    sizes: Sequence[int],
    ranks: int,
    *,
    network: Network,
    compute: StepCompute,
) -> float:
    """Return the seconds of ``predict_step`` alone, which is faster: no bytes are counted."""
    return sum(_busy_and_exposed(plan, sizes, ranks, network, compute))


def message_terms(
    plan: MessagePlan, sizes: Sequence[int], ranks: int, *, network: Network
) -> Terms:
    """Return the seconds of all messages of a period, hidden behind backward or not."""
    costs = [cost for _, cost in _costs(plan, sizes, ranks, network)]
    return {name: math.fsum(cost[name] for cost in costs) for name in TERMS}


def _costs(
    plan: MessagePlan, sizes: Sequence[int], ranks: int, network: Network
) -> list[tuple[Operation, Terms]]:
    """Return the operations of a period, in order, each with its seconds; none for one rank."""
    if ranks == 1:
        return []
    operations = plan.operations(sizes, ranks)
    return [(operation, operation_terms(operation, ranks, network)) for operation in operations]


def _busy_and_exposed(
    plan: MessagePlan, sizes: Sequence[int], ranks: int, network: Network, compute: StepCompute
) -> tuple[float, float, float]:
    """Return the seconds of computing, how much messages slow it, and those that nothing hides."""
    costs = _costs(plan, sizes, ranks, network)
    slowed_backward, after_backward = exposed_seconds(
        _beside_backward(costs, ranks, network, compute), compute.backward_end
    )
    slowed_forward, before_forward = exposed_seconds(
        _beside_forward(costs, ranks, network, compute), compute.forward_end
    )
    computed = compute.before_seconds + compute.backward_seconds
    computed += plan.update_share(ranks) * compute.update_seconds
    # A strategy that sends in every eighth step only (local SGD) costs an eighth of that.
    slowed = slowed_forward / plan.period + slowed_backward / plan.period
    exposed = before_forward / plan.period + after_backward / plan.period + compute.wait_seconds
    return computed, slowed, exposed


class _Message(NamedTuple):
    """A message beside computing: see ``exposed_seconds``."""

    ready: float | None
    seconds: float
    delay_share: float


def _beside_backward(
    costs: Sequence[tuple[Operation, Terms]], ranks: int, network: Network, compute: StepCompute
) -> list[_Message]:
    """Return the messages that gradients make, each from the moment when backward has made them."""
    messages = []
    for operation, cost in costs:
        if operation.needed_bytes is None:
            ready = None
            if operation.ready_bytes is not None:
                ready = compute.ready_seconds(operation.ready_bytes)
            share = network.delay_share(operation, ranks)
            messages.append(_Message(ready, sum(cost.values()), share))
    return messages


def _beside_forward(
    costs: Sequence[tuple[Operation, Terms]], ranks: int, network: Network, compute: StepCompute
) -> list[_Message]:
    """Return the messages that forward waits for, in the mirror: from the end of forward."""
    gathers = [(operation, cost) for operation, cost in costs if operation.needed_bytes is not None]
    ends = ends_in_pairs([sum(cost.values()) for _, cost in gathers])
    messages = []
    begin = 0.0
    for (operation, _), end in zip(gathers, ends, strict=True):
        assert operation.needed_bytes is not None
        needed = compute.forward_end - compute.needed_seconds(operation.needed_bytes)
        share = network.delay_share(operation, ranks)
        messages.append(_Message(needed, end - begin, share))
        begin = end
    return messages[::-1]


def with_waits(
    compute: StepCompute,
    plan: MessagePlan,
    sizes: Sequence[int],
    ranks: int,
    *,
    network: Network,
) -> StepCompute:
    """Return the step whose layers wait for the messages of ``plan`` (SyncBatchNorm's).

    A message has connections of its own, so it does not queue behind the strategy's messages, and
    takes so few bytes that these hardly notice. What follows in its pass comes later, and so do the
    gradients that the strategy sends.
    """
    forward = []
    backward = []
    for operation, cost in _costs(plan, sizes, ranks, network):
        seconds = sum(cost.values())
        if operation.needed_bytes is not None:
            forward.append(Wait(compute.needed_share(operation.needed_bytes), seconds))
        else:
            assert operation.ready_bytes is not None
            backward.append(Wait(compute.ready_share(operation.ready_bytes), seconds))
    return replace(compute, waits_for=plan, forward_waits=forward, backward_waits=backward)


def _bytes_sent(plan: MessagePlan, sizes: Sequence[int], ranks: int) -> tuple[float, float]:
    """Return the bytes that rank 0 sends in a step, and the mean over some other ranks."""
    if ranks == 1:
        return 0.0, 0.0
    # Evenly spread over all other ranks, the first and the last among them.
    spread = {1 + (ranks - 2) * index // (_SAMPLED_RANKS - 1) for index in range(_SAMPLED_RANKS)}
    root = float(plan.bytes_sent(sizes, 0, ranks))
    others = [float(plan.bytes_sent(sizes, rank, ranks)) / plan.period for rank in sorted(spread)]
    return root / plan.period, math.fsum(others) / len(others)


def exposed_seconds(
    messages: Sequence[tuple[float | None, float, float]], backward_seconds: float
) -> tuple[float, float]:
    """Return the seconds that messages add to backward, and those that they take after it.

    messages : in order, after how many seconds of backward each may begin (None: after all of it),
        its own seconds, and the fraction by which it delays backward: while it is under way,
        backward computes at a speed of one less that fraction. They go one after the other, c_k =
        max(r_k, c_{k-1}) + t_k.

    A forward that waits for messages is the same seen in a mirror: time runs backwards, so the last
    message comes first, and may begin once all of forward that needs it is done. Its t_k is then
    the time from the end of the message before to its own.
    """
    now = 0.0
    computed = 0.0  # how many seconds' worth of backward are done
    end_of_backward: float | None = None
    for ready, seconds, delay_share in messages:
        speed = 1 - delay_share
        # r_k: with no message under way, backward computes at full speed until this one's gradients
        # are ready.
        begins = backward_seconds if ready is None else ready
        wait = max(0.0, begins - computed)
        now += wait
        computed += wait
        left = backward_seconds - computed
        if end_of_backward is None and left <= seconds * speed:  # backward ends during this message
            end_of_backward = now
            if left:  # else nothing is left, perhaps at a speed of 0
                end_of_backward += left / speed
        now += seconds
        computed = min(backward_seconds, computed + seconds * speed)
    if end_of_backward is None:
        now += backward_seconds - computed
        end_of_backward = now
    return end_of_backward - backward_seconds, now - end_of_backward


def ends_in_pairs(seconds: Sequence[float]) -> list[float]:
    """Return when each message ends if all are started at once, none before the one before it.

    Gloo has two threads. Two messages at a time share the link, so the first one of several takes
    up to twice its own ``seconds``. The last one's end is the same as one after the other.
    """
    now = 0.0
    ends = [0.0] * len(seconds)
    waiting = list(enumerate(seconds))
    under_way: list[tuple[float, int]] = []  # seconds left if alone on the link, index
    while waiting or under_way:
        while waiting and len(under_way) < 2:
            index, left = waiting.pop(0)
            under_way.append((left, index))
        shortest, ended = min(under_way)
        now += shortest * len(under_way)
        ends[ended] = now
        under_way = [(left - shortest, index) for left, index in under_way if index != ended]
    return list(accumulate(ends, max))  # a short message waits for the longer one before it
