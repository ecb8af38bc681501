"""Compute the first steps again in one process, shard by shard, from what the ranks have kept.

Before that, each shard's gradient of step 0 must be what its rank computed. Then the mean of the
shards' gradients, clipped if the script clips, goes to the script's own optimiser, and the weights
are compared with those that rank 0 recorded.
"""

import json
import math
import time
from array import array
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..sampling import join, take

_SECONDS = 60.0
_REPEATED = 1e-2
"""A gradient that was computed again may differ by this, relatively: kernels round differently."""


@dataclass
class RankSteps:
    """What a rank kept: of each step, its forwards.

    A forward: random (state before it), autocast, arguments, gradients (by place in the output).
    """

    pid: int
    steps: list[list[dict[str, Any]]]
    why_not: str = ""


class Records:
    """The records of a process of optimiser 0, by kind and step."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._numbers = folder / f"{pid}.f64"
        self.of: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "weights": {}}
        for line in (folder / f"{pid}.jsonl").read_bytes().splitlines():
            record = json.loads(line)
            if record["k"] in self.of and record["o"] == 0:
                self.of[record["k"]][record["step"]] = record

    def numbers(self, reference: list[int]) -> Tensor:
        """Return the numbers that a record refers to, float64."""
        content = array("d")
        with self._numbers.open("rb") as file:
            file.seek(8 * reference[0])
            content.frombytes(file.read(8 * reference[1]))
        return torch.tensor(content, dtype=torch.float64)


def compute_again(
    folder: Path, model: Module, optimizer: Optimizer, ranks: list[RankSteps]
) -> tuple[list[list[Any]], str]:
    """Return [step, greatest relative difference of weights, parameter] of each step, and why not.

    ``model`` holds the weights before step 0, and ``optimizer`` its parameters.
    """
    records = [Records(folder, one.pid) for one in ranks]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    names = {id(one): name for name, one in model.named_parameters()}
    found: list[list[Any]] = []
    limit = time.monotonic() + _SECONDS
    model.train()
    for step in range(min(len(one.steps) for one in ranks)):
        observed = [one.of["step"].get(step) for one in records]
        after = records[0].of["weights"].get(step + 1)
        if after is None or any(one is None for one in observed) or time.monotonic() > limit:
            break
        shards = [gradients_of(model, parameters, one.steps[step]) for one in ranks]
        if step == 0:
            for rank, (record, shard) in enumerate(zip(observed, shards, strict=True)):
                own = records[rank].numbers(record["own"])  # type: ignore[index]  # not None
                apart = distance(joined(shard, parameters), own)
                if not apart < _REPEATED:
                    return [], (
                        f"rank {rank}'s gradient of step 0 could not be repeated: it differs by"
                        f" {apart:.1e} of its norm"
                    )
        update(optimizer, parameters, shards, observed[0])  # type: ignore[arg-type]  # not None
        worst = greatest_difference(parameters, records[0].numbers(after["values"]))
        found.append([step, worst[0], names[id(parameters[worst[1]])]])
    return found, "" if found else "no step with the weights after it was recorded"


def gradients_of(
    model: Module, parameters: list[Tensor], forwards: list[dict[str, Any]]
) -> list[Tensor | None]:
    """Return the gradients of one rank's forwards of a step, added up."""
    model.zero_grad(set_to_none=True)
    for one in forwards:
        torch.set_rng_state(one["random"])
        with _autocast(one["autocast"]):
            output = model(*one["arguments"])
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        places = sorted(one["gradients"])
        torch.autograd.backward(
            [outputs[place] for place in places], [one["gradients"][place] for place in places]
        )
    return [None if one.grad is None else one.grad.detach().clone() for one in parameters]


def _autocast(kept: tuple[str, torch.dtype] | None) -> AbstractContextManager[Any]:
    return nullcontext() if kept is None else torch.autocast(kept[0], dtype=kept[1])


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of an output: within lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in tensors_of(one)]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_of(one)]
    return []


def update(
    optimizer: Optimizer,
    parameters: list[Tensor],
    shards: list[list[Tensor | None]],
    record: dict[str, Any],
) -> None:
    """Do the step: the mean of the shards' gradients, clipped and with the rate as recorded."""
    scale = float(record.get("scale") or 1)
    for parameter, shares_of in zip(parameters, zip(*shards, strict=True), strict=True):
        known = [one for one in shares_of if one is not None]
        parameter.grad = None
        if known:
            parameter.grad = torch.stack(known).sum(dim=0) / (len(shards) * scale)
    for kind, bound, *_ in record.get("clips") or ():
        if bound is None:
            continue
        if kind == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, bound)
        else:
            torch.nn.utils.clip_grad_value_(parameters, bound)
    for group, rate in zip(optimizer.param_groups, record["lr"], strict=False):
        if isinstance(group.get("lr"), float) and rate is not None:
            group["lr"] = rate
    optimizer.step()


def joined(gradients: list[Tensor | None], parameters: list[Tensor]) -> Tensor:
    """Return the kept samples of all gradients, in the order of the optimiser, float64."""
    parts = [
        take(torch.zeros_like(parameter) if one is None else one)
        for one, parameter in zip(gradients, parameters, strict=True)
    ]
    return torch.tensor(join(parts), dtype=torch.float64)


def distance(one: Tensor, other: Tensor) -> float:
    """Return how far two vectors are apart, relatively to the second one's norm."""
    if one.shape != other.shape:
        return math.inf
    known = other.isfinite()
    size = float(other[known].norm())
    return float((one - other)[known].norm()) / max(size, 1e-300)


def greatest_difference(parameters: list[Tensor], recorded: Tensor) -> tuple[float, int]:
    """Return the greatest relative difference of a parameter's samples, and its index."""
    at, worst = 0, (0.0, 0)
    for index, parameter in enumerate(parameters):
        mine = torch.tensor(join([take(parameter)]), dtype=torch.float64)
        theirs = recorded[at : at + len(mine)]
        at += len(mine)
        worst = max(worst, (distance(mine, theirs), index))
    return worst
