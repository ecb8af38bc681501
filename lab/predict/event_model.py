"""The time of a training step, predicted from a strategy's message plan.

Read downward: ``stages_of`` holds the closed formulas of the collectives, ``operation_terms`` turns
them into seconds (alpha-beta-gamma model), ``with_waits`` lets computing wait for messages,
``exposed_seconds`` lets them overlap with backward and with the next forward, and ``predict_step``
adds up the step. Imports no torch, so that a table for 100,000 nodes takes a moment. The formulas
are those of the algorithms that Gloo uses (Thakur, Rabenseifner, Gropp: Optimization of Collective
Communication Operations in MPICH, 2005).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta

from common.sync.message_cost import Operation
from common.sync.plans.base import MessagePlan, NoSyncPlan
from common.utils.typed_json import Share, Text
from lab.predict.compute_model import StepCompute, Wait

# Bytes on a link for each byte of payload: TCP, IP and Ethernet headers (measured on shaped links).
HEADERS = 1.06

# What a message adds on the link, however small: the headers of TCP and IP, Ethernet's frame and
# gap. ``HEADERS`` counts them for long messages; this counts the many short messages of a root,
# which pass its link one after the other.
PACKET_BYTES = 90

LARGEST_NODES = 100_000
NEAR_ZERO = 1e-12  # what stands for 0 where a formula divides by it
SAMPLED_RANKS = 32


MessageSeconds = Annotated[float, Meta(ge=0, le=1e3)]
ByteSeconds = Annotated[float, Meta(ge=0, le=1)]

# Seconds of operations by what they are spent on, as shown to readers; the parts do not overlap.
Terms = dict[str, float]
TERMS = ("latency", "bandwidth", "root's link", "summation", "compression")


# Values of the formulas below: a number, or an array with one entry for each draw of a prior.
def larger(first: Any, second: Any) -> Any:
    """Return the larger one of two numbers, or of each pair of draws."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.maximum(first, second)
    return max(first, second)


def smaller(first: Any, second: Any) -> Any:
    """Return the smaller one of two numbers, or of each pair of draws."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.minimum(first, second)
    return min(first, second)


def shorter(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the alphas and bytes' seconds whose sum is smaller, for each draw."""
    negative = longer((-first[0], -first[1]), (-second[0], -second[1]))
    return -negative[0], -negative[1]


