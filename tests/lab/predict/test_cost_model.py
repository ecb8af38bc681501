"""The cost model: closed formulas against a simulation by message, the event model by hand."""

import math
import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from common.sync.message_cost import KINDS, Operation, sends_of
from common.sync.node_layout import NodeLayout
from common.sync.plans.base import MessagePlan, NoSyncPlan
from common.sync.plans.batchnorm import BatchNormLayer, SyncBatchNormPlan
from common.sync.plans.links import link_bytes
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.compute_model import (
    ComputeModel,
    ComputeProfile,
    StepCompute,
    local_samples,
    times,
)
from lab.predict.event_model import (
    HEADERS,
    PACKET_BYTES,
    Network,
    Rate,
    ends_in_pairs,
    exposed_seconds,
    loads,
    message_terms,
    operation_terms,
    predict_step,
    stages_of,
    with_waits,
)
from lab.predict.tables import message_plans

ALPHA, BETA, GAMMA = 3e-4, 8e-9, 2e-10
NETWORK = Network(ALPHA, BETA, GAMMA)
ALPHA_INSIDE, BETA_INSIDE = 3e-5, 1e-9  # between two ranks of a node
VGG11 = load_calibration(reference_path()).gradient_sizes
NO_COMPUTE = StepCompute(0.0, 0.0, 0.0)


def shared_links(ranks_per_node, *, network=NETWORK, inside=None):
    """Return links of ``network`` that so many ranks share."""
    inside = inside or Network(ALPHA_INSIDE, BETA_INSIDE)
    return network.over(
        rate_bits=None, latency_seconds=None, ranks_per_node=ranks_per_node, inside=inside
    )


def predicted(name, ranks, *, network=NETWORK, compute=NO_COMPUTE, options=None):
    plan = message_plans([name], options)[name]
    return predict_step(plan, VGG11, ranks, network=network, compute=compute)


def simulate(messages, ranks_per_node=1):
    """Return the seconds until the last of ``messages`` arrives.

    A message is (sender, receiver, bytes, index that must have arrived before, bytes summed on
    arrival). A node's link carries one message at a time in each direction, in this order, and so
    does each rank inside its node; alpha does not occupy them.
    """
    arrived, sending, receiving = [], {}, {}
    for sender, receiver, nbytes, after, summed in messages:
        alpha, beta, source, target = ALPHA_INSIDE, BETA_INSIDE, sender, receiver
        if sender // ranks_per_node != receiver // ranks_per_node:
            alpha, beta = ALPHA, BETA
            source, target = (
                f"node {sender // ranks_per_node}",
                f"node {receiver // ranks_per_node}",
            )
        ready = 0.0 if after is None else arrived[after]
        begin = max(sending.get(source, 0.0), receiving.get(target, 0.0), ready)
        sending[source] = receiving[target] = begin + nbytes * beta
        arrived.append(begin + nbytes * beta + alpha + summed * GAMMA)
    return max(arrived)


def ring_rounds(ranks, rounds, nbytes, summing_rounds):
    messages = []
    for turn in range(rounds):
        before, summed = len(messages) - ranks, nbytes if turn < summing_rounds else 0
        for rank in range(ranks):
            after = before + (rank - 1) % ranks if turn else None
            messages.append((rank, (rank + 1) % ranks, nbytes, after, summed))
    return messages


def binomial(ranks, nbytes):
    messages, got = [], {0: None}
    distance = 1 << (ranks - 1).bit_length()
    while distance := distance // 2:
        for rank in sorted(got):
            if rank % (2 * distance) == 0 and rank + distance < ranks:
                messages.append((rank, rank + distance, nbytes, got[rank], 0))
                got[rank + distance] = len(messages) - 1
    return messages


def messages_of(kind, ranks, nbytes):
    part, others = nbytes / ranks, range(1, ranks)
    reduce_scatter = ring_rounds(ranks, ranks - 1, part, ranks - 1)
    last = len(reduce_scatter) - ranks
    with_headers = [nbytes + (PACKET_BYTES if rank > 1 else 0) for rank in others]
    return {
        "all_reduce": ring_rounds(ranks, 2 * (ranks - 1), part, ranks - 1),
        "reduce": reduce_scatter
        + [(rank, 0, part, last + (rank - 1) % ranks, 0) for rank in others],
        "all_gather": ring_rounds(ranks, ranks - 1, nbytes, 0),
        "reduce_scatter": reduce_scatter,
        "broadcast": binomial(ranks, nbytes),
        "gather": [(rank, 0, with_headers[rank - 1], None, 0) for rank in others],
        "scatter": [(0, rank, with_headers[rank - 1], None, 0) for rank in others],
        "exchange": ring_rounds(ranks, 1, nbytes, 0),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [*range(2, 10), 33, 64])
