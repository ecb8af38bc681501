"""Lesson 2: several ranks train on a share each, and say nothing to each other.

Run it: torchrun --nproc-per-node 2 learn/02_two_ranks.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, LEARNING_RATE = 64, 0.1


def build_model():
    torch.manual_seed(...)  # all ranks must begin with the same weights
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def build_loader():
    """Return a loader of 1,797 images of 8 x 8 grey pixels in a row, with their labels."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(data, num_replicas=..., rank=..., seed=0)  # a share for each rank
    return DataLoader(data, ..., sampler=sampler)  # all ranks together: GLOBAL_BATCH


def train(epochs=3):
    """Return the loss of each step on this rank, and the model."""
    model, loader = build_model(), build_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for epoch in range(epochs):
        ...  # the sampler shuffles by its seed and the epoch: tell it this `epoch`
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


ANSWERS = {
    # Run `lab audit -- torchrun learn/02_two_ranks.py`. What do the ranks exchange? (One word.)
    "a": ...,
    # On 5 ranks the 1,797 samples cannot be shared out evenly, and the sampler uses some twice.
    # How many in an epoch?
    "b": ...,
    # Somebody gives each rank batches of 64, and starts 5 ranks. What is the global batch?
    "c": ...,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")  # torchrun has told this process its rank and the size
    losses, model = train()
    weight = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights {weight:.4f}")
    dist.destroy_process_group()
