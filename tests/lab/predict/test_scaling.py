"""How far strategies scale: the search against every number of nodes, and results by hand."""

import pytest

from common.sync import STRATEGIES
from common.sync.message_cost import Operation
from common.sync.plans.base import MessagePlan
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.compute_model import StepCompute
from lab.predict.event_model import LARGEST_NODES, Network, step_seconds
from lab.predict.scaling import most_nodes, numbers_of_nodes, scaling_limits
from lab.predict.scenario import Scenario, compute_of
from lab.predict.tables import message_plans, scaling_limits_of

REFERENCE = load_calibration(reference_path())
STEP = 0.045  # between two numbers of nodes that are tried


class RingOfLatency(MessagePlan):
    """A strategy that sends 2 (N - 1) messages of 0 bytes."""

    def operations(self, sizes, ranks):
        return [Operation("exchange", 0, count=2 * (ranks - 1))]

    def bytes_sent(self, sizes, rank, ranks):
        return 0


def on_links(rate_bits, latency_seconds):
    return Scenario(
        calibration=REFERENCE,
        batch_size=256,
        scaling="strong",
        rate_bits=rate_bits,
        latency_seconds=latency_seconds,
    )


def ring_limit(*, alpha, scaling, seconds, fixed=0.0, batch_size=1_000_000):
    """Return the scaling limit of ``RingOfLatency``.

    The nodes compute for ``seconds``: each of them in weak scaling, all together in strong scaling;
    ``fixed`` seconds more are computed by every node anew.
    """

    def at(nodes):
        return StepCompute(fixed, seconds if scaling == "weak" else seconds / nodes, 0.0)

    return scaling_limits(
        {"ring": RingOfLatency()},
        [4],
        network=Network(alpha, 1e-9),
        compute_at=at,
        batch_size=batch_size,
        scaling=scaling,
    )[0]


def test_a_strong_ring_stops_where_the_derivative_says():
    one = ring_limit(alpha=1e-3, scaling="strong", seconds=1.5)
    # the minimum of 1.5 / N + 2 (N - 1) alpha lies at sqrt(1.5 / 2 alpha)
    assert one.fastest_nodes == 27
    best = 1.5 / 27 + 2 * 26e-3
    by_hand = min(n for n in range(1, 28) if 1.5 / n + 2e-3 * (n - 1) <= 1.1 * best)
    assert (one.nodes, one.held_by, one.limit) == (by_hand, "latency", LARGEST_NODES)
    assert one.speedup == pytest.approx(1.5 / (1.5 / by_hand + 2e-3 * (by_hand - 1)))
    assert one.half_nodes == 27  # from N (N - 1) <= 1.5 / 2 alpha
    # sqrt(1.5 / 2 alpha) = 274 lies between two numbers that are tried
    fastest = ring_limit(alpha=1e-5, scaling="strong", seconds=1.5).fastest_nodes
    assert fastest == pytest.approx(274, rel=STEP)


def test_a_weak_ring_stops_where_its_latency_saturates():
    one = ring_limit(alpha=1e-4, scaling="weak", seconds=1.0)
    assert 5001 / (1 + STEP) < one.half_nodes <= 5001  # from 2 (N - 1) alpha <= 1
    last = 1 + 2e-4 * (LARGEST_NODES - 1)
    assert one.fastest_speedup == pytest.approx(LARGEST_NODES / last)
    # N / (1 + 2 (N - 1) alpha) reaches 1 / 1.1 of fastest_speedup
    exact = LARGEST_NODES * (1 - 2e-4) / (1.1 * last - 2e-4 * LARGEST_NODES)
    assert exact <= one.nodes < exact * (1 + STEP)
    assert one.held_by == "latency"


def test_what_grows_to_the_end_never_stops():
    one = ring_limit(alpha=1e-9, scaling="weak", seconds=1.0)
    assert (one.nodes, one.held_by) == (None, "")
    assert one.half_nodes == one.fastest_nodes == LARGEST_NODES
    assert one.speedup == pytest.approx(LARGEST_NODES, rel=1e-3)


