"""How far each strategy scales: ``scaling_limits`` asks the cost model for numbers of nodes up to
100,000, for a batch that all nodes share (strong scaling) and for a batch a node (weak scaling).

A speed-up is of samples a second over one node's. It is asked at every number of nodes up to 32, beyond it at eight in each
doubling, powers of two among them, and between these by halving; no torch here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from common.cost_model.compute_model import LEAST_SAMPLES, StepCompute
from common.cost_model.event_model import (
    LARGEST_NODES,
    MessagePlan,
    Network,
    message_terms,
    step_seconds,
)

SCALINGS = ("strong", "weak")
WORTHWHILE = 1.1
"""Times as fast: what more nodes must bring to be worth a word."""

_EVERY_NODE_TO, _IN_A_DOUBLING, _FEWEST_SAMPLES_TRIED = 32, 8, 16


@dataclass(frozen=True)
class ScalingLimit:
    """How far one strategy scales.

    Parameters
    ----------
    limit : the most nodes that were asked for: 100,000, or in strong scaling as many as find two samples each in the batch.
    half_nodes : the most nodes of which each still does half of what one alone does (an efficiency of 50 %).
    nodes, speedup : the fewest nodes than which no other number up to ``limit`` is faster by more than a tenth, and how fast
        they are; ``nodes`` is None, and ``speedup`` that of ``limit``, where the last doubling still gave more than a tenth.
    fastest_nodes, fastest_speedup : the number of nodes with the shortest step, or in weak scaling the most samples a second.
    held_by : what keeps it from more: "compute" where computing alone goes no further (parts of a step do not shrink), else
        what takes the most of the messages; "samples" where the batch ends first; "" where nothing stops it up to 100,000.
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
    """Return how many nodes a batch is asked for: where all share it, no more than find two samples each."""
    return (
        LARGEST_NODES
        if scaling == "weak"
        else max(1, min(LARGEST_NODES, batch_size // LEAST_SAMPLES))
    )


def scaling_limits(
    strategies: Mapping[str, MessagePlan],
    sizes: Sequence[int],
    *,
    network: Network,
    compute_at: Callable[[int], StepCompute],
    batch_size: int,
    scaling: str,
) -> list[ScalingLimit]:
    """Return how far each of ``strategies`` scales, by name; those without a formula are left out.

    sizes : bytes of each parameter's gradient. compute_at : a node's step by the number of nodes, with the samples that
    ``scaling`` ("strong" or "weak") leaves it of ``batch_size``.
    """
    limit, compute_at = most_nodes(batch_size, scaling=scaling), cache(compute_at)
    shares = (
        []
        if scaling == "weak"
        else [-(-batch_size // samples) for samples in range(1, _FEWEST_SAMPLES_TRIED + 1)]
    )

    def far(seconds: Callable[[int], float]) -> "_Far":
        return _how_far(seconds, limit=limit, scaling=scaling, also=shares)

    alone, found = far(lambda nodes: compute_at(nodes).seconds), []
    for name, plan in strategies.items():
        try:
            own = far(
                lambda nodes, plan=plan: step_seconds(
                    plan, sizes, nodes, network=network, compute=compute_at(nodes)
                )
            )
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
class _Far:
    speed: Callable[[int], float]
    half: int
    nodes: int | None
    fastest: int


def _how_far(
    seconds: Callable[[int], float], *, limit: int, scaling: str, also: Iterable[int]
) -> _Far:
    @cache
    def speed(nodes: int) -> float:
        return (nodes if scaling == "weak" else 1) * seconds(1) / seconds(nodes)

    tried = numbers_of_nodes(limit, also=also)
    # The best of all may lie between two numbers: where the next one is no faster any more.
    place = max(range(len(tried)), key=lambda index: speed(tried[index]))
    around = tried[max(0, place - 1)], tried[min(len(tried) - 1, place + 1)]
    top = _first(*around, lambda nodes: nodes == around[1] or speed(nodes + 1) <= speed(nodes))
    fastest = max(tried[place], top, key=speed)

    enough = speed(fastest) / WORTHWHILE
    place = next(index for index, nodes in enumerate(tried) if speed(nodes) >= enough)
    nodes = _first(
        tried[place - 1] if place else 0, tried[place], lambda nodes: speed(nodes) >= enough
    )

    place = max(index for index, nodes in enumerate(tried) if 2 * speed(nodes) >= nodes)
    half = (
        tried[place]
        if place + 1 == len(tried)
        else _first(tried[place], tried[place + 1], lambda nodes: 2 * speed(nodes) < nodes) - 1
    )
    return _Far(speed, half, None if nodes > limit // 2 else nodes, fastest)


def numbers_of_nodes(limit: int, *, also: Iterable[int] = ()) -> list[int]:
    """Return the numbers of nodes that are asked for first, rising, from 1 to ``limit``."""
    doublings = range(_IN_A_DOUBLING * math.ceil(math.log2(limit) + 1))
    spread = {round(2 ** (place / _IN_A_DOUBLING)) for place in doublings}
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
