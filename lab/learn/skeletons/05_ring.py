"""Lesson 5: lesson 3's training, with a ring in place of rank 0.

Run it: torchrun --nproc-per-node 2 learn/05_ring.py
"""

import runpy
from pathlib import Path

import torch
import torch.distributed as dist


def exchange(outgoing, incoming):
    """Send a tensor to the next rank of the ring while the one before sends into `incoming`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(outgoing, (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
    sending.wait()


def average_gradients(model):
    """Leave the mean over all ranks in every gradient: a ring of all tensors at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    chunks = flat.tensor_split(size)  # views: what changes in a chunk changes in `flat`
    for step in range(size - 1):  # add up
        leaving, growing = ..., ...  # numbers of chunks; in step 0 rank r sends chunk r
        arriving = torch.empty_like(chunks[growing % size])
        exchange(chunks[leaving % size], arriving)
        chunks[growing % size].add_(arriving)
    for step in range(size - 1):  # pass the sums on
        leaving, replaced = ..., ...  # in step 0 rank r sends the chunk that it has just completed
        exchange(chunks[leaving % size], chunks[replaced % size])
    flat /= size
    means = flat.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


ANSWERS = {
    # How many messages does each rank send in a step on 5 ranks?
    "a": ...,
    # 8 nodes, 0.5 ms from one node to the next. How many ms of a step are latency, however small
    # the gradients are?
    "b": ...,
    # The same if each of VGG-11's 34 tensors goes around the ring by itself?
    "c": ...,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    lesson_3 = runpy.run_path(Path(__file__).with_name("03_gather_scatter.py"))
    losses, model = lesson_3["train"](average_gradients)
    weight = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights {weight:.4f}")
    dist.destroy_process_group()
