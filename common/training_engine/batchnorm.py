"""BatchNorm on several ranks: one policy for all strategies.

During an epoch each rank's BatchNorm sees its own shards alone, as in published data-parallel
training. Before an evaluation or a checkpoint, the running means and variances are averaged over
the shards, weighted by the samples that each has seen. Other buffers are copied from rank 0.
Afterwards all ranks hold the same buffers, bit for bit.

``synchronise_batchnorm`` normalises over all ranks in every step instead, on GPUs.
``ShardStatistics`` serves a rank that computes several shards in turn.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from common.sync.base import broadcast_from_rank0

_Shard = tuple[int, Sequence[Tensor]]  # its samples, and the running statistics of its layers


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]


def statistics(model: nn.Module) -> list[Tensor]:
    """Return the running mean and variance of each BatchNorm layer, in the model's order."""
    pairs = [(layer.running_mean, layer.running_var) for layer in _layers(model)]
    return [tensor for pair in pairs for tensor in pair if tensor is not None]


class ShardStatistics:
    """Running statistics of each of the ``shards`` that this rank computes one after the other.

    A shard's statistics must change as if another rank computed that shard. So each shard has its
    own copy, which is in the model only while that shard is computed. A single shard needs no
    copy: its statistics stay in the model.
    """

    def __init__(self, model: nn.Module, shards: int) -> None:
        means_and_variances = statistics(model)
        counters = [layer.num_batches_tracked for layer in _layers(model)]
        self._in_model = [*means_and_variances, *(n for n in counters if n is not None)]
        self._statistics = len(means_and_variances)
        self._samples = [0] * shards
        self._kept = (
            [self._in_model]
            if shards == 1
            else [[tensor.clone() for tensor in self._in_model] for _ in range(shards)]
        )

    @contextmanager
    def of(self, shard: int, samples: int) -> Iterator[None]:
        """Put shard number ``shard`` into the model, for a forward pass of ``samples`` samples."""
        self._samples[shard] += samples
        if len(self) == 1:
            yield
            return
        _copy(self._in_model, self._kept[shard])
        yield
        _copy(self._kept[shard], self._in_model)

    @torch.no_grad()
    def blend(self) -> None:
        """Put the mean over this rank's shards into the model, for the weights' moving average.

        The mean is not weighted: the shards' numbers of samples differ by one at most.
        """
        if len(self) == 1:
            return
        for position, tensor in enumerate(self._in_model[: self._statistics]):
            tensor.copy_(torch.stack([tensors[position] for tensors in self._kept]).mean(dim=0))

    def take(self) -> list[_Shard]:
        """Return each shard's samples since the last call, and its statistics."""
        counted: list[_Shard] = [
            (count, tensors[: self._statistics])
            for count, tensors in zip(self._samples, self._kept, strict=True)
        ]
        self._samples = [0] * len(self._samples)
        return counted

    def __len__(self) -> int:
        return len(self._samples)

    def spread(self) -> None:
        """Copy the statistics in the model to every shard."""
        for tensors in self._kept:
            _copy(tensors, self._in_model)


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@torch.no_grad()
def agree_on_buffers(model: nn.Module, shards: Sequence[_Shard], size: int) -> None:
    """Average running statistics over all shards; take other buffers from rank 0. Collective.

    Parameters
    ----------
    shards : this rank's shards, as returned by ``ShardStatistics.take``. Each is weighted by its
        number of samples.
    size : the number of ranks.
    """
    running = statistics(model)
    if running:
        _average(running, shards, size)
    if size > 1:
        averaged = {id(tensor) for tensor in running}
        broadcast_from_rank0([buffer for buffer in model.buffers() if id(buffer) not in averaged])


def _average(running: list[Tensor], shards: Sequence[_Shard], size: int) -> None:
    sizes = [tensor.numel() for tensor in running]
    # (1 + all statistics,) float64: the samples, then the sums of samples x statistic
    weighted = torch.zeros(1 + sum(sizes), dtype=torch.float64, device=running[0].device)
    for samples, tensors in shards:
        weighted[0] += samples
        weighted[1:] += samples * torch.cat([tensor.double().flatten() for tensor in tensors])
    if size > 1:
        dist.all_reduce(weighted)
    if weighted[0] > 0:
        means = (weighted[1:] / weighted[0]).split(sizes)
        for tensor, mean in zip(running, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
    elif size > 1:
        broadcast_from_rank0(running)


def synchronise_where_possible(model: nn.Module, device: torch.device) -> tuple[nn.Module, str]:
    """Return the model, on GPUs with SyncBatchNorm, and a notice for the user (may be empty)."""
    if not has_batchnorm(model):
        return model, ""
    if device.type == "cuda":
        wrapped = isinstance(model, DistributedDataParallel)
        return (model if wrapped else synchronise_batchnorm(model)), ""
    return model, "each rank's BatchNorm uses only its own batch: SyncBatchNorm runs on GPUs only"


def synchronise_batchnorm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm layer that trains by torch's SyncBatchNorm and return the model.

    The parameters stay the same objects. CUDA only.
    """
    if isinstance(model, _BatchNorm):
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if _trains(model) else model
    for name, child in model.named_children():
        setattr(model, name, synchronise_batchnorm(child))
    return model


def hold_frozen_batchnorm(model: nn.Module) -> None:
    """Put frozen BatchNorm layers in evaluation mode, so that their statistics do not change."""
    for layer in _layers(model):
        if not _trains(layer):
            layer.eval()


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model has a BatchNorm layer that trains."""
    return any(_trains(layer) for layer in _layers(model))


def _trains(layer: _BatchNorm) -> bool:
    """Whether any parameter of the layer trains; a layer without parameters always does."""
    parameters = list(layer.parameters())
    return not parameters or any(p.requires_grad for p in parameters)


@contextmanager
def without_samples(model: nn.Module) -> Iterator[None]:
    """Keep BatchNorm from learning from an empty batch.

    SyncBatchNorm stays in training mode, since the other ranks wait for this one's statistics.
    """
    learning = [
        layer
        for layer in _layers(model)
        if layer.training and not isinstance(layer, nn.SyncBatchNorm)
    ]
    for layer in learning:
        layer.eval()
    yield
    for layer in learning:
        layer.train()
