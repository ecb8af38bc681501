"""The time of a step, from a strategy's message plan: closed alpha-beta-gamma formulas and an event model.

``predict_step`` adds up a step; lab/predict/scaling.py calls ``step_seconds`` for many numbers of nodes. Nothing here imports
torch, so that a table for 100,000 nodes takes a moment. The formulas are those of the algorithms that Gloo uses (Thakur,
Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.cost_model.compute_model import StepCompute
from common.sync.message_cost import Operation
from common.sync.message_plans import MessagePlan

HEADERS = 1.06
"""Bytes on a link for each byte of payload: TCP, IP and Ethernet headers (measured on shaped links)."""

PACKET_BYTES = 90
"""On a link beside the payload of a message, however small: the headers of TCP and IP, and Ethernet's frame and gap. What
``HEADERS`` counts of long ones, and what a root's many short ones take one after the other."""

LARGEST_NODES = 100_000
_SAMPLED_RANKS = 32


@dataclass(frozen=True)
class Rate:
    """Of one kind of operation: seconds a message, seconds a byte that passes the busiest link, and what an operation takes at
    least, however small: where ranks share cores, waking them all takes longer than the messages."""

    alpha_seconds: float
    beta_seconds_per_byte: float
    floor_seconds: float = 0.0


@dataclass(frozen=True)
class Network:
    """What messages and memory cost.

    Parameters
    ----------
    alpha_seconds : of one message, however small: latency and what Python and Gloo do for it.
    beta_seconds_per_byte : of payload on a link.
    gamma_seconds_per_byte, copy_seconds_per_byte : of adding two buffers, of copying one, in memory.
    kinds : other alpha and beta for a kind of operation, where they were measured; on loopback they differ, since there
        the bytes pass memory, as often as the algorithm copies them.
    overlap_cost : share of a message's time that is taken from a backward that computes meanwhile (0: none, as with a free
        core; 1: the two take turns).
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    gamma_seconds_per_byte: float = 0.0
    copy_seconds_per_byte: float = 0.0
    kinds: Mapping[str, Rate] = field(default_factory=dict)
    overlap_cost: float = 0.0

    def rate(self, kind: str) -> Rate:
        """Return alpha and beta of that kind."""
        return self.kinds.get(kind) or Rate(self.alpha_seconds, self.beta_seconds_per_byte)

    def over(self, *, rate_bits: float | None, latency_seconds: float | None) -> "Network":
        """Return this network's software and memory on other links: of ``rate_bits`` a second, ``HEADERS`` included, and
        messages that take ``latency_seconds``; None keeps what was measured.

        A byte never takes less than was measured here, since each still passes this software. Backward gives up as much
        time to it as it did here; the rest of a message is waiting.
        """
        beta = 0.0 if rate_bits is None else 8 * HEADERS / rate_bits
        here = self.rate("all_reduce").beta_seconds_per_byte

        def moved(rate: Rate) -> Rate:
            return Rate(
                rate.alpha_seconds if latency_seconds is None else latency_seconds,
                max(beta, rate.beta_seconds_per_byte),
                rate.floor_seconds,
            )

        own = moved(Rate(self.alpha_seconds, self.beta_seconds_per_byte))
        return replace(
            self,
            alpha_seconds=own.alpha_seconds,
            beta_seconds_per_byte=own.beta_seconds_per_byte,
            kinds={kind: moved(rate) for kind, rate in self.kinds.items()},
            overlap_cost=self.overlap_cost * (here / beta if beta > here else 1.0),
        )


@dataclass(frozen=True)
class Terms:
    """Seconds, by what they are spent on."""

    latency: float = 0.0
    bandwidth: float = 0.0
    root: float = 0.0
    summation: float = 0.0

    @property
    def seconds(self) -> float:
        """All together: nothing of one operation is hidden behind another part of it."""
        return self.latency + self.bandwidth + self.root + self.summation

    @property
    def largest(self) -> str:
        """What takes the most of them, in a reader's words."""
        spent = {
            "latency": self.latency,
            "bandwidth": self.bandwidth,
            "root's link": self.root,
            "summation": self.summation,
        }
        return max(spent, key=lambda name: spent[name])

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(
            self.latency + other.latency,
            self.bandwidth + other.bandwidth,
            self.root + other.root,
            self.summation + other.summation,
        )


def loads(kind: str, nbytes: float, ranks: int) -> tuple[int, float, float]:
    """Return, of one operation, the messages that follow one another, the bytes that pass the busiest link in one
    direction, and the bytes that a rank sums on the way.

    all_reduce : ring, 2(N-1) messages, 2(N-1)/N M bytes, (N-1)/N M summed.
    reduce : ring, then the parts go to the root: N messages, 2(N-1)/N M bytes, (N-1)/N M summed.
    all_gather : ring, N-1 messages, (N-1) M bytes.
    broadcast : binomial tree, log2 N rounds up, each a message of M bytes.
    gather, scatter : straight to and from the root, one message's latency, (N-1) M bytes through the root's link and, since
        they are N-1 messages, ``PACKET_BYTES`` for each but the first.
    exchange : one message of M bytes.
    """
    if kind == "exchange":
        return 1, nbytes, 0.0
    if ranks == 1:
        return 0, 0.0, 0.0
    parts = (ranks - 1) / ranks * nbytes
    if kind == "all_reduce":
        return 2 * (ranks - 1), 2 * parts, parts
    if kind == "reduce":
        return ranks, 2 * parts, parts
    if kind == "all_gather":
        return ranks - 1, (ranks - 1) * nbytes, 0.0
    if kind == "broadcast":
        rounds = (ranks - 1).bit_length()
        return rounds, rounds * nbytes, 0.0
    if kind in ("gather", "scatter"):
        return 1, (ranks - 1) * nbytes + (ranks - 2) * PACKET_BYTES, 0.0
    raise ValueError(f"kind: got {kind!r}, which has no formula")


