"""The pieces of fsdp.py: what a layer is, a rank's rows of a parameter, and a layer's messages."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.collectives import all_gather_single
from common.sync.optimizer_shards import Segment


def layers(model: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of each layer that can be gathered by itself, in the model's order.

    These are the topmost modules below ``model`` that own parameters which train, and share none
    with another module. One with vectors only joins the layer before it.
    """
    owners = Counter(
        p for module in model.modules() for p in module.parameters(recurse=False) if p.requires_grad
    )
    found: list[list[nn.Module]] = []

    def search(module: nn.Module) -> None:
        own = [p for p in module.parameters() if p.requires_grad]
        owns_directly = any(p.requires_grad for p in module.parameters(recurse=False))
        if module is model or not owns_directly:
            for child in module.children():
                search(child)
        elif all(owners[p] == 1 for p in own):
            if found and all(p.dim() == 1 for p in own):
                found[-1].append(module)
            else:
                found.append([module])

    search(model)
    return found


def layer_name(model: nn.Module, module: nn.Module) -> str:
    """Return what an error calls that layer."""
    name = next(name for name, one in model.named_modules() if one is module)
    return f"layer {name!r}" if name else "the whole model"


class ParameterRows:
    """This rank's rows of a parameter: ``whole`` of the model, ``sharded`` of the copy."""

    def __init__(self, whole: nn.Parameter, sharded: Any) -> None:
        self.whole, self._sharded = whole, sharded  # the second one is a DTensor
        self._rows = sharded.detach().to_local()
        self._first_row = dist.get_rank() * -(-len(whole) // dist.get_world_size())
        begin = self._first_row * whole[0].numel()
        self.segment = None
        if self._rows.numel():
            entries = slice(begin, begin + self._rows.numel())
            self.segment = Segment(nn.Parameter(self._rows.view(-1)), entries)

    @torch.no_grad()
    def free_whole(self) -> None:
        """Keep this rank's rows only; who reads the others reads NaN."""
        self._rows.copy_(self.whole[self._first_row :][: len(self._rows)])
        self.whole.data = self.whole.new_full((), float("nan")).expand(self.whole.shape)

    def gather_whole(self) -> None:
        """Give the model all rows. Collective."""
        self.whole.data = self._sharded.detach().full_tensor()

    def pass_gradient(self) -> None:
        """Move this rank's rows of the mean gradient to the parameter that the optimiser has."""
        gradient, self._sharded.grad = self._sharded.grad, None
        if gradient is not None and self.segment is not None:
            self.segment.parameter.grad = gradient.to_local().view(-1)


class _LayerMessage:
    """A message of one layer, as fully_shard sends it by itself, within ``enclosing()``."""

    def __init__(self, enclosing: Callable[[], AbstractContextManager[None]]) -> None:
        self._enclosing = enclosing

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class LayerGather(_LayerMessage):
    """The all_gather of a layer's weights."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._enclosing():
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class LayerReduction(_LayerMessage):
    """The reduce_scatter of a layer's gradients."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._enclosing():
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
