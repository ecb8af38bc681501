"""Lesson 7: BatchNorm on shards, by hand and in float64, and SyncBatchNorm.

Run it: python learn/07_batchnorm.py
"""

import torch
import torch.distributed as dist
from torch import nn


def normalise(values):
    """Return what BatchNorm makes of a list of numbers in training: mean 0, variance 1."""
    mean = ...
    variance = ...  # the mean of the squared differences from the mean
    return [... for value in values]  # BatchNorm adds 1e-5 to the variance, so that it is never 0


def gradient_of_shards(model, images, labels, shards):
    """Return the mean of the shards' gradients, computed by one process, one shard after another.

    That is what this number of ranks computes: each its shard, then the mean. A list of tensors.
    """
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for some, theirs in zip(images.chunk(shards), labels.chunk(shards), strict=True):
        loss = nn.functional.cross_entropy(model(some), theirs)
        own = torch.autograd.grad(loss, list(model.parameters()))
        for gradient, part in zip(gradients, own, strict=True):
            ...  # add this shard's part of the mean
    return gradients


def moments_over_ranks(x):
    """Return count, mean, variance and running variance of each channel, over all ranks' values.

    x: this rank's values, a row for each value, a column for each channel. Ranks have unequal
    numbers of rows.
    """
    sums = ...  # what this rank sends: three numbers of each channel, which the ranks can add up
    ...  # one message, after which `sums` holds the sums over all ranks
    count = ...
    mean = ...
    variance = ...  # divides by the number of values
    running_variance = ...  # divides by one less: evaluation estimates the variance of all images
    return count, mean, variance, running_variance


def gradients_over_ranks(x, g, weight, count, mean, variance):
    """Return dL/dx of this rank's values, and this rank's part of dL/dweight and of dL/dbias.

    g: dL/dy, as large as x, where y = weight * z + bias. weight and the moments of all ranks have
    a number for each channel.
    """
    std = (variance + 1e-5) ** 0.5
    z = ...
    grad_weight = ...  # of this rank's values alone: training averages it later, as all gradients
    grad_bias = ...
    sums = ...  # what this rank sends: two numbers of each channel
    ...  # one message
    grad_x = ...
    return grad_x, grad_weight, grad_bias


def build_model(norm):
    """Return a small network in float64, with BatchNorm if ``norm``."""
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(8) if norm else nn.Identity()
    layers = (nn.Conv2d(3, 8, 3, bias=False), middle, nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    return nn.Sequential(*layers).double()


def difference(one, other):
    """Return the norm of the difference over the norm of the second, over all tensors."""
    flat, true = (torch.cat([tensor.flatten() for tensor in some]) for some in (one, other))
    return ((flat - true).norm() / true.norm()).item()


ANSWERS = {
    # 1, 3, 5, 11 in one process: what does BatchNorm make of the 1?
    "a": ...,
    # 2 ranks with 1, 3 and 5, 11: what does the rank that has it make of the 11?
    "b": ...,
    # With BatchNorm, 4 ranks must equal one process. What does it compute: "batch" (the whole batch
    # at once) or "shards" (four shards in turn)?
    "c": ...,
    # With SyncBatchNorm two ranks have 1 and 3, 5, 11. dL/dy is 1 for the 1, and 0 for the others.
    # The weight is 1. What is dL/dx of the 11?
    "d": ...,
    # VGG-11 has 8 BatchNorm layers. On a ring of 4 nodes a small all-reduce takes 6 rounds of 0.2 ms
    # (lesson 5). How many ms of a step does SyncBatchNorm wait for messages?
    "e": ...,
}

if __name__ == "__main__":
    brightness = torch.linspace(0.2, 2, 32).double().reshape(-1, 1, 1, 1)  # the shards differ
    images, labels = brightness * torch.randn(32, 3, 8, 8).double(), torch.arange(32) % 10
    for norm in (False, True):
        whole, four = (gradient_of_shards(build_model(norm), images, labels, n) for n in (1, 4))
        print(f"BatchNorm {norm}: 4 shards differ from the batch by {difference(four, whole):.1e}")
