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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from common.distributed.collectives import all_gather_single, check_same_on_all_ranks
from common.distributed.process_group import current_world
from common.errors import UserError
from common.sync.base import GradientSync
from common.sync.optimizer_shards import OptimizerShards, Segment


class FSDP(GradientSync):
    """Trains a sharded copy of the model.

    Raises UserError in ``prepare`` unless the optimiser treats each entry by itself; in the first
    step, if the ranks use different layers.
    """

    equal_gradients = False
    # The copy that trains, an FSDPModule; its ``whole_model`` is the model as it was given.
    _sharded: Any = None

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Shard a copy of the model and return it; a second call takes another optimiser."""
        again = self._sharded is not None and model in (self._sharded, self._sharded.whole_model)
        if again:
            model = self._sharded.whole_model
        self.sync_replicas(model)
        self.close()
        model.to(memory_format=torch.contiguous_format)  # fully_shard takes no other strides
        super().prepare(model, optimizer)
        # The weights first: whoever gathers the optimiser's state needs their strides.
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self.wait_for_weights()),
            model.register_state_dict_pre_hook(lambda *_: self.wait_for_weights()),
        ]
        self._shards = OptimizerShards(optimizer)
        if not again:
            self._shard(model)
        self._weights_are_whole = True
        return self._sharded

    def _shard(self, model: nn.Module) -> None:
        # The copy's modules have the model's own parameters and buffers.
        kept = [*model.parameters(), *model.buffers(), *_process_groups(model)]
        sharded = copy.deepcopy(model, {id(value): value for value in kept})
        self._world = current_world(next(model.parameters()).device)
        mesh = init_device_mesh(self._world.device.type, (self._world.size,))
        frozen = {p for p in model.parameters() if not p.requires_grad}
        names = {module: name for name, module in sharded.named_modules()}
        self._first_step = True
        for modules in [*layers(sharded), [sharded]]:
            fully_shard(modules, mesh=mesh, reshard_after_forward=True, ignored_params=frozen)
            layer: Any = modules[0]  # fully_shard has made it an FSDPModule
            enclosing = partial(self._message, names[modules[0]] or "the whole model")
            layer.set_custom_all_gather(_LayerMessage(all_gather_single, enclosing))
            layer.set_custom_reduce_scatter(_LayerMessage(dist.reduce_scatter_tensor, enclosing))
        self._rows = [
            ParameterRows(self._parameters[name], parameter)
            for name, parameter in sharded.named_parameters()
            if name in self._parameters
        ]
        sharded.register_forward_pre_hook(self._begin_forward, prepend=True)
        vars(sharded)["whole_model"] = model  # not as a module, whose parameters would be its own
        self._sharded = sharded

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See the base class. Gathers weights as any other pass, and keeps whole gradients."""
        self._sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)

    def _begin_forward(self, sharded: Any, _inputs: object) -> None:
        """Keep only this rank's part of the weights and of the optimiser's state."""
        if sharded.whole_model._compiled_call_impl is not None:
            raise UserError("fsdp cannot train a compiled model: leave out --compile")
        if self._weights_are_whole:
            assert self._shards is not None, "prepare comes first"
            self._shards.shard({rows.whole: rows.segment for rows in self._rows})
            for rows in self._rows:
                rows.free_whole()
            self._weights_are_whole = False

    def synchronize(self, model: nn.Module) -> None:
        """Pass the mean gradients that backward has reduced to the optimiser."""
        self._compare_layers("the end of backward")
        self._first_step = False
        for rows in self._rows:
            rows.pass_gradient()

    def wait_for_weights(self) -> None:
        """Gather the whole weights, one all_gather a parameter. Collective."""
        if self._sharded is not None and not self._weights_are_whole:
            for rows in self._rows:
                rows.gather_whole()
            self._weights_are_whole = True

    @contextmanager
    def _message(self, layer: str) -> Iterator[None]:
        """Enclose a message of that layer; in the first step, check that all ranks send it."""
        self._compare_layers(layer)
        if dist.get_backend() == dist.Backend.NCCL:  # the message is only queued here
            yield
            return
        with self.waiting():
            yield

    def _compare_layers(self, layer: str) -> None:
        """Raise UserError in the first step if other ranks are at another layer. Collective then.

        Otherwise tensors of different layers would meet in one message, or a rank would wait.
        """
        if self._first_step:
            check_same_on_all_ranks(
                self._world,
                {"layer": layer},
                what="the order in which they use layers, which fsdp gathers on all ranks together",
            )


def _process_groups(model: nn.Module) -> list[object]:
    """Return the groups of layers such as SyncBatchNorm, which cannot be copied."""
    groups = [getattr(module, "process_group", None) for module in model.modules()]
    return [group for group in groups if group is not None]


def layers(model: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of each layer that can be gathered by itself, in the model's order.

    These are the topmost modules below ``model`` that own parameters which train, and share none
    with another module. One with vectors only joins the layer before it.
    """
    owners = Counter(
        parameter for module in model.modules() for parameter in _trained(module, recurse=False)
    )
    found: list[list[nn.Module]] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        owns_some = bool(_trained(module, recurse=False))
        if module is model or module in inside or not owns_some:
            continue
        inside.update(module.modules())
        own = _trained(module)
        if any(owners[parameter] > 1 for parameter in own):
            continue
        has_vectors_only = all(parameter.dim() == 1 for parameter in own)
        if found and has_vectors_only:
            found[-1].append(module)
        else:
            found.append([module])
    return found


def _trained(module: nn.Module, *, recurse: bool = True) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=recurse) if p.requires_grad]


class ParameterRows:
    """This rank's rows of a parameter: ``whole`` of the model, ``sharded`` of the copy."""

    def __init__(self, whole: nn.Parameter, sharded: Any) -> None:
        self.whole = whole
        self._sharded = sharded  # a DTensor
        self._rows = sharded.detach().to_local()
        self._first_row = dist.get_rank() * -(-len(whole) // dist.get_world_size())
        begin = self._first_row * whole[0].numel()
        own = nn.Parameter(self._rows.view(-1))
        self.segment = Segment(own, slice(begin, begin + len(own)))

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
        gradient = self._sharded.grad
        self._sharded.grad = None
        if gradient is not None and len(self.segment.parameter):
            self.segment.parameter.grad = gradient.to_local().view(-1)


class _LayerMessage:
    """The message of one layer that ``send`` sends, within ``enclosing()``; see fully_shard."""

    def __init__(
        self,
        send: Callable[..., dist.Work | None],
        enclosing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._send = send
        self._enclosing = enclosing

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any
    ) -> dist.Work | None:
        with self._enclosing():
            return self._send(output_tensor, input_tensor, group=group, **options)
