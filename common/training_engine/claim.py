"""Whether every rank's optimiser got the mean of what the ranks computed, seen in one step.

In the first step ``ClaimCheck`` keeps a few numbers of each parameter's gradient: as backward
computed it on this rank, and as the optimiser gets it. One all_gather brings them together; rank 0
fits the second by the first (common/utils/gradient_fit.py) when it is asked for the result. What
the weights mean, ``lab.evidence`` says.

Order of the calls: ``watch`` before the first step, ``take_own`` from hooks during backward,
``take_synchronised`` after the exchange, ``gather`` after the step, ``result`` at any later time.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.distributed.process_group import World
from common.profiling.records import GradientClaim
from common.sync.base import GradientSync
from common.utils.gradient_fit import EXACT, ROUNDED, Numbers, fit_ranks, measurable, side_by_side

COORDINATES = 64  # of a parameter, spread evenly: a rank sends at most 512 bytes for each
_OWN, _GOT = 0, 1


def why_not_claimed(sync: GradientSync, parameters: Iterable[nn.Parameter]) -> str:
    """Return why a strategy's gradients need not be the mean, or cannot be seen; "" if they can."""
    if not sync.exact:
        return "the strategy is lossy or periodic, so it does not claim the mean of every step"
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        return "each rank holds a part of every parameter, so none has a whole gradient of its own"
    return ""


class ClaimCheck:
    """Compares what this rank's optimiser gets in one step with what the ranks computed.

    It changes neither gradients nor random state, waits for no GPU before ``result``, and leaves
    nothing behind after ``gather``.

    world : the group. model : without a wrapper. sync : prepared.
    """

    def __init__(self, world: World, model: nn.Module, sync: GradientSync) -> None:
        self._world = world
        self._sync = sync
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._why_not = why_not_claimed(sync, trained)
        self._parameters = [] if self._why_not else trained
        self._step = 0
        self._hooks: list[RemovableHandle] = []
        self._at = [_coordinates(parameter) for parameter in self._parameters]
        self._columns = side_by_side(len(at) for at in self._at)
        self._gathered: Tensor | None = None
        # (2, numbers): this rank's own gradients, and what its optimiser gets; NaN: not here
        self._numbers = torch.zeros(0)

    @property
    def watching(self) -> bool:
        """Whether ``watch`` was called and ``gather`` was not."""
        return bool(self._hooks)

    def watch(self) -> None:
        """Begin to keep this rank's own gradients, in the step that comes next."""
        if not self._parameters:
            return
        kinds = [parameter.dtype for parameter in self._parameters]
        wide = torch.float64 if torch.float64 in kinds else torch.float32
        width = sum(map(len, self._at))
        self._numbers = torch.zeros(2, width, dtype=wide, device=self._parameters[0].device)
        self._hooks = [
            parameter.register_hook(partial(self.take_own, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def take_own(self, index: int, gradient: Tensor) -> None:
        """Add what backward computed of a parameter; each micro-batch adds its part."""
        dense = _in_memory(gradient, self._parameters[index])
        own = self._numbers[_OWN, self._columns[index]]
        own += dense[self._at[index]]

    def take_synchronised(self) -> None:
        """Keep what the optimiser gets, before it is unscaled, clipped and used."""
        for parameter, at, columns in zip(self._parameters, self._at, self._columns, strict=True):
            got = self._numbers[_GOT, columns]
            if parameter.grad is not None:
                got.copy_(_in_memory(parameter.grad, parameter)[at])
                continue
            segment = self._sync.segment_of(parameter)
            if segment is None:  # no rank has a gradient: zero, as ``take_own`` has left it
                continue
            got.fill_(torch.nan)
            mean = segment.parameter.grad
            if mean is not None:
                here = (at >= segment.part.start) & (at < segment.part.stop)
                inside = (at - segment.part.start).clamp(0, len(mean) - 1)
                torch.where(here, mean[inside].to(got.dtype), got, out=got)

    def gather(self, step: int) -> None:
        """Bring all ranks' numbers together, and remove the hooks. Collective.

        step : the one that was watched.
        """
        self.close()
        self._step = step
        size = self._world.size
        shape = (size, *self._numbers.shape)
        self._gathered = self._numbers.new_empty(shape)
        dist.all_gather(list(self._gathered), self._numbers)
        self._numbers = torch.zeros(0)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def result(self) -> GradientClaim:
        """Return what the watched step showed; waits for a GPU once."""
        if self._why_not:
            return GradientClaim(step=0, why_not=self._why_not)
        if self._gathered is None:
            return GradientClaim(step=0, why_not="no step was trained")
        numbers = self._gathered.double().cpu().numpy()
        rounded = any(parameter.dtype.itemsize == 2 for parameter in self._parameters)
        return _explained(numbers[:, _OWN], numbers[:, _GOT], self._columns, self._step, rounded)


def _explained(
    own: Numbers, got: Numbers, columns: Sequence[slice], step: int, rounded: bool
) -> GradientClaim:
    """Return how what the ranks got comes from their own gradients, both (ranks, numbers)."""
    limit = ROUNDED if rounded else EXACT
    got = _joined(got)
    if not (np.isfinite(own).all() and np.isfinite(got).all()):
        return GradientClaim(step=step, why_not=f"a gradient of step {step} is not finite")
    telling = [columns[index] for index in measurable(own, list(columns))]
    if not telling:
        return GradientClaim(step=step, why_not=f"all gradients of step {step} are zero")
    seen = np.concatenate([np.arange(at.start, at.stop) for at in telling])
    apart = own[:, seen] - own[0, seen]
    if np.linalg.norm(apart) <= limit * np.linalg.norm(own[:, seen]):
        why_not = f"all ranks computed the same gradient in step {step}: nothing tells them apart"
        return GradientClaim(step=step, why_not=why_not)
    weights, misfits = fit_ranks(own, got, list(columns), misfit=limit)
    rows = [
        row.tolist() if misfit <= limit else None
        for row, misfit in zip(weights, misfits, strict=True)
    ]
    return GradientClaim(step=step, weights=rows, residue=float(misfits.max()), rounded=rounded)


def _joined(got: Numbers) -> Numbers:
    """Return what the ranks got; where each has only a part of it, all of these on each."""
    parts = np.isnan(got)
    owner = (~parts).argmax(axis=0)  # the first rank that has the number
    shared = np.take_along_axis(got, owner[None], axis=0)
    return np.where(parts, shared, got)


def _coordinates(parameter: nn.Parameter) -> Tensor:
    """Return which entries are kept: shape (at most COORDINATES,), in the order of memory."""
    count = min(COORDINATES, parameter.numel())
    at = torch.arange(count, dtype=torch.float64) * parameter.numel() / max(1, count)
    return at.long().to(parameter.device)


def _in_memory(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return values of a parameter's shape, flat, in the order of the parameter's memory."""
    if values.stride() != parameter.stride():
        values = torch.empty_like(parameter, dtype=values.dtype).copy_(values)
    return values.detach().as_strided((parameter.numel(),), (1,))
