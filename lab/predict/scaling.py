"""How far each strategy scales: ``scaling_limits`` evaluates the cost model for up to 100,000 nodes, with a batch that all
nodes share (strong scaling) or a batch for each node (weak scaling).

A speed-up is of samples a second over one node's. It is evaluated at every number of nodes up to 32, beyond that at eight in
each doubling, powers of two among them, and between these by bisection; no torch here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from common.cost_model.compute_model import LEAST_SAMPLES, StepCompute
from common.cost_model.event_model import (
    LARGEST_NODES,
    Network,
    message_terms,
    step_seconds,
)
from common.sync.message_plans import MessagePlan

SCALINGS = ("strong", "weak")
WORTHWHILE = 1.1
"""Times as fast: what more nodes must bring to count."""

_EVERY_NODE_TO, _IN_A_DOUBLING, _FEWEST_SAMPLES_TRIED = 32, 8, 16


@dataclass(frozen=True)
class ScalingLimit:
    """How far one strategy scales.

    Parameters
    ----------
    limit : the largest number of nodes evaluated: 100,000, or in strong scaling as many as get two samples each.
    half_nodes : the largest number of nodes with an efficiency of at least 50 %.
    nodes, speedup : the smallest number of nodes within a tenth of the best speed up to ``limit``, and its speed-up;
        ``nodes`` is None, and ``speedup`` that of ``limit``, where the last doubling still gave more than a tenth.
    fastest_nodes, fastest_speedup : the number of nodes with the shortest step, or in weak scaling the most samples a second.
    held_by : what limits it: "compute" where computing alone scales no further (parts of a step do not shrink), else what
        most of the messages' time is spent on; "samples" where the batch limits first; "" where nothing does up to 100,000.
    """

    sync: str
    scaling: str
    limit: int
    half_nodes: int
    nodes: int | None
    speedup: float
    fastest_nodes: int
    fastest_speedup: float
    held_by: str


def most_nodes(batch_size: int, *, scaling: str) -> int:
    """Return the largest number of nodes to evaluate: where all share the batch, no more than get two samples each."""
    return (
        LARGEST_NODES
        if scaling == "weak"
        else max(1, min(LARGEST_NODES, batch_size // LEAST_SAMPLES))
    )


def scaling_limits(
    plans: Mapping[str, MessagePlan],
    sizes: Sequence[int],
    *,
    network: Network,
    compute_at: Callable[[int], StepCompute],
    batch_size: int,
    scaling: str,
) -> list[ScalingLimit]:
    """Return how far the strategy of each of ``plans`` scales; those without a formula are left out.

    sizes : bytes of each parameter's gradient. compute_at : a node's step by the number of nodes, with the samples that
    ``scaling`` ("strong" or "weak") leaves it of ``batch_size``.
    """
    limit, compute_at = most_nodes(batch_size, scaling=scaling), cache(compute_at)
    shares = (
        []
        if scaling == "weak"
        else [-(-batch_size // samples) for samples in range(1, _FEWEST_SAMPLES_TRIED + 1)]
    )

    def search(seconds: Callable[[int], float]) -> "_SearchResult":
        return _search(seconds, limit=limit, scaling=scaling, also=shares)

    def seconds_of(plan: MessagePlan) -> Callable[[int], float]:
        return lambda nodes: step_seconds(
            plan, sizes, nodes, network=network, compute=compute_at(nodes)
        )

    alone, found = search(lambda nodes: compute_at(nodes).seconds), []
    for name, plan in plans.items():
        try:
            own = search(seconds_of(plan))
        except NotImplementedError:
            continue
        if own.nodes is None:
            held_by = "" if limit == LARGEST_NODES else "samples"
        elif alone.nodes is not None and own.nodes >= alone.nodes:
            held_by = "compute"
        else:
            held_by = message_terms(plan, sizes, max(2, own.nodes), network=network).largest
        found.append(
            ScalingLimit(
                name,
                scaling,
                limit,
                own.half,
                own.nodes,
                own.speed(own.nodes or limit),
                own.fastest,
                own.speed(own.fastest),
                held_by,
            )
        )
    return found


@dataclass(frozen=True)
class _SearchResult:
    speed: Callable[[int], float]
    half: int
    nodes: int | None
    fastest: int


def _search(
    seconds: Callable[[int], float], *, limit: int, scaling: str, also: Iterable[int]
) -> _SearchResult:
    @cache
    def speed(nodes: int) -> float:
        return (nodes if scaling == "weak" else 1) * seconds(1) / seconds(nodes)

    tried = numbers_of_nodes(limit, also=also)
    # The best of all may lie between two numbers: where the next one is no faster any more.
    best = max(range(len(tried)), key=lambda index: speed(tried[index]))
    around = tried[max(0, best - 1)], tried[min(len(tried) - 1, best + 1)]
    top = _first(*around, lambda nodes: nodes == around[1] or speed(nodes + 1) <= speed(nodes))
    fastest = max(tried[best], top, key=speed)

    enough = speed(fastest) / WORTHWHILE
    reached = next(index for index, nodes in enumerate(tried) if speed(nodes) >= enough)
    below = tried[reached - 1] if reached else 0
    nodes = _first(below, tried[reached], lambda nodes: speed(nodes) >= enough)

    last = max(index for index, nodes in enumerate(tried) if 2 * speed(nodes) >= nodes)
    half = tried[last]
    if last + 1 < len(tried):
        half = _first(half, tried[last + 1], lambda nodes: 2 * speed(nodes) < nodes) - 1
    return _SearchResult(speed, half, None if nodes > limit // 2 else nodes, fastest)


def numbers_of_nodes(limit: int, *, also: Iterable[int] = ()) -> list[int]:
    """Return the numbers of nodes that are evaluated first, rising, from 1 to ``limit``."""
    doublings = range(_IN_A_DOUBLING * math.ceil(math.log2(limit) + 1))
    spread = {round(2 ** (step / _IN_A_DOUBLING)) for step in doublings}
    return sorted(
        nodes
        for nodes in {*range(1, _EVERY_NODE_TO + 1), *spread, limit, *also}
        if 1 <= nodes <= limit
    )


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the first number above ``low`` and up to ``high`` for which ``holds``, where it holds from there to ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
