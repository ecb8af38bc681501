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
Common mistake: a layer that only some ranks use, or more micro-batches on some ranks. The others
    never join the gather; the first step finds that and says so, a later one hangs. Another:
    ``model.state_dict()`` on rank 0 alone.

(N ranks, M bytes of parameters; alpha seconds per message, B bytes per second on a link.)
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from common.distributed.collectives import all_gather_single
from common.errors import UserError
from common.sync.base import GradientSync, norm_over_ranks
from common.sync.built_in_plans import FSDPPlan
from common.sync.fsdp_layers import (
    LayerGather,
    LayerReduction,
    ParameterRows,
    layer_name,
    layers,
)
from common.sync.optimizer_shards import OptimizerShards


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

    def _shard(self, model: nn.Module) -> "tuple[FullyShardedModel, list[ParameterRows]]":
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
            layer.set_custom_all_gather(LayerGather(partial(self.message, index)))
            layer.set_custom_reduce_scatter(LayerReduction(partial(self.message, index)))
        self._layer_names = [layer_name(sharded, modules[0]) for modules in groups]
        parts = [
            ParameterRows(self._parameters[name], parameter)
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
        return norm_over_ranks(gradients, device=next(iter(self._parameters.values())).device)

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