def operation_terms(operation: Operation, ranks: int, network: Network) -> Terms:
    """Return what all ``count`` of an operation take, one after the other; what a floor adds is latency."""
    messages, link_bytes, summed = loads(operation.kind, operation.nbytes, ranks)
    rate = network.rate(operation.kind)
    passing = link_bytes * rate.beta_seconds_per_byte
    latency = max(messages * rate.alpha_seconds, rate.floor_seconds - passing)
    by_root = operation.kind in ("gather", "scatter")
    one = Terms(
        latency,
        0.0 if by_root else passing,
        passing if by_root else 0.0,
        (summed + operation.summed_bytes) * network.gamma_seconds_per_byte
        + operation.copied_bytes * network.copy_seconds_per_byte,
    )
    times = operation.count
    return Terms(
        times * one.latency, times * one.bandwidth, times * one.root, times * one.summation
    )


def exposed_seconds(
    messages: Sequence[tuple[float | None, float]],
    backward_seconds: float,
    overlap_cost: float = 0.0,
) -> tuple[float, float]:
    """Return by how much messages make backward longer, and what of them is left when it ends.

    messages : for each, in order, after how many seconds of backward it may begin (None: after all of it) and how many
        seconds it takes. They go one after the other, c_k = max(r_k, c_{k-1}) + t_k, and while one is under way backward
        computes at a speed of 1 - ``overlap_cost``.
    """
    now = computed = 0.0  # seconds on the clock, seconds' worth of backward that are done
    end_of_backward: float | None = None
    for ready, seconds in messages:
        wait = max(0.0, (backward_seconds if ready is None else ready) - computed)
        now, computed = now + wait, computed + wait
        left = backward_seconds - computed
        if end_of_backward is None and left <= seconds * (1 - overlap_cost):
            end_of_backward = now + (left / (1 - overlap_cost) if left else 0.0)
        now, computed = (
            now + seconds,
            min(backward_seconds, computed + seconds * (1 - overlap_cost)),
        )
    if end_of_backward is None:
        end_of_backward = now = now + backward_seconds - computed
    return end_of_backward - backward_seconds, now - end_of_backward


@dataclass(frozen=True)
class Prediction:
    """One step, the mean over the strategy's period.

    ``compute_seconds`` : data, forward, backward and update, with what messages under way take from backward.
    ``sync_seconds`` : what of the messages is left after backward; both make ``step_seconds``.
    ``bytes_sent_root``, ``bytes_sent_others`` : payload that rank 0 sends, and the mean over the others (over some of them
        where they are many).
    ``bound`` : what takes longest: "compute", "latency", "bandwidth", "root's link" or "summation".
    """

    step_seconds: float
    compute_seconds: float
    sync_seconds: float
    bytes_sent_root: float
    bytes_sent_others: float
    bound: str


def predict_step(
    plan: MessagePlan,
    sizes: Sequence[int],
    ranks: int,
    *,
    network: Network,
    compute: StepCompute,
) -> Prediction:
    """Return what a step of ``plan`` takes on ``ranks`` ranks.

    sizes : bytes of each parameter's gradient, in the order of the parameters. Raises NotImplementedError where the plan
    has no formula.
    """
    slowed, sync, terms = _messages(plan, sizes, ranks, network, compute)
    busy = compute.seconds + slowed
    bound = "compute" if busy >= sync else terms.largest
    root, others = _bytes_sent(plan, sizes, ranks)
    return Prediction(busy + sync, busy, sync, root, others, bound)


def step_seconds(
    plan: MessagePlan,
    sizes: Sequence[int],
    ranks: int,
    *,
    network: Network,
    compute: StepCompute,
) -> float:
    """Return the seconds of ``predict_step`` alone."""
    slowed, sync, _ = _messages(plan, sizes, ranks, network, compute)
    return compute.seconds + slowed + sync


def message_terms(
    plan: MessagePlan, sizes: Sequence[int], ranks: int, *, network: Network
) -> Terms:
    """Return what the messages of a period take, hidden behind backward or not."""
    operations = plan.operations(sizes, ranks) if ranks > 1 else []
    return sum((operation_terms(operation, ranks, network) for operation in operations), Terms())


def _messages(
    plan: MessagePlan, sizes: Sequence[int], ranks: int, network: Network, compute: StepCompute
) -> tuple[float, float, Terms]:
    """Seconds by which messages slow backward, seconds left after it, and all of them by what they are spent on."""
    if ranks == 1:
        return 0.0, 0.0, Terms()
    operations = plan.operations(sizes, ranks)
    costs = [operation_terms(operation, ranks, network) for operation in operations]
    slowed, left = exposed_seconds(
        [
            (
                None
                if operation.ready_bytes is None
                else compute.ready_seconds(operation.ready_bytes),
                cost.seconds,
            )
            for operation, cost in zip(operations, costs, strict=True)
        ],
        compute.backward_seconds,
        network.overlap_cost,
    )
    return slowed / plan.period, left / plan.period, sum(costs, Terms())


def _bytes_sent(plan: MessagePlan, sizes: Sequence[int], ranks: int) -> tuple[float, float]:
    def sent(rank: int) -> float:
        return float(plan.bytes_sent(sizes, rank, ranks)) / plan.period

    if ranks == 1:
        return 0.0, 0.0
    some = sorted(
        {1 + (ranks - 2) * index // max(1, _SAMPLED_RANKS - 1) for index in range(_SAMPLED_RANKS)}
    )
    return sent(0), math.fsum(map(sent, some)) / len(some)