@pytest.mark.parametrize(
    ("batch_size", "limit"), [(1_000, 500), (3, 1), (2, 1), (1_000_000, LARGEST_NODES)]
)
def test_strong_scaling_ends_with_the_samples(batch_size, limit):
    assert most_nodes(batch_size, scaling="strong") == limit
    assert most_nodes(batch_size, scaling="weak") == LARGEST_NODES
    one = ring_limit(alpha=1e-12, scaling="strong", seconds=1e6, batch_size=batch_size)
    held_by = "samples" if limit < LARGEST_NODES else ""
    assert (one.limit, one.nodes, one.held_by) == (limit, None, held_by)
    assert one.speedup == pytest.approx(limit, rel=1e-3)


def test_what_is_computed_by_every_node_anew_holds_scaling_too():
    one = ring_limit(alpha=1e-12, scaling="strong", seconds=1.0, fixed=0.1)
    # from 0.1 + 1 / N <= 1.1 (0.1 + 1 / 100,000)
    assert 100 <= one.nodes < 100 * (1 + STEP)
    assert one.held_by == "compute"


@pytest.mark.parametrize(
    ("name", "links", "held_by"),
    [
        ("gather_scatter", (1e9, 2e-4), "root's link"),
        ("tree", (1e9, 2e-4), "bandwidth"),
        ("all_reduce", (1e11, 5e-3), "latency"),
    ],
)
def test_what_holds_it_is_what_takes_the_most(name, links, held_by):
    strong, weak = scaling_limits_of(message_plans([name]), on_links(*links))
    assert strong.held_by == held_by
    assert (strong.scaling, weak.scaling) == ("strong", "weak")


@pytest.mark.parametrize(("rate", "latency"), [(1e10, 5e-5), (1e11, 5e-3)])
@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_the_search_finds_what_every_number_of_nodes_gives(rate, latency, scaling, monkeypatch):
    """It agrees with each number from 1 to 150, also where a node's share of the batch shrinks."""
    monkeypatch.setattr("lab.predict.scaling.LARGEST_NODES", 150)
    strategies, sizes = message_plans(list(STRATEGIES)), REFERENCE.gradient_sizes
    network = REFERENCE.network.over(rate_bits=rate, latency_seconds=latency)

    def at(nodes):
        return compute_of(REFERENCE, nodes, batch_size=300, scaling=scaling, own_machines=True)

    asked = {"network": network, "compute_at": at, "batch_size": 300, "scaling": scaling}
    found = scaling_limits(strategies, sizes, **asked)
    assert [one.sync for one in found] == list(strategies)
    for one in found:
        plan = strategies[one.sync]
        seconds = {
            nodes: step_seconds(plan, sizes, nodes, network=network, compute=at(nodes))
            for nodes in range(1, 151)
        }
        speeds = {
            nodes: (nodes if scaling == "weak" else 1) * seconds[1] / taken
            for nodes, taken in seconds.items()
        }
        best = max(speeds.values())
        assert one.fastest_speedup == pytest.approx(best, rel=1e-3), one
        nodes = min(nodes for nodes, speed in speeds.items() if 1.1 * speed >= best)
        if one.nodes:
            assert nodes <= one.nodes < nodes * (1 + STEP), one
        else:
            assert nodes * (1 + STEP) > 75, one
        assert one.speedup == pytest.approx(speeds[one.nodes or 150])
        half = max(nodes for nodes, speed in speeds.items() if 2 * speed >= nodes)
        assert half / (1 + STEP) < one.half_nodes <= half, one


def test_no_exchange_never_stops():
    found = scaling_limits_of(message_plans(["none"]), on_links(1e9, None))
    assert [(one.sync, one.scaling) for one in found] == [("none", "strong"), ("none", "weak")]
    assert (found[0].limit, found[0].nodes, found[0].held_by) == (128, None, "samples")
    assert (found[1].nodes, found[1].half_nodes, found[1].held_by) == (None, LARGEST_NODES, "")
    assert found[1].speedup == pytest.approx(LARGEST_NODES)


def test_numbers_of_nodes_hold_powers_of_two_and_the_ends():
    numbers = numbers_of_nodes(LARGEST_NODES, also=[4_321, 200_000])
    assert numbers == sorted(set(numbers))
    powers = {1 << power for power in range(17)}
    assert {*range(1, 33), *powers, 4_321, LARGEST_NODES} <= set(numbers)
    assert numbers[-1] == LARGEST_NODES
    assert numbers_of_nodes(1) == [1]
