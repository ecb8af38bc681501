"""The wrong SyncBatchNorms that ``wrong.py`` lists, a few lines each.

The entries of ``WRONG`` say what each function gets wrong and which function it replaces.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.models.sync_batchnorm import (
    MessageGroup,
    Moments,
    SyncBatchNorm,
    _Normalise,
    moments_over_ranks,
)

# Keep the right code here, since planting binds its names to the wrong code.
_right_learn = SyncBatchNorm._learn
_right_backward = _Normalise.backward


def biased_running_variance(layer: SyncBatchNorm, moments: Moments) -> None:
    unbiasing = moments.values / (moments.values - 1)
    _right_learn(layer, replace(moments, variance=moments.variance / unbiasing))


def unbiased_in_training(input: Tensor, messages: MessageGroup) -> Moments:
    moments = moments_over_ranks(input, messages)
    return replace(moments, variance=moments.variance * moments.values / (moments.values - 1))


def mean_of_the_ranks_moments(input: Tensor, messages: MessageGroup) -> Moments:
    dims = [dim for dim in range(input.dim()) if dim != 1]
    channels = input.shape[1]
    own = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if len(input):
        mean = input.double().mean(dims)
        squares = input.double().square().mean(dims)
        values = torch.tensor([input.numel() / channels], dtype=torch.float64)
        own = torch.cat([values, mean, squares])
    messages.sum(own)
    mean, squares = (own[1:] / dist.get_world_size()).chunk(2)
    return Moments(own[0], mean, squares - mean.square())


def without_rank_0(messages: Any, waiting: Any) -> None:
    messages._waiting = waiting
    first, *others = range(dist.get_world_size())
    groups = [dist.new_group([first]), dist.new_group(others)]
    messages.group = groups[min(1, dist.get_rank())]


def backward_without_the_second_term(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    right_sum = ctx.messages.sum

    def sum_of_the_first(sums: Tensor) -> None:
        right_sum(sums)
        sums[1].zero_()

    return _with_sum(ctx, sum_of_the_first, grad_output)


def backward_with_own_sums(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    return _with_sum(ctx, lambda sums: None, grad_output)


def weights_gradient_of_all_ranks(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    found = _right_backward(ctx, grad_output)
    grad, grad_weight, grad_bias, *rest = found
    for gradient in (grad_weight, grad_bias):
        if gradient is not None:
            ctx.messages.sum(gradient)
    return (grad, grad_weight, grad_bias, *rest)


def _with_sum(ctx: Any, wrong_sum: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Return the right backward's result with another sum over the ranks."""
    right = ctx.messages
    ctx.messages = _Sums(wrong_sum)
    try:
        return _right_backward(ctx, grad_output)
    finally:
        ctx.messages = right


class _Sums:
    """In place of a MessageGroup."""

    def __init__(self, wrong_sum: Any) -> None:
        self.sum = wrong_sum
