"""Lesson 1: one process learns to read digits, and times the sections of its steps.

Run it: python learn/01_one_process.py
"""

import time
from collections import defaultdict
from contextlib import contextmanager

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    return DataLoader(data, GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))


def train(epochs=3):
    """Return the loss of each step, and the seconds of each section over all steps."""
    model, loader = build_model(), build_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, seconds = [], defaultdict(float)

    @contextmanager
    def section(name):
        began = time.perf_counter()
        yield
        seconds[name] += ...  # the time since `began`

    for _ in range(epochs):
        for images, labels in loader:
            with section("forward"):
                loss = nn.functional.cross_entropy(model(images), labels)
            with section("backward"):
                ...  # forget the last step's gradients
                ...  # compute this step's
            with section("update"):
                ...  # let the optimizer change the weights
            losses.append(loss.item())
    return losses, seconds


ANSWERS = {
    # How many MB (10^6 bytes) do the gradients of all parameters take, in float32?
    "a": ...,
    # How many steps does an epoch take?
    "b": ...,
    # Backward needs no gradient of the images. With that, how many times as many multiplications
    # does it take as forward, to two decimals?
    "c": ...,
}

if __name__ == "__main__":
    losses, seconds = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    for name, total in seconds.items():
        print(f"{name:9} {1000 * total / len(losses):6.2f} ms a step")