def test_formulas_equal_a_simulation_of_the_messages(kind, ranks):
    for nbytes in (40, 1_000_000, 36_924_456):
        formula = sum(operation_terms(Operation(kind, nbytes), ranks, NETWORK).values())
        simulated = simulate(messages_of(kind, ranks, nbytes))
        if kind == "broadcast" and ranks & (ranks - 1):
            # some ranks are closer to the root than others
            assert formula - 2 * ALPHA <= simulated <= formula + 1e-12
        else:
            assert formula == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "exchange"])
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node"), [(4, 2), (8, 2), (8, 4), (16, 4), (64, 8), (5, 2), (9, 4), (33, 3)]
)
def test_formulas_for_several_ranks_on_a_node_equal_a_simulation(kind, ranks, ranks_per_node):
    """Long messages keep the links busy, short ones wait for each other's latency."""
    for nbytes in (40, 8_200, 1_000_000, 36_924_456):
        operation = Operation(kind, nbytes)
        terms = operation_terms(operation, ranks, shared_links(ranks_per_node))
        ratio = sum(terms.values()) / simulate(messages_of(kind, ranks, nbytes), ranks_per_node)
        # where nodes cut a tree anywhere, or the last one is smaller, some chains are shorter
        most = 1.06
        if kind in ("broadcast", "reduce") and ranks & (ranks - 1):
            most = 2.0
        assert 0.94 < ratio < most, nbytes


LAYOUTS = [(4, 2), (8, 2), (8, 4), (16, 4), (5, 2), (7, 3)]


@pytest.mark.parametrize(("ranks", "ranks_per_node"), LAYOUTS)
def test_the_busiest_links_bytes_are_those_of_who_sends_to_whom(ranks, ranks_per_node):
    layout = NodeLayout.even(ranks, ranks_per_node)
    nbytes = 8 * math.lcm(*range(1, 17))
    for kind in ("all_reduce", "reduce", "gather", "scatter", "all_gather", "reduce_scatter"):
        passed = Counter()
        for rank in range(ranks):
            for receivers, each in sends_of(kind, nbytes, rank=rank, ranks=ranks):
                for receiver in receivers:
                    if layout.node_of(receiver) != layout.node_of(rank):
                        passed["from", layout.node_of(rank)] += each
                        passed["to", layout.node_of(receiver)] += each
        stages = stages_of(kind, ranks, ranks_per_node)
        planned = sum(stage._replace(header_bytes=0).link_bytes(nbytes) for stage in stages)
        assert planned == pytest.approx(max(passed.values())), kind


# Payloads on the busiest link in both passes, for nodes of two ranks, then for nodes of four.
ON_THE_LINK = {
    "ring": lambda n: (2 * (n - 1) / n, 2 * (n - 1) / n),
    "all_reduce_flat": lambda n: (2 * (n - 1) / n, 2 * (n - 1) / n),
    "ddp": lambda n: (2 * (n - 1) / n, 2 * (n - 1) / n),
    # the sums of all ranks of other nodes to the root, and back
    "gather_scatter_flat": lambda n: (2 * (n - 2), 2 * (n - 4)),
    "tree": lambda n: (2 * math.log2(n / 2), 2 * math.log2(n / 4)),
    # the ranks of a node exchange with as many others: halves, quarters, ... until they meet inside
    "halving_doubling": lambda n: (4 * (1 - 2 / n), 8 * (1 - 4 / n)),
    "hierarchical": lambda n: (2 * (n / 2 - 1) / (n / 2), 2 * (n / 4 - 1) / (n / 4)),
}


