"""Metrics of the user's own, over the validation set of all ranks.

A metric is a torchmetrics metric or collection (anything with ``update(outputs, targets)``,
``compute()`` and ``reset()``), which brings its states together over the ranks by itself, or a
function of (outputs, batch) whose results are summed over batches and ranks.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.distributed.process_group import World
from common.training_engine.forward import Result
from common.training_engine.metrics import sum_over_ranks

Metrics = Mapping[str, Any]  # by name


class OwnMetrics:
    """Computes ``metrics`` over one pass of a loader.

    A function returns ``total, count``, for a mean over anything, or a total over the batch's
    samples. A higher value is better, unless the metric has ``higher_is_better = False``, as
    torchmetrics' losses and errors have.
    """

    def __init__(self, metrics: Metrics, device: torch.device) -> None:
        self._metrics = metrics
        self._sums: dict[str, Tensor] = {}  # (2,) float64: total and count
        for name, metric in metrics.items():
            if hasattr(metric, "compute"):
                metric.reset()
                if hasattr(metric, "to"):
                    metric.to(device)
            else:
                self._sums[name] = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, result: Result) -> None:
        """Add a batch, without a wait for the GPU."""
        for name, metric in self._metrics.items():
            if name not in self._sums:
                metric.update(result.outputs, result.targets)
                continue
            found = metric(result.outputs, result.batch)
            if not isinstance(found, tuple):
                found = (found, result.samples)
            self._sums[name] += torch.stack([torch.as_tensor(number) for number in found])

    def compute(self, world: World) -> dict[str, float]:
        """Return the values over all ranks, by name. Collective."""
        values = {}
        summed = sum_over_ranks(world, [sums.tolist() for sums in self._sums.values()])
        for name, (total, count) in zip(self._sums, summed, strict=True):
            values[name] = total / count if count else math.nan
        for name, metric in self._metrics.items():
            if name in self._sums:
                continue
            found = metric.compute()
            if isinstance(found, Mapping):  # of a collection
                values |= {key: float(value) for key, value in found.items()}
            else:
                values[name] = float(found)
        return values
