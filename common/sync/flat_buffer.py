"""Flat buffers, in which one message carries many gradients.

A buffer is made once and kept. In every step, each gradient is divided by the number of ranks and
copied into the buffer. Then ``p.grad`` becomes a view of the buffer, so nothing is copied back: the
optimiser reads the result of the exchange in the buffer itself. ``zero_grad(set_to_none=True)``
drops the view, not the buffer; the next backward makes a new gradient, which is copied in again.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from common.utils.grouping import grouped


class FlatBuffer:
    """One contiguous ``tensor``, and ``views``: for each parameter its part, in its shape.

    Zeros at the end fill the tensor up to a length that is a multiple of ``multiple_of``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, multiple_of: int = 1) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        lengths = [p.numel() for p in self.parameters]
        padded = -(-sum(lengths) // multiple_of) * multiple_of
        self.tensor = torch.zeros(padded, dtype=first.dtype, device=first.device)
        # With the parameter's own strides (channels_last too), copies and the optimiser run
        # through memory in one go. The meta device computes strides without allocating.
        self.views = {
            p: part.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
            for p, part in zip(
                self.parameters, self.tensor[: sum(lengths)].split(lengths), strict=True
            )
        }

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, *, divisor: int) -> None:
        """Copy a parameter's gradient, divided, into its view; zeros if it has none."""
        if not self.tensor.untyped_storage().nbytes():  # after ``free``
            self.tensor.untyped_storage().resize_(self.tensor.nbytes)
        if parameter.grad is None:
            self.views[parameter].zero_()
        else:
            torch.div(parameter.grad, divisor, out=self.views[parameter])
        parameter.grad = self.views[parameter]

    def free(self) -> None:
        """Give the memory back until the next ``take``; nothing may read it in between."""
        self.tensor.untyped_storage().resize_(0)


def by_type(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters that train, of each dtype on each device: these may share a buffer."""
    pairs = (((p.dtype, p.device), p) for p in parameters if p.requires_grad)
    return list(grouped(pairs).values())
