"""BatchNorm on several ranks: one policy for all strategies.

During an epoch each rank's BatchNorm sees its own shards alone, as in published data-parallel
training. Before an evaluation or a checkpoint, the running means and variances are averaged over
the shards, weighted by the samples that each has seen. Other buffers are copied from rank 0.
Afterwards all ranks hold the same buffers, bit for bit.

``synchronise_batchnorm`` normalises over all ranks in every step instead.
``ShardStatistics`` serves a rank that computes several shards in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.models.sync_batchnorm import MessageGroup, SyncBatchNorm
from common.sync.base import broadcast_from_rank0
from common.sync.plans.batchnorm import BatchNormLayer

_SYNCHRONISED = (nn.SyncBatchNorm, SyncBatchNorm)
_Shard = tuple[int, Tensor]  # its samples, and its statistics as ``read`` returns them


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]


def statistics(model: nn.Module) -> list[Tensor]:
    """Return the running mean and variance, and the number of batches, of each BatchNorm layer."""
    found: list[Tensor | None] = []
    for layer in _layers(model):
        found += [layer.running_mean, layer.running_var, layer.num_batches_tracked]
    return [tensor for tensor in found if tensor is not None]


def read(model: nn.Module) -> Tensor:
    """Return all statistics in one vector, float64 of shape (entries,)."""
    tensors = [tensor.double().flatten() for tensor in statistics(model)]
    return torch.cat(tensors) if tensors else torch.zeros(0)


@torch.no_grad()
def _write(model: nn.Module, vector: Tensor) -> None:
    """Put statistics that ``read`` returned, or a mean of some, into the model."""
    tensors = statistics(model)
    parts = vector.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        value = part if tensor.is_floating_point() else part.round()
        tensor.copy_(value.view_as(tensor))


class ShardStatistics:
    """Statistics of each of the ``shards`` that this rank computes one after the other.

    A shard's statistics must change as if another rank computed that shard. So each shard has its
    own copy, which is in the model only while that shard is computed. A single shard needs no
    copy: its statistics stay in the model.
    """

    def __init__(self, model: nn.Module, shards: int) -> None:
        self._model = model
        self._samples = [0] * shards
        # Each shard's statistics, if there are several
        self._kept = [read(model)] * shards if shards > 1 else []

    def of(self, shard: int, samples: int) -> AbstractContextManager[None]:
        """Put shard number ``shard`` into the model, for a forward pass of ``samples`` samples."""
        self._samples[shard] += samples
        return self._in_model(shard) if self._kept else nullcontext()

    @contextmanager
    def _in_model(self, shard: int) -> Iterator[None]:
        _write(self._model, self._kept[shard])
        yield
        self._kept[shard] = read(self._model)

    def blend(self) -> None:
        """Put the mean over this rank's shards into the model, for the weights' moving average.

        The mean is not weighted: the shards' numbers of samples differ by one at most.
        """
        if self._kept:
            _write(self._model, torch.stack(self._kept).mean(dim=0))

    def take(self) -> list[_Shard]:
        """Return each shard's samples since the last call, and its statistics."""
        counted = list(zip(self._samples, self._kept or [read(self._model)], strict=True))
        self._samples = [0] * len(self._samples)
        return counted

    def __len__(self) -> int:
        return len(self._samples)

    def spread(self) -> None:
        """Copy the statistics in the model to every shard."""
        self._kept = [read(self._model)] * len(self._kept)


@torch.no_grad()
def agree_on_buffers(model: nn.Module, shards: Sequence[_Shard], size: int) -> None:
    """Average statistics over all shards; take other buffers from rank 0. Collective.

    Parameters
    ----------
    shards : this rank's shards, as returned by ``ShardStatistics.take``. Each is weighted by its
        number of samples.
    size : the number of ranks.
    """
    averaged = {id(tensor) for tensor in statistics(model)}
    if averaged:
        _average(model, shards, size)
    if size > 1:
        broadcast_from_rank0([buffer for buffer in model.buffers() if id(buffer) not in averaged])


def _average(model: nn.Module, shards: Sequence[_Shard], size: int) -> None:
    # (1 + entries,) float64: the samples, then the sums of samples x statistic
    rows = [samples * nn.functional.pad(vector, (1, 0), value=1.0) for samples, vector in shards]
    weighted = torch.stack(rows).sum(dim=0)
    if size > 1:
        dist.all_reduce(weighted)
    if weighted[0] > 0:  # else no rank has trained, and all hold the same
        _write(model, weighted[1:] / weighted[0])


def synchronise_batchnorm(
    model: nn.Module,
    *,
    ours: bool,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> nn.Module:
    """Replace every BatchNorm layer that trains by SyncBatchNorm, and return the model. Collective.

    The parameters and buffers stay the same objects. A model that DistributedDataParallel wraps is
    changed within it.

    ours : use this project's SyncBatchNorm (sync_batchnorm.py) rather than PyTorch's, which needs
        a GPU.
    waiting : encloses each wait of our layers for the other ranks.
    """
    if not any(map(_can_be_synchronised, model.modules())):
        return model
    return _convert(model, MessageGroup(waiting), ours)


def _convert(module: nn.Module, messages: MessageGroup, ours: bool) -> nn.Module:
    if _can_be_synchronised(module):
        if ours:
            return SyncBatchNorm.in_place_of(module, messages)
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(module, messages.group)
        converted.register_forward_hook(_connect_empty_batch)
        return converted
    for name, child in module.named_children():
        setattr(module, name, _convert(child, messages, ours))
    return module


def synchronised_layers(model: nn.Module) -> list[BatchNormLayer]:
    """Return the layers that ``synchronise_batchnorm`` replaces or has replaced, in their order."""
    layers = []
    before: set[int] = set()  # ids: a parameter of several modules counts once
    for module in model.modules():
        if isinstance(module, _BatchNorm) and _trains(module):
            layers.append(BatchNormLayer(module.num_features, len(before)))
        before |= {id(p) for p in module.parameters(recurse=False) if p.requires_grad}
    return layers


def _connect_empty_batch(
    layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor | None:
    """Give an empty batch gradients of zero, which PyTorch's SyncBatchNorm leaves out.

    Without them this layer and all before it had none, and the other ranks would wait for them.
    """
    if output.numel() > 0:
        return None  # the output stays
    [images] = inputs
    by_channel = [1, -1, *[1] * (images.dim() - 2)]
    return sum((p.view(by_channel) for p in layer.parameters()), start=output + images)


def _can_be_synchronised(module: nn.Module) -> TypeGuard[_BatchNorm]:
    if not isinstance(module, _BatchNorm) or isinstance(module, _SYNCHRONISED):
        return False
    return _trains(module)


def hold_frozen_batchnorm(model: nn.Module) -> None:
    """Put frozen BatchNorm layers in evaluation mode, so that their statistics do not change."""
    for layer in _layers(model):
        if not _trains(layer):
            layer.eval()


def _trains(layer: _BatchNorm) -> bool:
    """Whether any parameter of the layer trains; a layer without parameters always does."""
    parameters = list(layer.parameters())
    return not parameters or any(p.requires_grad for p in parameters)


@contextmanager
def without_samples(model: nn.Module) -> Iterator[None]:
    """Keep BatchNorm from learning from an empty batch.

    SyncBatchNorm stays in training mode, since the other ranks wait for this one's statistics.
    """
    others = [layer for layer in _layers(model) if not isinstance(layer, _SYNCHRONISED)]
    learning = [layer for layer in others if layer.training]
    for layer in learning:
        layer.eval()
    yield
    for layer in learning:
        layer.train()
