"""How far each strategy scales, by the cost model for up to 100,000 nodes. Imports no torch.

In strong scaling all nodes share one batch, in weak scaling each node has a batch of its own. A
speed-up is samples a second over those of one node, of the strategy that is fastest there.
``scaling_limits`` evaluates it at every number of nodes up to 32, and beyond that at 16 numbers in
each doubling (4 % apart, powers of two among them). Its answers are numbers of these.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from common.sync.plans.base import MessagePlan, NoSyncPlan
from lab.predict.bucket_choice import with_best_buckets
from lab.predict.compute_model import LEAST_SAMPLES, StepCompute
from lab.predict.event_model import (
    LARGEST_NODES,
    Network,
    message_terms,
    step_seconds,
)

SCALINGS = ("strong", "weak")
WORTHWHILE = 1.1  # the speed ratio that makes more nodes worthwhile

_EVERY_NODE_TO = 32
_IN_A_DOUBLING = 16
FEWEST_SAMPLES_TRIED = 16


@dataclass(frozen=True)
class ScalingLimit:
    """How far one strategy scales.

    Parameters
    ----------
    limit : the largest number of nodes evaluated: 100,000, or fewer in strong scaling, where the
        batch has too few samples for more ranks.
    half_nodes : the largest number of nodes with an efficiency of at least 50 %.
    nodes, speedup : the smallest number of nodes within a tenth of the best speed up to ``limit``,
        and its speed-up; ``nodes`` is None, and ``speedup`` that of ``limit``, if the last doubling
        still brought more than a tenth.
    fastest_nodes, fastest_speedup : the number of nodes with the most samples a second, and its
        speed-up.
    held_by : what limits it: "compute" if computing alone scales no further (parts of a step do not
        shrink), else what most of the messages' time is spent on; "samples" if the batch ends
        first; "" if nothing limits it up to 100,000.
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


def most_nodes(
    batch_size: int, *, scaling: str, ranks_per_node: int = 1, least_samples: int = LEAST_SAMPLES
) -> int:
    """Return the largest number of nodes to evaluate.

    In strong scaling each of their ranks needs ``least_samples`` samples of the batch.
    """
    most = LARGEST_NODES
    if scaling == "strong":
        most = batch_size // (least_samples * ranks_per_node)
    return max(1, min(LARGEST_NODES, most))


def base_plan(
    plans: Iterable[MessagePlan], seconds_alone: Callable[[MessagePlan], float]
) -> MessagePlan:
    """Return the plan to whose step on one node the speed-ups of all of these refer.

    It is the fastest there, so that of two curves the faster strategy's is the higher. Ranks that
    exchange nothing are no base but their own.
    """
    exchanging = [plan for plan in plans if not isinstance(plan, NoSyncPlan)]
    return min(exchanging or [NoSyncPlan()], key=seconds_alone)


def scaling_limits(
    plans: Mapping[str, MessagePlan],
    sizes: Sequence[int],
    *,
    network: Network,
    compute_at: Callable[[int], StepCompute],
    batch_size: int,
    scaling: str,
    least_samples: int = LEAST_SAMPLES,
) -> list[ScalingLimit]:
    """Return how far the strategy of each plan scales.

    sizes : bytes of each parameter's gradient. compute_at : returns a rank's step for a number of
    nodes, with its samples in ``scaling`` ("strong" or "weak") at ``batch_size``. least_samples :
    that a rank needs.
    """
    ranks_per_node = network.ranks_per_node
    limit = most_nodes(
        batch_size, scaling=scaling, ranks_per_node=ranks_per_node, least_samples=least_samples
    )
    tried = numbers_of_nodes(limit, also=_jumps(batch_size, scaling, ranks_per_node))
    training = _Training(sizes, network, cache(compute_at), scaling)
    base = base_plan(plans.values(), lambda plan: training.seconds(plan, 1))
    alone = _search(training.speedups(NoSyncPlan(), NoSyncPlan()), tried)
    found = []
    for name, plan in plans.items():
        speed = training.speedups(plan, plan if isinstance(plan, NoSyncPlan) else base)
        stop = _search(speed, tried)
        found.append(
            ScalingLimit(
                sync=name,
                scaling=scaling,
                limit=limit,
                half_nodes=stop.half,
                nodes=stop.nodes,
                speedup=speed(stop.nodes or limit),
                fastest_nodes=stop.fastest,
                fastest_speedup=speed(stop.fastest),
                held_by=_held_by(training, plan, stop.nodes, alone.nodes, limit),
            )
        )
    return found