@pytest.mark.parametrize("name", ON_THE_LINK)
def test_bytes_on_a_shared_link_by_hand_and_by_the_plan(name):
    for ranks in (8, 16, 64):
        for ranks_per_node, payloads in zip((2, 4), ON_THE_LINK[name](ranks), strict=True):
            plan = message_plans([name], {"ranks_per_node": ranks_per_node})[name]
            links = shared_links(ranks_per_node, network=Network(0, 1), inside=Network(0, 0))
            terms = message_terms(plan, VGG11, ranks, network=links)
            on_link = terms["bandwidth"] + terms["root's link"]
            assert on_link == pytest.approx(payloads * PAYLOAD, rel=1e-3)
            sent, received = zip(
                *link_bytes(plan, VGG11, NodeLayout.even(ranks, ranks_per_node)), strict=True
            )
            if name in ("tree", "gather_scatter_flat"):  # first all one way, then all the other
                assert float(max(sent) + max(received)) == pytest.approx(on_link, rel=1e-3)
            else:
                assert float(max(*sent, *received)) == pytest.approx(on_link, rel=1e-3)


def test_hierarchical_sends_within_nodes_at_their_own_rate():
    """On two nodes of four ranks: a reduce and a broadcast inside, an all_reduce of two."""
    plan = message_plans(["hierarchical"], {"ranks_per_node": 4})["hierarchical"]
    links = shared_links(4, network=Network(7.0, 0), inside=Network(1.0, 0))
    assert message_terms(plan, VGG11, 8, network=links)["latency"] == 4 * 1.0 + 2 * 7.0 + 2 * 1.0
    links = shared_links(4, network=Network(0, 5.0), inside=Network(0, 1.0))
    bandwidth = message_terms(plan, VGG11, 8, network=links)["bandwidth"]
    assert bandwidth == pytest.approx((2 * 3 / 4 + 5.0 + 2) * PAYLOAD)
    # all ranks on one node: nothing passes the link
    inside = message_terms(plan, VGG11, 4, network=shared_links(4, network=Network(1e3, 1e3)))
    assert inside["latency"] == pytest.approx((4 + 2) * ALPHA_INSIDE)


def test_a_short_ring_crosses_the_link_with_every_kth_message():
    terms = operation_terms(Operation("all_reduce", 8), 8, shared_links(2))
    assert terms["latency"] == pytest.approx(7 * ALPHA + 7 * ALPHA_INSIDE)
    measured = shared_links(2, network=Network(ALPHA, BETA, kinds={"all_reduce": Rate(0, 0, 0.01)}))
    assert sum(operation_terms(Operation("all_reduce", 8), 8, measured).values()) == 0.01


def test_counts_sums_and_copies_add_up():
    network = Network(1.0, 0.25, 0.5, 0.125)
    network = replace(network, compress_seconds={"cast": 0.0625})
    sent = Operation("exchange", 8, count=3, summed_bytes=4, copied_bytes=16)
    one = operation_terms(sent, 5, network)
    assert [*one.values()] == [3.0, 6.0, 0.0, 12.0, 0.0]
    cast = msgspec.structs.replace(sent, compressor="cast", compressed_bytes=32)
    assert operation_terms(cast, 5, network) == one | {"compression": 6.0}
    gathered = operation_terms(Operation("gather", 8), 5, network)
    assert gathered["root's link"] == 8.0 + 3 * PACKET_BYTES * 0.25
    assert loads("all_reduce", 10, 1) == (0, 0.0, 0.0)


def test_an_operation_takes_no_less_than_its_floor_and_nothing_more():
    """max(alpha1, ideal + alpha0): the floor adds latency and does not affect large messages."""
    network = Network(ALPHA, BETA, kinds={"all_reduce": Rate(ALPHA, BETA, 0.02)})
    small, large = (
        operation_terms(Operation("all_reduce", nbytes, count=3), 4, network)
        for nbytes in (1_000, 8_000_000)
    )
    assert sum(small.values()) == pytest.approx(3 * 0.02)
    assert small["bandwidth"] == pytest.approx(3 * 1.5 * 1_000 * BETA)
    assert sum(large.values()) == pytest.approx(3 * (6 * ALPHA + 1.5 * 8_000_000 * BETA))
    slower = network.over(rate_bits=1e8, latency_seconds=None)
    assert slower.rate("all_reduce").floor_seconds == 0.02


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("gather_scatter", 1.77),
        ("gather_scatter_flat", 1.77),
        ("all_reduce", 0.443),
        ("ring", 0.443),
    ],
)
def test_four_nodes_at_one_gigabit(name, seconds):
    step = predicted(name, 4, network=Network(0.0, 8 / 1e9)).step_seconds
    assert step == pytest.approx(seconds, abs=0.005)


