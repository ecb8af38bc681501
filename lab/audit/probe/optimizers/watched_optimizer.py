"""One optimiser as the probe knows it: its parameters in a fixed order, and the step under way."""

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..coordinates import coordinates
from ..sampling import dense, index, join, square_norm, take, total
from ..state import Numbers
from .gradients import OwnGradients, OwnSum


class Row:
    """A parameter at its place in the optimiser.

    ``offset`` and ``length`` are this rank's range of the flat parameter; ``serial`` is the number
    of its tensor, in whichever optimiser.
    """

    def __init__(self, tensor: Tensor, group: int, place: int) -> None:
        self.reference = weakref.ref(tensor)
        self.group, self.place, self.serial = group, place, -1
        self.numel, self.sharded = tensor.numel(), is_sharded(tensor)
        self.offset, self.length = _range(tensor) if self.sharded else (0, self.numel)
        self.shape, self.dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.count = sum(
            self.offset <= one < self.offset + self.length for one in coordinates(self.numel)
        )

    def parameter(self) -> Tensor | None:
        """Return the parameter, if it is still alive."""
        return self.reference()

    def gradient(self) -> Tensor | None:
        """Return what the optimiser would get for this parameter now."""
        return None if (tensor := self.reference()) is None else tensor.grad

    def own(self, gradients: OwnGradients) -> OwnSum | None:
        """Return this rank's own gradient; None if it cannot be seen."""
        return None if (tensor := self.reference()) is None else gradients.of(tensor)

    def take(self, tensor: Tensor | None) -> Tensor:
        """Return the samples of this rank's range of the parameter, or of its gradient.

        Zeros without a tensor: shape (count,).
        """
        if tensor is None:
            return torch.zeros(self.count)
        if not self.sharded:
            return take(tensor)
        with torch.no_grad():
            local = dense(tensor.to_local())  # type: ignore[attr-defined]  # it is a DTensor
        return take(local, index(self.numel, local.device, self.offset, self.length))

    def own_samples(self, own: OwnSum | None) -> Tensor:
        """Return the samples of the own gradient: of the whole parameter, also if it is sharded.

        Zeros if no gradient reached the parameter, NaN if nobody knows.
        """
        size = len(coordinates(self.numel))
        if own is None or own.unclear or (own.samples is not None and len(own.samples) != size):
            return torch.full((size,), math.nan)
        return torch.zeros(size) if own.samples is None else own.samples

    def description(self, number: int, names: dict[int, str]) -> list[Any]:
        """Return the row of the record ``params``."""
        key = f"{number}.{self.group}.{self.place}"
        name = names.get(id(self.reference()), key)
        part = [self.offset, self.length]
        return [key, name, self.shape, self.dtype, self.numel, *part, self.serial]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, such as FSDP2's parameters."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def _range(tensor: Any) -> tuple[int, int]:
    """Return offset and length of this rank's part of a flat DTensor.

    (0, 0) if the part is not one range: it is split along another dimension than the first.
    """
    placements = [one for one in tensor.placements if not one.is_replicate()]
    if any(not one.is_shard(0) for one in placements) or len(placements) > 1:
        return 0, 0
    numel, rows = tensor.numel(), tensor.shape[0] if tensor.dim() else 1
    if not placements:
        return 0, numel
    dimension = tensor.placements.index(placements[0])
    rank, size = tensor.device_mesh.get_local_rank(dimension), tensor.device_mesh.size(dimension)
    chunk = -(-rows // size)  # as torch.chunk does it
    first, last = min(rank * chunk, rows), min((rank + 1) * chunk, rows)
    return first * (numel // max(rows, 1)), (last - first) * (numel // max(rows, 1))


class WatchedOptimizer:
    """The parameters of one optimiser, and what is known of its current step.

    ``built`` is the step at which it was first seen; ``number`` is None until its own first step.
    ``sent`` and ``weights`` hold samples that are still on their device.
    """

    def __init__(self, *, built: int) -> None:
        self.number: int | None = None
        self.built = built
        self.steps = -1
        self.rows: list[Row] = []
        self._written_rows = 0
        self.weights: list[Tensor] | None = None
        self.begun = 0.0
        self.place: list[Any] | None = None
        self.next_step()

    def next_step(self) -> None:
        """Begin to observe the next step."""
        self.steps += 1
        self.weights_written = False
        self.sent: list[Tensor] | None = None
        self.clips: list[list[Any]] = []

    def update(self, optimizer: Optimizer) -> list[Row]:
        """Add the parameters that are new in the optimiser's groups, and return their rows."""
        known = {id(row.parameter()) for row in self.rows}
        new = []
        for group, settings in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(settings["params"]):
                if id(tensor) not in known:
                    new.append(Row(tensor, group, place))
        self.rows += new
        return new

    def new_rows(self, names: dict[int, str]) -> list[list[Any]]:
        """Return the descriptions of the rows that have not been written yet."""
        assert self.number is not None
        new = self.rows[self._written_rows :]
        self._written_rows = len(self.rows)
        return [row.description(self.number, names) for row in new]

    def micro(self, gradients: OwnGradients) -> int:
        """Return the number of backward passes whose gradients the next step uses."""
        owns = (row.own(gradients) for row in self.rows)
        return max((own.backwards for own in owns if own is not None), default=0)

    def sample_weights(self) -> list[Tensor]:
        """Return the samples of the parameters."""
        return [row.take(row.parameter()) for row in self.rows]

    def sample_gradients(self) -> list[Tensor]:
        """Return the samples of ``.grad``."""
        return [row.take(row.gradient()) for row in self.rows]

    def own_fields(self, gradients: OwnGradients, write: Numbers) -> dict[str, Any]:
        """Return the fields own, own_norm and micro of the record ``step``."""
        owns = [row.own(gradients) for row in self.rows]
        samples = [row.own_samples(own) for row, own in zip(self.rows, owns, strict=True)]
        seen = [own for own in owns if own is not None and own.calls]
        squares = [own.square for own in seen if own.square is not None]
        return {
            "micro": self.micro(gradients),
            "own": write(join(samples)),
            "own_norm": total(squares) if len(squares) == len(seen) else None,
        }

    def gradient_fields(self, divisor: Tensor | None, write: Numbers) -> dict[str, Any]:
        """Return the fields got, got_norm and sent.

        ``divisor`` is what a fused optimiser itself will divide the gradients by.
        """
        scale = 1.0 if divisor is None else float(divisor)
        whole = [one for row in self.rows if (one := row.gradient()) is not None]
        sharded = any(row.sharded for row in self.rows)
        return {
            "got": write(join(one / scale for one in self.sample_gradients())),
            "got_norm": None if sharded else total([square_norm(one) for one in whole]) / scale,
            "sent": None if self.sent is None else write(join(self.sent)),
        }