@dataclass(frozen=True)
class _Training:
    """The steps of a training on any number of nodes. Fields: see ``scaling_limits``."""

    sizes: Sequence[int]
    network: Network
    compute_at: Callable[[int], StepCompute]
    scaling: str

    def speedups(self, plan: MessagePlan, base: MessagePlan) -> Callable[[int], float]:
        """Return a function of the nodes: how many times the samples a second of one node.

        base : the plan of that node's step.
        """
        on_one_node = self.seconds(base, 1)

        def speedup(nodes: int) -> float:
            ratio = on_one_node / self.seconds(plan, nodes)
            return nodes * ratio if self.scaling == "weak" else ratio

        return cache(speedup)

    def longest_term(self, plan: MessagePlan, nodes: int) -> str:
        """Return what most of the messages' time is spent on."""
        ranks = self._ranks(nodes)
        terms = message_terms(self._plan_on(plan, nodes), self.sizes, ranks, network=self.network)
        # What layers wait for are small messages: latency.
        terms["latency"] += plan.period * self.compute_at(nodes).wait_seconds
        return max(terms, key=lambda name: terms[name])

    def _ranks(self, nodes: int) -> int:
        return nodes * self.network.ranks_per_node

    def _plan_on(self, plan: MessagePlan, nodes: int) -> MessagePlan:
        """Return the plan with the best buckets for that number of nodes, if it asks for them."""
        return with_best_buckets(
            plan,
            self.sizes,
            self._ranks(nodes),
            network=self.network,
            compute=self.compute_at(nodes),
        )

    def seconds(self, plan: MessagePlan, nodes: int) -> float:
        """Return the seconds of a step."""
        return step_seconds(
            self._plan_on(plan, nodes),
            self.sizes,
            self._ranks(nodes),
            network=self.network,
            compute=self.compute_at(nodes),
        )


def _held_by(
    training: _Training,
    plan: MessagePlan,
    nodes: int | None,
    compute_nodes: int | None,
    limit: int,
) -> str:
    """Return ``ScalingLimit.held_by``.

    nodes, compute_nodes : where the strategy, and computing alone, stop scaling.
    """
    if nodes is None:
        return "" if limit == LARGEST_NODES else "samples"
    if compute_nodes is not None and nodes >= compute_nodes:
        return "compute"
    return training.longest_term(plan, max(2, nodes))


def _jumps(batch_size: int, scaling: str, ranks_per_node: int) -> list[int]:
    """Return the numbers of nodes at which the busiest rank has one sample less."""
    if scaling == "weak":
        return []
    few_samples = range(1, FEWEST_SAMPLES_TRIED + 1)
    return [math.ceil(batch_size / (samples * ranks_per_node)) for samples in few_samples]


class _Stop(NamedTuple):
    """The fields ``nodes``, ``fastest_nodes`` and ``half_nodes`` of a ``ScalingLimit``."""

    nodes: int | None
    fastest: int
    half: int


def _search(speed: Callable[[int], float], tried: Sequence[int]) -> _Stop:
    """Return where a speed-up stops growing, among the numbers of nodes ``tried``."""
    fastest = max(tried, key=speed)
    enough = speed(fastest) / WORTHWHILE
    nodes = next(nodes for nodes in tried if speed(nodes) >= enough)
    half = max(nodes for nodes in tried if 2 * speed(nodes) >= nodes)
    if nodes > tried[-1] // 2:
        return _Stop(None, fastest, half)
    return _Stop(nodes, fastest, half)


def numbers_of_nodes(limit: int, *, also: Iterable[int] = ()) -> list[int]:
    """Return the numbers of nodes that are evaluated, rising, from 1 to ``limit``."""
    doublings = range(_IN_A_DOUBLING * math.ceil(math.log2(limit) + 1))
    spread = {round(2 ** (step / _IN_A_DOUBLING)) for step in doublings}
    numbers = {*range(1, _EVERY_NODE_TO + 1), *spread, limit, *also}
    return sorted(nodes for nodes in numbers if 1 <= nodes <= limit)
