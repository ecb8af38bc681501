"""BatchNorm's running statistics over the ranks: one policy for all strategies.

During an epoch each rank's BatchNorm sees its own shards, as in published data-parallel training. Before evaluation and
before a checkpoint the running means and variances are averaged over the ranks, weighted by the samples that each rank
saw; every other buffer is rank 0's. From then on all ranks hold the same buffers, bit for bit.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.sync.base import broadcast_from_rank0


@torch.no_grad()
def agree_on_buffers(model: nn.Module, samples: int) -> None:
    """Average running statistics over the ranks and take the other buffers from rank 0. Collective; exact in float64.

    Parameters
    ----------
    samples : how many training samples this rank has seen since the last call; the weight of its statistics.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
    statistics = [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var)]
    averaged = {id(tensor) for tensor in statistics}
    if statistics:
        device = statistics[0].device
        weight = torch.tensor([float(samples)], dtype=torch.float64, device=device)
        weighted = torch.cat([weight, *(tensor.double().flatten() * weight for tensor in statistics)])
        dist.all_reduce(weighted)
        if weighted[0] > 0:
            means = (weighted[1:] / weighted[0]).split([tensor.numel() for tensor in statistics])
            for tensor, mean in zip(statistics, means, strict=True):
                tensor.copy_(mean.view_as(tensor))
        else:
            broadcast_from_rank0(statistics)
    broadcast_from_rank0([buffer for buffer in model.buffers() if id(buffer) not in averaged])