# K: bytes of 1 % of the entries
TENSORS, PAYLOAD, K = len(VGG11), sum(VGG11), 4 * -(-sum(VGG11) // 400)

SHARDED_BUCKETS = (9_463_848, 9_443_328, 9_443_328, 4_724_736, 2_362_368, 1_182_720, 304_128)


def padded(sizes, ranks):
    """Return the sum of these bytes, each padded to equal parts of whole 4-byte entries."""
    return sum(4 * ranks * -(-size // (4 * ranks)) for size in sizes)


def ring(n, nbytes, messages=1):
    return 2 * (n - 1) * messages, 2 * (n - 1) / n * nbytes


# From docs/strategies.md, for n ranks: messages in sequence, and payload bytes on the busiest link.
CLOSED_FORMS = {
    "gather_scatter": lambda n: (
        2 * TENSORS,
        2 * (n - 1) * PAYLOAD + 2 * TENSORS * (n - 2) * PACKET_BYTES,
    ),
    "gather_scatter_flat": lambda n: (2, 2 * (n - 1) * PAYLOAD + 2 * (n - 2) * PACKET_BYTES),
    "reduce_broadcast": lambda n: ((n + 17) * TENSORS, (2 * (n - 1) / n + 17) * PAYLOAD),
    "all_reduce": lambda n: ring(n, PAYLOAD, TENSORS),
    "all_reduce_flat": lambda n: ring(n, PAYLOAD),
    "tree": lambda n: (2 * 17, 2 * 17 * PAYLOAD),
    "ring": lambda n: ring(n, PAYLOAD),
    # 100,000 is no power of two: two more messages, each of all bytes
    "halving_doubling": lambda n: (2 * 16 + 2, (2 + 2) * PAYLOAD),
    "sharded": lambda n: ring(n, padded(SHARDED_BUCKETS, n), 7),
    "overlapped": lambda n: ring(n, PAYLOAD, 3),
    "ddp": lambda n: ring(n, PAYLOAD, 3),
    "ddp_fp16": lambda n: ring(n, PAYLOAD / 2, 3),
    "topk": lambda n: (2 * (n - 1), 2 * (n - 1) * K),
    "local_sgd": lambda n: ring(n, PAYLOAD),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_formulas_hold_at_100_000_nodes(name):
    """Each cost depends on the number of nodes as it should; 4 nodes would not show this."""
    strategy, (messages, link_bytes) = message_plans([name])[name], CLOSED_FORMS[name](100_000)
    terms = message_terms(strategy, VGG11, 100_000, network=Network(1.0, 1.0))
    assert terms["latency"] == pytest.approx(messages)
    # a ring's chunks are whole entries
    assert terms["bandwidth"] + terms["root's link"] == pytest.approx(link_bytes, rel=0.02)


# Backward takes 10 s. A case: messages as (ready, seconds), overlap cost, seconds beyond backward.
@pytest.mark.parametrize(
    ("messages", "cost", "expected"),
    [
        ([], 0.0, (0, 0)),
        ([(2, 3), (6, 3)], 0.0, (0, 0)),  # all hidden
        ([(None, 3), (None, 4)], 0.0, (0, 7)),  # nothing hidden
        ([(10, 3), (10, 4)], 0.0, (0, 7)),  # ready at the end: as above
        ([(9, 3), (10, 4)], 0.0, (0, 6)),  # the first bucket is late and delays the second
        ([(1, 20), (10, 1)], 0.0, (0, 12)),  # the first takes longer than backward
        ([(2, 3), (10, 1)], 1.0, (3, 1)),  # backward stops during the first message
        # half speed during the first message, full speed after it
        ([(2, 4), (10, 1)], 0.5, (2, 1)),
        # 2 s of work take 4 s; 2 s and 1 s of messages are left
        ([(8, 6), (None, 1)], 0.5, (2, 3)),
    ],
)
def test_event_model_by_hand(messages, cost, expected):
    delaying = [(*message, cost) for message in messages]
    assert exposed_seconds(delaying, 10.0) == pytest.approx(expected)


class Planned(MessagePlan):
    """Exchanges of these operations' keywords."""

    def __init__(self, *exchanges):
        self._operations = [Operation("exchange", nbytes, **when) for nbytes, when in exchanges]

    def operations(self, sizes, ranks):
        return self._operations

    def bytes_sent(self, sizes, rank, ranks):
        return sum(one.nbytes for one in self._operations)

    def update_share(self, ranks):
        return 1 / ranks


def test_buckets_wait_for_the_gradients_that_they_hold():
    plan = Planned((100, {"ready_bytes": 100}), (300, {"ready_bytes": 400}))
    compute = StepCompute(1.0, 4.0, 1.0, ready_bytes=(100, 400), ready_shares=(0.25, 1.0))
    one = predict_step(plan, [300, 100], 2, network=Network(0.0, 0.02), compute=compute)
    # the first bucket is hidden, from 1 s to 3 s of 4 s
    assert (one.compute_seconds, one.sync_seconds) == pytest.approx((5.5, 6.0))
    assert one.bytes_sent_root == 400


@pytest.mark.parametrize(
    ("overlap_cost", "expected"),
    [
        # Each byte takes 10 ms. The gathers of 5 s and 10 s share the link: they end after 10 s and
        # 15 s. Forward begins at 10 s, computes 2 s, and waits 3 s for the second one. Backward
        # hides the first exchange, and the second takes 3 s after it. The update takes 4 s / 2.
        (0.0, (10 + 20 + 2, 10 + 3 + 3)),
        # At half speed forward needs the second gather at 14 s, and waits for 1 s. The first
        # exchange delays backward by 1.5 s.
        (0.5, (10 + 2 + 20 + 1.5 + 2, 10 + 1 + 3)),
    ],
)
def test_forward_waits_for_the_gathers_that_the_last_step_began(overlap_cost, expected):
    # Three parameters of 100, 200 and 300 bytes; the last one is a bucket, the others are one.
    plan = Planned(
        (300, {"ready_bytes": 300}),
        (300, {"ready_bytes": 600}),
        (500, {"needed_bytes": 0}),
        (1000, {"needed_bytes": 300}),
    )
    network = Network(0.0, 0.01, overlap_cost=overlap_cost)
    compute = StepCompute(10.0, 20.0, 4.0, (300, 500, 600), (0.25, 0.75, 1.0), (0.2, 0.1, 0.0))
    step = predict_step(plan, [100, 200, 300], 2, network=network, compute=compute)
    assert (step.compute_seconds, step.sync_seconds) == pytest.approx(expected)
    assert step.step_seconds == pytest.approx(sum(expected))


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [
        ([], []),
        ([3], [3]),
        ([4, 6, 10], [8, 12, 20]),
        # The others end after 4, 8 and 14 s, but in order the first counts for them, too.
        ([10, 2, 2, 3], [17, 17, 17, 17]),
    ],
)
def test_two_messages_at_a_time_share_the_link(seconds, ends):
    assert ends_in_pairs(seconds) == pytest.approx(ends)


def batchnorm_step(**changes):
    """Return a step whose two layers wait a second each in forward, and two in backward.

    Each layer's first gradient is a weight of 60 bytes, its others are BatchNorm's of 20 each.
    """
    step = StepCompute(10.0, 20.0, 2.0, (20, 40, 100, 120, 140, 200), (0.1, 0.1, 0.4, 0.6, 0.6, 1))
    layers = [BatchNormLayer(1, 1), BatchNormLayer(1, 4)]
    kinds = {"all_reduce": Rate(0.0, 0.0, 1.0)}
    waiting = with_waits(
        step,
        SyncBatchNormPlan(layers=layers),
        LAYERED,
        2,
        network=Network(0.0, 0.0, kinds=kinds),
    )
    return replace(waiting, **changes)


LAYERED = [60, 20, 20, 60, 20, 20]


def test_what_follows_a_wait_comes_later():
    step = batchnorm_step()
    assert (step.forward_end, step.backward_end, step.wait_seconds) == (12.0, 22.0, 4.0)
    # Backward makes the last BatchNorm's gradients after 2 s, and sends them after a wait of 1 s.
    ready = [step.ready_seconds(nbytes) for nbytes in (20, 40, 100, 120, 140, 200)]
    assert ready == pytest.approx([3, 3, 9, 14, 14, 22])
    # Forward, the mirror image: the first weight at 0 s, BatchNorm after 4 s of computing.
    needed = [step.needed_seconds(nbytes) for nbytes in (0, 60, 100, 160)]
    assert needed == pytest.approx([0, 5, 7, 11])
    assert step.seconds == 32.0


def test_a_step_with_synchronised_batchnorm_by_hand():
    network = Network(0.0, 0.1)
    after = Planned((10, {}))  # 1 s after backward
    plain = predict_step(after, LAYERED, 2, network=network, compute=batchnorm_step(waits_for=None))
    assert (plain.compute_seconds, plain.sync_seconds) == pytest.approx((31.0, 1 + 4))
    both = predict_step(after, LAYERED, 2, network=network, compute=batchnorm_step())
    assert (both.step_seconds, both.batchnorm_seconds) == pytest.approx((36.0, 4.0))
    # of two ranks each sends M: twice 3 numbers of 8 bytes, and twice 2 of 4
    assert both.bytes_sent_root == plain.bytes_sent_root + 2 * 24 + 2 * 8
    # A bucket that is ready early goes on during the waits: 21 s from the third second.
    early = Planned((210, {"ready_bytes": 20}))
    hidden = predict_step(early, LAYERED, 2, network=network, compute=batchnorm_step())
    assert hidden.sync_seconds == pytest.approx(3 + 21 - 22 + 4)
    # Without any exchange each rank trains alone, and no layer waits.
    alone = predict_step(NoSyncPlan(), LAYERED, 2, network=network, compute=batchnorm_step())
    assert (alone.step_seconds, alone.batchnorm_seconds, alone.bytes_sent_root) == (32.0, 0.0, 0)


def test_three_micro_batches_compute_and_wait_three_times_and_send_once():
    """Messages overlap with the last backward and the first forward only, as with one pass."""
    network = Network(0.0, 0.1)
    plan = Planned((210, {"ready_bytes": 20}), (120, {"needed_bytes": 60}))  # 21 s and 12 s
    one, three = (
        predict_step(plan, LAYERED, 2, network=network, compute=batchnorm_step(passes=passes))
        for passes in (1, 3)
    )
    # by hand: 21 s from the third second of a backward of 22, 12 s before the 5th of forward
    assert one.sync_seconds == pytest.approx((3 + 21 - 22) + (12 - 5) + 4)
    assert (one.compute_seconds, one.batchnorm_seconds) == (31.0, 4.0)  # half of the update
    assert three.sync_seconds == pytest.approx((3 + 21 - 22) + (12 - 5) + 3 * 4)
    assert (three.compute_seconds, three.batchnorm_seconds) == (3 * 30.0 + 1.0, 12.0)
    waits = 2 * 24 + 2 * 8  # bytes of a pass, see above
    assert three.bytes_sent_root == one.bytes_sent_root + 2 * waits
    twice = times(batchnorm_step(passes=3), 2)
    assert twice.seconds == 2 * batchnorm_step(passes=3).seconds == 2 * 92.0


def test_a_stalled_forward_is_a_backward_seen_in_a_mirror():
    """Here forward is followed from its begin: during a gather it computes, or waits for it."""
    generator = random.Random(0)
    for _ in range(500):
        cost, forward = generator.choice([0.0, 0.3, 0.9]), 10.0
        needed = sorted(generator.choice([0.0, forward * generator.random()]) for _ in range(5))
        gathers = [(at, 4 * generator.random()) for at in needed[: generator.randrange(6)]]
        computed = 0.0
        for at, seconds in gathers:
            computed = min(at, computed + (1 - cost) * seconds)
        took = sum(seconds for _, seconds in gathers) + forward - computed
        mirrored = [(forward - at, seconds, cost) for at, seconds in reversed(gathers)]
        assert forward + sum(exposed_seconds(mirrored, forward)) == pytest.approx(took)


def test_without_times_of_forward_it_is_the_mirror_image_of_backward():
    """Backward is done with the last 300 of 600 bytes after a quarter: forward begins them then."""
    alike = StepCompute(10.0, 20.0, 4.0, (300, 500, 600), (0.25, 0.75, 1.0))
    assert [alike.needed_seconds(nbytes) for nbytes in (0, 100, 299, 300)] == [0, 2.5, 2.5, 7.5]
    known = StepCompute(10.0, 20.0, 4.0, (300, 500, 600), (0.25, 0.75, 1.0), (0.6, 0.2, 0.0))
    assert [known.needed_seconds(nbytes) for nbytes in (0, 100, 299, 300)] == [0, 2, 2, 6]
    assert NO_COMPUTE.needed_seconds(100) == 0


def test_a_periodic_strategy_is_predicted_by_its_mean_step():
    every, eighth = (
        predicted("local_sgd", 4, options={"averaging_period": period}) for period in (1, 8)
    )
    assert every.bytes_sent_others == predicted("all_reduce_flat", 4).bytes_sent_others
    assert 8 * eighth.bytes_sent_others == pytest.approx(every.bytes_sent_others)
    assert 8 * eighth.sync_seconds == pytest.approx(every.sync_seconds)


@pytest.mark.parametrize(
    ("name", "network", "bound"),
    [
        ("all_reduce", Network(1.0, 1e-12), "latency"),
        ("ring", Network(1e-9, 1e-6), "bandwidth"),
        ("gather_scatter", Network(1e-9, 1e-6), "root's link"),
        ("tree", Network(1e-9, 1e-12, 1e-6), "summation"),
        ("topk", Network(1e-9, 1e-12, compress_seconds={"search": 1e-6}), "compression"),
    ],
)
def test_what_most_of_the_messages_time_is_spent_on(name, network, bound):
    plan = message_plans([name])[name]
    terms = message_terms(plan, VGG11, 8, network=network)
    assert max(terms, key=terms.__getitem__) == bound


@pytest.mark.parametrize(
    ("name", "compressor"), [("topk", "search"), ("ddp_powersgd", "project"), ("ddp_fp16", "cast")]
)
def test_what_compression_computes_takes_its_bytes_once(name, compressor):
    """Whatever the number of ranks, buckets and operations."""
    plan = message_plans([name])[name]
    of_a_byte = {"search": 7e-9, "project": 5e-9, "cast": 3e-9}
    for ranks in (2, 8):
        network = Network(1e-4, 1e-9, compress_seconds=of_a_byte)
        for links in (network, network.over(rate_bits=1e9, latency_seconds=1e-4)):
            terms = message_terms(plan, VGG11, ranks, network=links)
            assert terms["compression"] == pytest.approx(of_a_byte[compressor] * sum(VGG11))


def test_other_links_keep_the_software():
    network = Network(1e-4, 1e-9, 2e-10, 3e-10, {"all_reduce": Rate(2e-4, 5e-10)}, overlap_cost=0.8)
    slow = network.over(rate_bits=1e9, latency_seconds=None)
    assert slow.rate("all_reduce") == Rate(2e-4, 8e-9 * HEADERS)
    # 2 ranks: 1000 bytes on a link, 2 messages, 500 bytes to sum
    one, software = Operation("all_reduce", 1000), 1000 * 5e-10 + 500 * 2e-10
    waiting = 1000 * 8e-9 * HEADERS + 500 * 2e-10
    assert slow.delay_share(one, 2) == pytest.approx(0.8 * (4e-4 + software) / (4e-4 + waiting))
    assert slow.gamma_seconds_per_byte == 2e-10
    fast = network.over(rate_bits=1e12, latency_seconds=1e-6)
    # no byte is faster than this software allows
    assert fast.rate("all_reduce") == Rate(1e-6, 5e-10)
    assert fast.rate("gather") == Rate(1e-6, 1e-9)
    assert fast.delay_share(one, 2) == pytest.approx(0.8 * software / (2e-6 + software))
    same = network.over(rate_bits=None, latency_seconds=None)
    assert same.delay_share(one, 2) == network.delay_share(one, 2) == 0.8


def test_compute_time_by_samples_and_by_ranks_on_the_machine():
    alone = ComputeProfile(1, 4, 0.1, 0.01, 0.2, 0.02, 0.05)
    four = ComputeProfile(4, 1, 0.1, 0.05, 0.2, 0.1, 0.3)
    model = ComputeModel((alone, four), (8, 16), (0.5, 1.0))
    assert model.at(10).seconds == pytest.approx(0.1 + 0.1 + 0.2 + 0.2 + 0.05)
    assert model.at(10, ranks_here=4).seconds == pytest.approx(0.1 + 0.5 + 0.2 + 1.0 + 0.3)
    eight = model.at(10, ranks_here=8).seconds
    assert eight == pytest.approx(2 * model.at(10, ranks_here=4).seconds)
    between = [model.at(10, ranks_here=ranks).seconds for ranks in (1, 2, 3, 4)]
    assert between == sorted(between)
    step = model.at(10)
    shares = [step.ready_seconds(nbytes) / step.backward_seconds for nbytes in (1, 8, 9, 16, 99)]
    assert shares == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert [local_samples(256, nodes, scaling="strong") for nodes in (1, 3, 1000)] == [256, 86, 2]
    assert local_samples(64, 1000, scaling="weak") == 64
