"""Lesson 11: built-in DDP, with gradient accumulation and a checkpoint.

Run it: torchrun --nproc-per-node 2 learn/11_ddp.py
"""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, MICRO_BATCHES, LEARNING_RATE = 64, 2, 0.1


def build_model():
    torch.manual_seed(dist.get_rank())  # other weights on each rank: DDP sends rank 0's to all
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def build_loader():
    """Return a loader of 1,536 images, 24 global batches, in micro-batches of this rank."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:1536] / 16, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(labels[:1536]))
    batch = GLOBAL_BATCH // dist.get_world_size() // MICRO_BATCHES
    return DataLoader(data, batch, sampler=DistributedSampler(data, seed=0))


def train(epochs=2):
    """Return the loss of each micro-batch on this rank, and the model."""
    model = ...  # build_model(), in a DistributedDataParallel
    loader = build_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader, 1):
            is_last = number % MICRO_BATCHES == 0  # of its step
            # All but the last only add to .grad, and send nothing.
            with contextlib.nullcontext() if is_last else ...:
                loss = nn.functional.cross_entropy(model(images), labels)
                (loss / ...).backward()  # the losses of a step shall add up to their mean
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


def save(model, path):
    """Save the weights so that `build_model()` can load them, without DDP."""
    if ...:  # one rank writes the file
        torch.save(..., path)


ANSWERS = {
    # How many MB does DDP's first bucket for VGG-11 hold?
    "a": ...,
    # 4 ranks train VGG-11 (36.92 MB of gradients) with 4 micro-batches a step. Without no_sync, how
    # many MB does each rank send in a step, in a ring?
    "b": ...,
    # What does DDP put before each name in its own state_dict? One word.
    "c": ...,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, model = train()
    save(model, Path(__file__).with_suffix(".pt"))
    weight = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights {weight:.4f}")
    dist.destroy_process_group()
