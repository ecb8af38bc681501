"""Metrics of the user's own, over the validation set of all ranks.

A metric is a torchmetrics metric or collection, which brings its states together over the ranks by
itself, or a function of (outputs, batch) whose results are summed over batches and ranks. Anything
else with ``update(outputs, targets)``, ``compute()`` and ``reset()`` is for one rank.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.distributed.process_group import World
from common.errors import UserError
from common.training_engine.forward import Result
from common.training_engine.metrics import sum_over_ranks

Metrics = Mapping[str, Any]  # by name


class OwnMetrics:
    """Computes ``metrics`` over one pass of a loader.

    A function returns ``total, count``, for a mean over anything. A higher value is better, unless
    the metric has ``higher_is_better = False``, as torchmetrics' losses and errors have.
    """

    def __init__(self, metrics: Metrics, world: World) -> None:
        check_metrics(metrics, world)
        self._metrics = metrics
        self._world = world
        self._sums: dict[str, Tensor] = {}  # (2,) float64: total and count
        for name, metric in metrics.items():
            if hasattr(metric, "compute"):
                metric.reset()
                if hasattr(metric, "to"):
                    metric.to(world.device)
            else:
                self._sums[name] = torch.zeros(2, dtype=torch.float64, device=world.device)

    def update(self, result: Result) -> None:
        """Add a batch, without a wait for the GPU."""
        for name, metric in self._metrics.items():
            if name not in self._sums:
                metric.update(result.outputs, result.targets)
                continue
            found = metric(result.outputs, result.batch)
            if not isinstance(found, tuple) or len(found) != 2:
                raise UserError(
                    f"the metric {name!r} returned {found!r}: return total, count, which are "
                    "summed over batches and ranks; the value is total / count"
                )
            for at, number in enumerate(found):  # one may be on the GPU, the other a Python number
                self._sums[name][at] += number

    def compute(self) -> dict[str, float]:
        """Return the values over all ranks, by name. Collective."""
        values = {}
        rows = sum_over_ranks(self._world, [sums.tolist() for sums in self._sums.values()])
        summed = dict(zip(self._sums, rows, strict=True))
        for name, metric in self._metrics.items():
            if name in summed:
                total, count = summed[name]
                values[name] = total / count if count else math.nan
                continue
            found = metric.compute()
            if isinstance(found, Mapping):  # of a collection
                values |= {key: float(value) for key, value in found.items()}
            else:
                values[name] = float(found)
        return values


def check_metrics(metrics: Metrics, world: World) -> None:
    """Raise UserError on metrics of one rank if there are more, and on two metrics of one name."""
    names: list[str] = []
    for name, metric in metrics.items():
        names += metric.keys() if hasattr(metric, "keys") else [name]  # those of a collection
        if world.size > 1 and hasattr(metric, "compute") and not _is_torchmetrics(metric):
            raise UserError(
                f"the metric {name!r} is a {type(metric).__name__} of one rank: on "
                f"{world.size} ranks give a metric of torchmetrics, or a function of (outputs, "
                "batch) that returns total, count"
            )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(
            f"two metrics are called {twice[0]!r}: give the MetricCollection a prefix, or the "
            "metric another name"
        )


def _is_torchmetrics(metric: Any) -> bool:
    """Whether it is torchmetrics', whose ``compute`` brings the ranks' states together."""
    return any(kind.__module__.startswith("torchmetrics") for kind in type(metric).__mro__)
