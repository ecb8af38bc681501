"""PyTorch's ``fully_shard``: a rank keeps 1/N of everything, and gathers a layer when it is needed.

    forward    g ### g ### g ###                      g: all_gather of one layer's weights
    backward                     g ### r g ### r ### r    r: reduce_scatter of its gradients
    update                                            #   1/N of it

A layer's whole weights exist only while the layer computes: after its forward they are freed, and
backward gathers them again. So a rank needs 1/N of weights, gradients and optimiser state, and one
layer. A layer here is a module that owns parameters; one with vectors only (BatchNorm) joins the
layer before it. Parameters that two layers share belong to the whole model, which is gathered
first and freed last. Frozen parameters are not sharded.

``fully_shard`` works on a copy of the model, which shares its buffers. The model itself is for
    evaluation and checkpoints: ``sync_replicas`` gathers its weights, and the optimiser's state;
    the next forward pass in training frees them again, and until then they read NaN. Change the
    model, e.g. freeze a layer, before the training begins: the copy does not follow.
Sends: a rank 3(N-1)K messages for K layers. With NCCL 3(N-1)/N M bytes: (N-1)/N M for each of the
    two gathers, and for the reduction. With Gloo 4(N-1)/N M: its reduce_scatter is a whole
    all_reduce inside. Rounding up to whole rows adds a little.
Time: NCCL gathers the next layer while one computes. Gloo does not, and every message is exposed:
    4(N-1)/N M / B + 4(N-1)K alpha. [Zhao et al., PyTorch FSDP, arXiv:2304.11277]
Common mistake: a layer that only some ranks use. The others never join its gather; the first step
    finds that and says so, a later one hangs. Another: ``model.state_dict()`` on rank 0 alone.

(N ranks, M bytes of parameters; alpha seconds per message, B bytes per second on a link.)
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from common.distributed.collectives import all_gather_single
from common.errors import UserError
from common.sync.base import GradientSync
from common.sync.built_in_plans import FSDPPlan
from common.sync.optimizer_shards import OptimizerShards, Segment


class FSDP(FSDPPlan, GradientSync):
    """Trains a sharded copy of the model.

    Raises UserError in ``prepare`` if a parameter is a scalar, or unless the optimiser treats each
    entry by itself; in the first step, if the ranks use different layers.
    """

    equal_gradients = False
    _training: "FullyShardedModel | None" = None
    _optimizer: OptimizerShards | None = None
    _hooks: Sequence[Any] = ()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Shard a copy of the model and return it; a second call takes another optimiser."""
        again = self._training is not None and model in (
            self._training,
            self._training.whole_model,
        )
        if again:
            assert self._training is not None
            model = self._training.whole_model
            self.sync_replicas(model)
        self.close()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.contiguous()  # fully_shard takes no other strides
        super().prepare(model, optimizer)
        # The weights first: whoever gathers the optimiser's state needs their strides.
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self._gather_weights()),
            model.register_state_dict_pre_hook(lambda *_: self._gather_weights()),
        ]
        self._optimizer = OptimizerShards(optimizer)
        if not again:
            self._training, self._parts = self._shard(model)
        assert self._training is not None
        self._weights_are_whole = True
        return self._training

    def _shard(self, model: nn.Module) -> "tuple[FullyShardedModel, list[_Part]]":
        for name, parameter in self._parameters.items():
            if parameter.dim() == 0:
                raise UserError(
                    f"fsdp: parameter {name!r} is a scalar, which fully_shard cannot share out "
                    "among the ranks: give it the shape (1,), or choose another strategy"
                )
        tensors = (*model.parameters(), *model.buffers())
        sharded = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        device = next(iter(self._parameters.values())).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        frozen = {p for p in model.parameters() if not p.requires_grad}
        groups = [*layers(sharded), [sharded]]
        self._first_step = True
        for index, modules in enumerate(groups):
            fully_shard(modules, mesh=mesh, reshard_after_forward=True, ignored_params=frozen)
            layer: Any = modules[0]  # fully_shard has made it an FSDPModule
            layer.set_custom_all_gather(_AllGather(self, index))
            layer.set_custom_reduce_scatter(_ReduceScatter(self, index))
        self._layer_names = [_name(sharded, modules[0]) for modules in groups]
        parts = [
            _Part(self._parameters[name], parameter)
            for name, parameter in sharded.named_parameters()
            if name in self._parameters
        ]
        return FullyShardedModel(self, sharded, model), parts

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See the base class. Gathers weights as any other pass, and keeps whole gradients."""
        assert self._training is not None, "prepare comes first"
        sharded = cast(FSDPModule, self._training.sharded)
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    def begin_forward(self) -> None:
        """Keep only this rank's part of the weights and of the optimiser's state."""
        if not self._weights_are_whole:
            return
        assert self._optimizer is not None
        self._optimizer.shard({part.whole: part.segment for part in self._parts})
        for part in self._parts:
            part.free_whole()
        self._weights_are_whole = False

    def synchronize(self, model: nn.Module) -> None:
        """Pass the mean gradients that backward has reduced to the optimiser."""
        self.compare_layers(len(self._layer_names))
        self._first_step = False
        for part in self._parts:
            part.pass_gradient()

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """See the base class: one all_reduce of 8 bytes."""
        device = next(iter(self._parameters.values())).device
        norm = get_total_norm(gradients).to(device)
        squares = norm.double().square()
        dist.all_reduce(squares)
        return squares.sqrt().to(norm.dtype)

    def wait_for_weights(self) -> None:
        """Gather the whole weights, one all_gather a parameter. Collective."""
        self._gather_weights()

    def sync_replicas(self, model: nn.Module) -> None:
        """Gather the whole weights, and the optimiser's state."""
        self._gather_weights()
        if self._optimizer is not None:
            self._optimizer.gather()

    def _gather_weights(self) -> None:
        if self._training is None or self._weights_are_whole:
            return
        for part in self._parts:
            part.gather_whole()
        self._weights_are_whole = True

    def close(self) -> None:
        """Remove the hooks. What ``sync_replicas`` has not gathered is lost."""
        for hook in self._hooks:
            hook.remove()
        if self._optimizer is not None:
            self._optimizer.close()
        self._hooks, self._optimizer = [], None

    @contextmanager
    def message(self, layer: int) -> Iterator[None]:
        """Enclose a message of that layer; in the first step, check that all ranks send it."""
        self.compare_layers(layer)
        # NCCL's messages are only queued here.
        with nullcontext() if dist.get_backend() == dist.Backend.NCCL else self.waiting():
            yield

    def compare_layers(self, layer: int) -> None:
        """Raise UserError in the first step if other ranks are at another layer. Collective then.

        Otherwise tensors of different layers would meet in one message, or a rank would wait.
        """
        if not self._first_step:
            return
        device = next(iter(self._parameters.values())).device
        found = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
        all_gather_single(found, torch.tensor([layer], device=device))
        names = [*self._layer_names, "the end of backward"]
        by_rank = [names[index] for index in found.tolist()]
        for rank, name in enumerate(by_rank):
            if name != by_rank[0]:
                raise UserError(
                    f"fsdp: rank 0 is at {by_rank[0]}, but rank {rank} at {name}. fully_shard "
                    "gathers a layer on all ranks together, so every rank must use the same layers "
                    "in the same order: use each layer on every rank, or choose another strategy"
                )


class FullyShardedModel(nn.Module):
    """Trains ``sharded``, the copy of ``whole_model`` whose parameters are shared out."""

    def __init__(self, sync: FSDP, sharded: nn.Module, whole_model: nn.Module) -> None:
        super().__init__()
        self.sharded = sharded
        self._others = (sync, whole_model)  # in a tuple: not among this module's parameters

    @property
    def whole_model(self) -> nn.Module:
        """The model as it was given; its weights are whole after ``sync_replicas``."""
        return self._others[1]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the sharded model."""
        if self.whole_model._compiled_call_impl is not None:
            raise UserError("fsdp cannot train a compiled model: leave out --compile")
        self._others[0].begin_forward()
        return self.sharded(*inputs, **options)


class _Part:
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
    """A message of one layer, as FSDP sends it by itself; the strategy times it."""

    def __init__(self, sync: FSDP, layer: int) -> None:
        self._sync, self._layer = sync, layer

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_LayerMessage):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._sync.message(self._layer):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_LayerMessage):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._sync.message(self._layer):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )


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


def _name(model: nn.Module, module: nn.Module) -> str:
    name = next(name for name, one in model.named_modules() if one is module)
    return f"layer {name!r}" if name else "the whole model"
