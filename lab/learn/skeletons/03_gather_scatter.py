"""Lesson 3: lesson 2, and rank 0 averages the gradients: gather, mean, scatter.

Run it: torchrun --nproc-per-node 2 learn/03_gather_scatter.py
"""

import torch
import torch.distributed as dist


def average_gradients(model):
    """Leave the mean over all ranks in every gradient. New in lesson 3."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is None:  # a frozen layer
            continue
        arriving = [torch.empty_like(parameter.grad) for _ in range(size)] if rank == 0 else None
        ...  # rank 0 gathers all ranks' gradients into `arriving`: dist.gather(tensor, list, dst=0)
        means = None
        if rank == 0:
            means = ...  # a list with what each rank shall get
        ...  # rank 0 scatters `means`, and each rank receives its own: dist.scatter


ANSWERS = {
    # Divide 3 ranks' sum by a literal 2. How many times the mean is left?
    "a": ...,
    # 3 ranks, VGG-11 (36.92 MB of gradients). How many MB pass rank 0's link in a step?
    "b": ...,
    # VGG-11's gradients are 34 tensors. How many collectives does your function call in a step?
    "c": ...,
}
