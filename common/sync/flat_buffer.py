"""Gradients in flat buffers, one for each type of entry: ``FlatBuffers.of`` finds or makes them, ``collect`` fills one.

A flat buffer makes one message of many. It is made once and kept; each step's gradients are copied in, divided by the
number of ranks on the way. Then ``p.grad`` becomes a view of the buffer, so that nothing is copied back: what the
exchange leaves in the buffer is what the optimiser reads. ``zero_grad(set_to_none=True)`` drops the view, not the buffer,
and backward makes a gradient of its own again.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class FlatBuffer:
    """One contiguous ``tensor`` with a view, of the parameter's shape and strides, for each parameter's gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        self.tensor = torch.zeros(
            sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device
        )
        parts = self.tensor.split([p.numel() for p in self.parameters])
        # With the parameter's own strides (channels_last too) copies and the optimiser run through memory in one go.
        self.views = {
            p: part.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
            for p, part in zip(self.parameters, parts, strict=True)
        }

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, *, divisor: int) -> None:
        """Copy a parameter's gradient into its view, divided; zeros where it has none."""
        if parameter.grad is None:
            self.views[parameter].zero_()
        else:
            torch.div(parameter.grad, divisor, out=self.views[parameter])
        parameter.grad = self.views[parameter]

    def collect(self, *, divisor: int) -> Tensor:
        """Take every gradient; return the buffer."""
        for parameter in self.parameters:
            self.take(parameter, divisor=divisor)
        return self.tensor


class FlatBuffers:
    """The buffers of a strategy, kept from step to step."""

    def __init__(self) -> None:
        self._buffers: list[FlatBuffer] = []
        self._parameters: list[int] = []

    def of(self, parameters: Sequence[nn.Parameter]) -> list[FlatBuffer]:
        """Return the buffers for these parameters, one a type of entry; new ones where the parameters are others."""
        now = [id(p) for p in parameters]
        if now != self._parameters:
            self._parameters, self._buffers = (
                now,
                [FlatBuffer(group) for group in by_type(parameters)],
            )
        return self._buffers


def by_type(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in groups of one type and device each, by first appearance."""
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(groups.values())
