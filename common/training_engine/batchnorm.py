"""BatchNorm over the ranks: one policy for all strategies.

During an epoch each rank's BatchNorm sees its own shards, as in published data-parallel training.
Before evaluation and before a checkpoint the running means and variances are averaged over the
shards, weighted by the samples that each has seen; every other buffer is rank 0's. From then on all
ranks hold the same buffers, bit for bit.

``synchronise_batchnorm`` replaces this by statistics over all ranks in every step, on GPUs.
``ShardStatistics`` is for a rank that computes several shards in turn.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.sync.base import broadcast_from_rank0


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]


def statistics(model: nn.Module) -> list[Tensor]:
    """Return running mean and variance of each BatchNorm layer, in the model's order."""
    pairs = [(layer.running_mean, layer.running_var) for layer in _layers(model)]
    return [tensor for pair in pairs for tensor in pair if tensor is not None]


class ShardStatistics:
    """Running statistics of each of the ``shards`` that this rank computes one after the other.

    A shard's BatchNorm must move as if a rank of its own computed it. So each shard has its own
    copy, which lies in the model only while that shard is computed. One shard needs no copy.
    """

    def __init__(self, model: nn.Module, shards: int) -> None:
        means_and_variances = statistics(model)
        counters = [layer.num_batches_tracked for layer in _layers(model)]
        self._in_model = [*means_and_variances, *(n for n in counters if n is not None)]
        self._statistics = len(means_and_variances)
        self._samples = [0] * shards
        copies = shards if shards > 1 else 0
        self._kept = [[tensor.clone() for tensor in self._in_model] for _ in range(copies)]

    @contextmanager
    def of(self, shard: int, samples: int) -> Iterator[None]:
        """Compute ``samples`` samples of this rank's shard number ``shard`` inside."""
        self._samples[shard] += samples
        if self._kept:
            _copy(self._in_model, self._kept[shard])
        yield
        if self._kept:
            _copy(self._kept[shard], self._in_model)

    @torch.no_grad()
    def blend(self) -> None:
        """Put the mean over this rank's shards into the model, for the weights' moving average.

        It is exact where the shards have equally many samples; they differ by one at most.
        """
        for position, tensor in enumerate(self._in_model[: self._statistics]):
            if self._kept:
                tensor.copy_(torch.stack([tensors[position] for tensors in self._kept]).mean(dim=0))

    def take(self) -> list[tuple[int, list[Tensor]]]:
        """Return (samples, statistics) of each shard since the last call."""
        copies = self._kept or [self._in_model]
        counted = [
            (count, tensors[: self._statistics])
            for count, tensors in zip(self._samples, copies, strict=True)
        ]
        self._samples = [0] * len(self._samples)
        return counted

    def __len__(self) -> int:
        return len(self._samples)

    def spread(self) -> None:
        """Copy what the model holds now to every shard."""
        for tensors in self._kept:
            _copy(tensors, self._in_model)


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@torch.no_grad()
def agree_on_buffers(model: nn.Module, shards: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
    """Average running statistics over all shards; take other buffers from rank 0. Collective.

    Parameters
    ----------
    shards : for each shard of this rank, the training samples since the last call, which weight its
        statistics, and those statistics, in the order of the model's layers. Sums are float64.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size == 1 and len(shards) == 1:
        return
    running = statistics(model)
    if running:
        _average(running, shards, size)
    if size > 1:
        averaged = {id(tensor) for tensor in running}
        broadcast_from_rank0([buffer for buffer in model.buffers() if id(buffer) not in averaged])


def _average(
    running: list[Tensor], shards: Sequence[tuple[int, Sequence[Tensor]]], size: int
) -> None:
    sizes = [tensor.numel() for tensor in running]
    # (1 + all statistics,): the samples, then the sum of samples x statistic
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
    """Put BatchNorm layers that do not train in evaluation mode, so that their statistics stay."""
    for layer in _layers(model):
        if not _trains(layer):
            layer.eval()


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model has a BatchNorm layer that trains."""
    return any(_trains(layer) for layer in _layers(model))


def _trains(layer: _BatchNorm) -> bool:
    """Whether any parameter of the layer does; a layer without parameters follows the training."""
    parameters = list(layer.parameters())
    return not parameters or any(p.requires_grad for p in parameters)


@contextmanager
def without_samples(model: nn.Module) -> Iterator[None]:
    """Keep BatchNorm from learning from an empty batch; SyncBatchNorm still communicates."""
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