def longer(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the alphas and bytes' seconds whose sum is larger, for each draw."""
    is_longer = second[0] + second[1] > first[0] + first[1]
    if isinstance(is_longer, bool):
        return second if is_longer else first
    return np.where(is_longer, second[0], first[0]), np.where(is_longer, second[1], first[1])


@dataclass(frozen=True)
class Rate:
    """The cost of one kind of operation: seconds per message, and per byte on the busiest link.

    An operation never takes less than ``floor_seconds``: where ranks share cores, waking them all
    takes longer than a small message does. ``start_seconds`` are of an operation, however many
    messages it has.
    """

    alpha_seconds: MessageSeconds
    beta_seconds_per_byte: ByteSeconds
    floor_seconds: MessageSeconds = 0.0
    start_seconds: MessageSeconds = 0.0

    def at_least(self, beta_seconds_per_byte: float) -> "Rate":
        """Return this rate on links where a byte takes so long, if that is longer."""
        beta = larger(beta_seconds_per_byte, self.beta_seconds_per_byte)
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
    tree_share : share of a ring's rate at which all_reduce sends along a tree (NCCL), if that is
        faster than the ring. 0: rings alone (Gloo).
    compress_seconds : of a byte of gradients, by how it is compressed (``Operation.compressor``).
    """

    alpha_seconds: MessageSeconds
    beta_seconds_per_byte: ByteSeconds
    gamma_seconds_per_byte: ByteSeconds = 0.0
    copy_seconds_per_byte: ByteSeconds = 0.0
    kinds: Mapping[Text, Rate] = field(default_factory=dict)
    overlap_cost: Share = 0.0
    tree_share: Share = 0.0
    compress_seconds: Mapping[Text, ByteSeconds] = field(default_factory=dict)

    @property
    def ranks_per_node(self) -> int:
        """How many ranks share each link."""
        return 1

    @property
    def inside(self) -> "Network":
        """What messages between two ranks of a node cost, if several share a link."""
        return self

    @cached_property
    def has_trees(self) -> bool:
        """Whether all_reduce may send along a tree."""
        return bool(np.any(self.tree_share))

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

    def over(
        self,
        *,
        rate_bits: float | None,
        latency_seconds: float | None,
        ranks_per_node: int = 1,
        inside: "Network | None" = None,
    ) -> "Network":
        """Return this network with other links; None keeps the measured value.

        rate_bits : bits per second on a node's link, ``HEADERS`` included. latency_seconds : per
        message. ranks_per_node : ranks that share a link; ``inside`` is what they send each other.
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
            software = self.with_latency_up_to(0.0)
        return OtherLinks(
            default.alpha_seconds,
            default.beta_seconds_per_byte,
            self.gamma_seconds_per_byte,
            self.copy_seconds_per_byte,
            kinds,
            self.overlap_cost,
            compress_seconds=self.compress_seconds,
            software=software,
            shared_by=ranks_per_node,
            within=inside or software,
        )

    def with_latency_up_to(self, most: float) -> "Network":
        """Return this network with an alpha of at most so many seconds."""
        kinds = {
            kind: replace(rate, alpha_seconds=smaller(most, rate.alpha_seconds))
            for kind, rate in self.kinds.items()
        }
        return replace(self, alpha_seconds=smaller(most, self.alpha_seconds), kinds=kinds)

    def delay_share(self, operation: Operation, ranks: int) -> float:
        """Return the fraction of a message's time by which it delays a concurrent backward."""
        return self.overlap_cost


@dataclass(frozen=True, kw_only=True)
class NodeLinks(Network):
    """Links of nodes with several ranks.

    shared_by : ranks that share a link. within : what messages between two of these cost.
    """

    shared_by: int
    within: Network

    @property
    def ranks_per_node(self) -> int:
        """How many ranks share each link."""
        return self.shared_by

    @property
    def inside(self) -> Network:
        """What messages between two ranks of a node cost."""
        return self.within


@dataclass(frozen=True, kw_only=True)
class OtherLinks(NodeLinks):
    """Links that the same ``software`` uses: what they take longer than it, a message waits."""

    software: Network

    def delay_share(self, operation: Operation, ranks: int) -> float:
        """Return the fraction of a message's time by which it delays a concurrent backward."""
        seconds = sum(operation_terms(operation, ranks, self).values())
        busy = sum(operation_terms(operation, ranks, self.software).values())
        return self.overlap_cost * busy / larger(seconds, NEAR_ZERO)


class Stage(NamedTuple):
    """A stage of an operation: its longest chain of messages, and those that share a link.

    Parameters
    ----------
    share : of the operation's bytes in each message.
    between, inside : messages of the chain, each waiting for the one before, that go to another
        node, and that stay inside one.
    on_link : messages on the busiest node's link, in one direction.
    on_rank : messages between the busiest rank and the others of its node, in one direction.
    header_bytes : of each message on a link but the first.
    """

    share: float
    between: int
    inside: int
    on_link: int
    on_rank: int
    header_bytes: int = 0

    def link_bytes(self, nbytes: float) -> float:
        """Return the bytes on the busiest node's link, of an operation of ``nbytes``."""
        return self.on_link * self.share * nbytes + max(0, self.on_link - 1) * self.header_bytes

    def seconds(self, nbytes: float, between: Rate, inside: Rate) -> tuple[float, float]:
        """Return the alphas and the bytes' seconds of the chain, or of a busy link or rank.

        between, inside : rates of messages between nodes and inside one.
        """
        on_link = self.link_bytes(nbytes) * between.beta_seconds_per_byte
        alphas = self.between * between.alpha_seconds
        if not self.on_rank:  # all messages of the chain pass the busiest link
            return alphas, on_link
        alphas = alphas + self.inside * inside.alpha_seconds
        in_a_row = self.between * between.beta_seconds_per_byte
        in_a_row = in_a_row + self.inside * inside.beta_seconds_per_byte
        chain = (alphas, in_a_row * self.share * nbytes)
        # The first message takes its latency, and the others are on their way meanwhile.
        if self.between:
            chain = longer(chain, (between.alpha_seconds, on_link))
        at_rank = self.on_rank * self.share * nbytes * inside.beta_seconds_per_byte
        return longer(chain, (inside.alpha_seconds, at_rank))


@lru_cache(maxsize=1 << 16)
def stages_of(kind: str, ranks: int, ranks_per_node: int = 1) -> tuple[Stage, ...]:
    """Return the stages of a collective of N ranks in order, K of them on each node.

    A ring crosses each node's link once in each direction. A root's link carries what it exchanges
    with the ranks on other nodes.
    """
    if kind == "all_reduce":  # reduce-scatter, then all-gather
        return (_ring(2 * (ranks - 1), 1 / ranks, ranks, ranks_per_node),)
    if kind == "reduce_scatter":  # the first half of all_reduce's ring
        return (_ring(ranks - 1, 1 / ranks, ranks, ranks_per_node),)
    if kind == "all_gather":
        return (_ring(ranks - 1, 1.0, ranks, ranks_per_node),)
    if kind == "broadcast":
        return (_tree(ranks, ranks_per_node),)
    elsewhere = max(0, ranks - ranks_per_node)
    beside = min(ranks, ranks_per_node) - 1
    to_root = Stage(1.0, min(1, elsewhere), min(1, beside), elsewhere, beside)
    if elsewhere:
        to_root = to_root._replace(inside=0)
    if kind == "reduce":  # reduce-scatter, then the parts go to the root
        ring = _ring(ranks - 1, 1 / ranks, ranks, ranks_per_node)
        return (ring, to_root._replace(share=1 / ranks))
    assert kind in ("gather", "scatter"), kind  # every rank straight to the root, or back
    return (to_root._replace(header_bytes=PACKET_BYTES),)


def _ring(hops: int, share: float, ranks: int, ranks_per_node: int) -> Stage:
    """Return the stage in which each message goes on to the next rank ``hops`` times."""
    nodes = -(-ranks // ranks_per_node)
    between = 0
    if nodes > 1:
        between = -(-hops * nodes // ranks)  # a turn of N hops crosses each node's link
    return Stage(
        share,
        between,
        hops - between,
        hops if nodes > 1 else 0,
        hops if ranks_per_node > 1 else 0,
    )


def _tree(ranks: int, ranks_per_node: int) -> Stage:
    """Return the stage of a binomial tree: in each round, ranks send to one that is as far away."""
    crossing = 0
    beside = 0
    rounds = (ranks - 1).bit_length()
    for level in range(rounds):
        distance = 1 << level
        senders = range(0, min(ranks - distance, 2 * distance * ranks_per_node), 2 * distance)
        crossing += any(s % ranks_per_node + distance >= ranks_per_node for s in senders)
        beside += distance < ranks_per_node
    return Stage(1.0, crossing, rounds - crossing, crossing, beside)


def _double_tree(
    nbytes: float, ranks: int, ranks_per_node: int, network: Network
) -> tuple[Any, Any]:
    """Return alphas and bytes' seconds of NCCL's double binary tree over nodes.

    Two trees carry half of the bytes each, up and down again; inside a node its ranks are a chain.
    Chunks follow each other, so a message waits for the depth once (Sanders, Speck, Traeff:
    Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009).
    """
    between = network.rate("all_reduce")
    nodes = -(-ranks // ranks_per_node)
    depth = (nodes - 1).bit_length()
    alphas = 2 * depth * between.alpha_seconds
    link_bytes = 2 * (nodes - 1) / nodes * nbytes
    seconds = link_bytes * between.beta_seconds_per_byte / network.tree_share
    if ranks_per_node == 1:
        return alphas, seconds
    inside = network.inside.rate("all_reduce")
    alphas = alphas + 2 * (ranks_per_node - 1) * inside.alpha_seconds
    return alphas, larger(seconds, 2 * nbytes * inside.beta_seconds_per_byte)


_BETWEEN_NODES = Stage(1.0, 1, 0, 1, 0)  # an exchange of ranks with a link each


def exchange_stage(operation: Operation, ranks: int, ranks_per_node: int) -> Stage:
    """Return the stage of an exchange; see ``Operation.partner``.

    A few nodes stand for all, since each does the same but perhaps the first and the last ones.
    """
    if ranks_per_node == 1:
        return _BETWEEN_NODES
    nodes = -(-ranks // ranks_per_node)
    partner_of = operation.partner or (lambda rank: (rank + 1) % ranks)
    leaving = 0
    staying = 0
    for node in {0, nodes // 2, max(0, nodes - 2), nodes - 1}:
        own = range(node * ranks_per_node, min(ranks, (node + 1) * ranks_per_node))
        partners = [partner for rank in own if (partner := partner_of(rank)) is not None]
        inside = sum(partner in own for partner in partners)
        leaving = max(leaving, len(partners) - inside)
        staying = max(staying, min(1, inside))
    if leaving:
        return Stage(1.0, 1, 0, leaving, staying)
    return Stage(1.0, 0, 1, 0, staying)


def loads(kind: str, nbytes: float, ranks: int) -> tuple[int, float, float]:
    """Return an operation's messages in a row, bytes on the busiest link, and bytes summed.

    Of N ranks with a link each, and a tensor of M bytes.
    """
    stages = (_BETWEEN_NODES,) if kind == "exchange" else stages_of(kind, ranks)
    messages = sum(stage.between for stage in stages)
    link_bytes = sum(stage.link_bytes(nbytes) for stage in stages)
    return messages, link_bytes, _summed_bytes(kind, nbytes, ranks)


def _summed_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank of a ring adds to others."""
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        return (ranks - 1) / ranks * nbytes
    return 0.0


def operation_terms(operation: Operation, ranks: int, network: Network) -> Terms:
    """Return the time of ``operation.count`` operations; time added by the floor is latency.

    One operation takes its stages, at least the floor, + summed x gamma + copied x the cost of a
    copy + compressed x that of compressing. A stage takes (messages x alpha + bytes x beta) of its
    longest chain of messages, or of its busiest link if that takes longer.
    """
    ranks_per_node = network.ranks_per_node
    if operation.among == "node":
        ranks = min(ranks, ranks_per_node)
    elif operation.among == "leaders":
        ranks = -(-ranks // ranks_per_node)
        ranks_per_node = 1
    if operation.kind == "exchange":
        stages: tuple[Stage, ...] = (exchange_stage(operation, ranks, ranks_per_node),)
    else:
        stages = stages_of(operation.kind, ranks, ranks_per_node)
    between = network.rate(operation.kind)
    inside = between
    whole = between  # the rate of the operation as a whole
    if ranks_per_node > 1:
        inside = network.inside.rate(operation.kind)
        whole = between if ranks > ranks_per_node else inside
    alphas: Any = 0.0
    passing: Any = 0.0
    for stage in stages:
        of_stage, seconds = stage.seconds(operation.nbytes, between, inside)
        alphas = alphas + of_stage
        passing = passing + seconds
    if operation.kind == "all_reduce" and ranks > ranks_per_node and network.has_trees:
        tree = _double_tree(operation.nbytes, ranks, ranks_per_node, network)
        alphas, passing = shorter((alphas, passing), tree)
    latency = whole.start_seconds + alphas
    added = _summed_bytes(operation.kind, operation.nbytes, ranks) + operation.summed_bytes
    adding = added * network.gamma_seconds_per_byte
    copying = operation.copied_bytes * network.copy_seconds_per_byte
    of_a_byte = network.compress_seconds.get(operation.compressor, 0.0)
    count = operation.count
    # Through a root, the bytes of all ranks share one link: more ranks make it slower, so it is a
    # term of its own.
    by_root = operation.kind in ("gather", "scatter")
    return {
        "latency": count * larger(latency, whole.floor_seconds - passing),
        "bandwidth": 0.0 if by_root else count * passing,
        "root's link": count * passing if by_root else 0.0,
        "summation": count * (adding + copying),
        "compression": count * operation.compressed_bytes * of_a_byte,
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
    compute = _waiting_with(plan, compute)
    alone, slowed, sync = _busy_and_exposed(plan, sizes, ranks, network, compute)
    busy = alone + slowed
    root, others = _bytes_sent(plan, sizes, ranks)
    if compute.waits_for is not None:
        root_waits, others_wait = _bytes_sent(compute.waits_for, sizes, ranks)
        root += compute.passes * root_waits
        others += compute.passes * others_wait
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
    return sum(_busy_and_exposed(plan, sizes, ranks, network, _waiting_with(plan, compute)))


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
    known: dict[Operation, Terms] = {}  # many gradients have the same size
    costs = []
    for operation in plan.operations(sizes, ranks):
        terms = known.get(operation)
        if terms is None or operation.partner is not None:  # partners are not compared
            terms = operation_terms(operation, ranks, network)
            known[operation] = terms
        costs.append((operation, terms))
    return costs


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
    saved = plan.update_share(min(ranks, compute.update_ranks)) - plan.update_share(ranks)
    computed = compute.seconds - saved * compute.update_seconds
    # A strategy that sends in every eighth step only (local SGD) costs an eighth of that.
    slowed = slowed_forward / plan.period + slowed_backward / plan.period
    exposed = before_forward / plan.period + after_backward / plan.period + compute.wait_seconds
    return computed, slowed, exposed


def _waiting_with(plan: MessagePlan, compute: StepCompute) -> StepCompute:
    """Return the step of a strategy. If it sends nothing, ranks train their own models alone."""
    if isinstance(plan, NoSyncPlan):
        return replace(
            compute.alone or compute, waits_for=None, forward_waits=(), backward_waits=()
        )
    return compute


class _Message(NamedTuple):
    """A message beside computing: see ``exposed_seconds``."""

    ready: float | None
    seconds: float
    delay_share: float


def _beside_backward(
    costs: Sequence[tuple[Operation, Terms]], ranks: int, network: Network, compute: StepCompute
) -> list[_Message]:
    """Return the messages that gradients make, each from the moment when backward has made them.

    All that begin after backward are one message: nothing goes on beside them.
    """
    messages = []
    after_backward: Any = 0.0
    for operation, cost in costs:
        if operation.needed_bytes is not None:
            continue
        seconds = sum(cost.values())
        if operation.ready_bytes is None:
            after_backward = after_backward + seconds
            continue
        ready = compute.ready_seconds(operation.ready_bytes)
        messages.append(_Message(ready, seconds, network.delay_share(operation, ranks)))
    return [*messages, _Message(None, after_backward, 0.0)]


def _beside_forward(
    costs: Sequence[tuple[Operation, Terms]], ranks: int, network: Network, compute: StepCompute
) -> list[_Message]:
    """Return the messages that forward waits for, in the mirror: from the end of forward."""
    gathers = [(operation, cost) for operation, cost in costs if operation.needed_bytes is not None]
    if not gathers:
        return []
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
    spread = {1 + (ranks - 2) * index // (SAMPLED_RANKS - 1) for index in range(SAMPLED_RANKS)}
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
    slowed = 0.0
    for ready, seconds, delay_share in messages:
        # r_k: with no message under way, backward computes at full speed until this one's gradients
        # are ready.
        begins = backward_seconds if ready is None else ready
        wait = larger(0.0, begins - computed)
        computed = computed + wait
        speed = larger(1 - delay_share, NEAR_ZERO)
        beside = smaller(seconds, (backward_seconds - computed) / speed)
        slowed = slowed + delay_share * beside
        computed = computed + speed * beside
        now = now + wait + seconds
    return slowed, larger(0.0, now - (backward_seconds + slowed))


def ends_in_pairs(seconds: Sequence[float]) -> list[float]:
    """Return when each message ends if all are started at once, none before the one before it.

    Gloo has two threads. Two messages at a time share the link, so the first one of several takes
    up to twice its own ``seconds``. The last one's end is the same as one after the other.
    """
    if any(isinstance(value, np.ndarray) for value in seconds):
        in_each_draw = np.broadcast_arrays(*seconds)
        draws = zip(*(values.tolist() for values in in_each_draw), strict=True)
        return list(np.array([ends_in_pairs(draw) for draw in draws]).T)
    ends = [0.0] * len(seconds)
    now = 0.0
    left = 0.0  # seconds of the message under way, if alone on the link
    under_way = 0
    for index, alone in enumerate(seconds):
        if alone < left:
            now += 2 * alone
            ends[index] = now
            left -= alone
            continue
        now += 2 * left
        ends[under_way] = now
        left = alone - left
        under_way = index
    if seconds:
        ends[under_way] = now + left
    return list(accumulate(ends, max))  # a short message waits for the longer one before it
