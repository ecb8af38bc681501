"""Lesson 3: lesson 2, and rank 0 averages all gradients: gather, mean, scatter.

Run it: torchrun --nproc-per-node 2 learn/03_gather_scatter.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, LEARNING_RATE = 64, 0.1


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def build_loader():
    """Return a loader of 1,797 images of 8 x 8 grey pixels in a row, with their labels."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=0)
    return DataLoader(data, GLOBAL_BATCH // size, sampler=sampler)


def average_gradients(model):
    """Leave the mean over all ranks in every gradient. New in lesson 3."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is None:  # a frozen layer
            continue
        arriving = [torch.empty_like(parameter.grad) for _ in range(size)] if rank == 0 else None
        ...  # every rank's gradient goes into rank 0's `arriving`: dist.gather
        means = ... if rank == 0 else None  # a list: what each rank shall get
        ...  # means[r] goes into rank r's gradient: dist.scatter


def train(average, epochs=3):
    """Return the loss of each step on this rank, and the model."""
    model, loader = build_model(), build_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            average(model)  # new in lesson 3
            optimizer.step()
            losses.append(loss.item())
    return losses, model


ANSWERS = {
    # Divide 3 ranks' sum by a literal 2. How many times the mean is left?
    "a": ...,
    # 3 ranks, VGG-11 (36.92 MB of gradients). How many MB pass rank 0's link in a step, in and out?
    "b": ...,
    # VGG-11's gradients are 34 tensors. How many collectives does your function call in a step?
    "c": ...,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, model = train(average_gradients)
    weight = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights {weight:.4f}")
    dist.destroy_process_group()
