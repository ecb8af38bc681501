"""SyncBatchNorm: BatchNorm over the batches of all ranks, on CPUs and with Gloo too.

PyTorch's own SyncBatchNorm refuses CPU tensors. This one sends one message in forward and one in
backward, and works on any device. A layer calls ``moments_over_ranks``, then ``_Normalise``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from common.distributed.node_groups import open_group_of


class MessageGroup:
    """A process group for the messages of a model's layers alone. Collective.

    Strategies send gradients during backward as well, and a layer that a rank does not use may
    change their place among the layers' messages. In one group these would then be mixed up.

    waiting : encloses each wait for the other ranks; the engine times it as "sync".
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._waiting = waiting
        self.group = open_group_of(range(dist.get_world_size()))

    def __deepcopy__(self, memo: object) -> "MessageGroup":
        """Return this one: a copy of a model, as for its moving average, sends nothing more."""
        return self

    def sum(self, tensor: Tensor) -> None:
        """Sum the tensor over the ranks, in place. Collective."""
        with self._waiting():
            dist.all_reduce(tensor, group=self.group)


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm layer that trains on the global batch: the ranks' batches taken together.

    Ranks may have batches of different sizes, and some ranks none. Input and output have shape
    (samples, channels, ...). In evaluation mode, and without a process group, it is BatchNorm.

    Each training step sends two messages a layer: 8 (2 C + 1) bytes in forward, and 2 C numbers of
    the layer's type in backward, for C channels. The layer waits for each, and on most networks
    they cost latency alone.
    """

    messages: MessageGroup

    @classmethod
    def in_place_of(cls, layer: _BatchNorm, messages: MessageGroup) -> "SyncBatchNorm":
        """Return a layer with the settings, the parameters and the buffers of a BatchNorm layer."""
        made = cls(
            layer.num_features, layer.eps, layer.momentum, affine=False, track_running_stats=False
        )
        made.messages = messages
        made.affine = layer.affine
        made.track_running_stats = layer.track_running_stats
        made.weight = layer.weight
        made.bias = layer.bias
        made.running_mean = layer.running_mean
        made.running_var = layer.running_var
        made.num_batches_tracked = layer.num_batches_tracked
        return made.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions or more, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input. Collective in training mode."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        moments = moments_over_ranks(input.detach(), self.messages)
        self._learn(moments)
        return _Normalise.apply(input, self.weight, self.bias, moments, self.eps, self.messages)

    @torch.no_grad()
    def _learn(self, moments: "Moments") -> None:
        """Move the running statistics towards those of this batch."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None  # it exists with the other two
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # a plain mean over all batches
            share = 1 / int(self.num_batches_tracked)
        # Evaluation estimates the variance of all data, hence N - 1; training divides by N.
        unbiased = moments.variance * moments.values / (moments.values - 1)
        self.running_mean.lerp_(moments.mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


@dataclass(frozen=True)
class Moments:
    """How many values each channel has on all ranks, their mean and their variance, in float64.

    Of shape (), (channels,) and (channels,).
    """

    values: Tensor
    mean: Tensor
    variance: Tensor


@torch.no_grad()
def moments_over_ranks(input: Tensor, messages: MessageGroup) -> Moments:
    """Return the moments of the values on all ranks. Collective.

    The message has the sums of 1, of x and of x squared. The variance is the difference of two
    large numbers if the mean is large, in which float32 would lose every digit at a mean of 1,000
    standard deviations. So each rank sums the squares of x - its own mean, which is sound in
    float32, and the sums of all ranks are made of these in float64.

    Raises ValueError on every rank if a channel has fewer than two values, on CPUs alone: a GPU
    would have to be waited for.
    """
    channels = input.shape[1]
    count = input.numel() // channels
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if count:
        dims = _all_but_channels(input)
        wide = _wide(input)
        mean = wide.mean(dims)
        squares = (wide - _by_channel(mean, input)).square().sum(dims).double()
        mean = mean.double()
        sums[0] = count
        sums[1 : channels + 1] = count * mean
        sums[channels + 1 :] = squares + count * mean.square()
    messages.sum(sums)
    total = sums[0]
    if not input.is_cuda and total < 2:
        raise ValueError(
            f"BatchNorm needs two values of each channel in training, and all ranks have "
            f"{int(total)}: use a larger batch"
        )
    mean = sums[1 : channels + 1] / total
    variance = sums[channels + 1 :] / total - mean.square()
    return Moments(total, mean, variance.clamp_min(0))


class _Normalise(torch.autograd.Function):
    """y = weight * z + bias with z = (x - mean) / std, where mean and std are of all ranks.

    Backward. Let L be the sum of the ranks' losses, and g = dL/dy. Each x moves its own z, and by
    mean and std also the z of every other value of its channel, on every rank. Of N values,

        d mean / dx_i = 1 / N        and        d std / dx_i = z_i / N,

    so that, with sums over all N values of the channel,

        dL/dx_i = weight / std * (g_i - sum(g) / N - z_i * sum(g * z) / N).

    A rank's own part of sum(g) is its gradient of bias, and that of sum(g * z) its gradient of
    weight; these are averaged over the ranks later, like those of all parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        messages: MessageGroup,
    ) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        mean = moments.mean.to(wide)
        variance = moments.variance.to(wide)
        inverse_std = (moments.variance + eps).rsqrt().to(wide)
        ctx.save_for_backward(input, weight, moments.values, mean, inverse_std)
        ctx.messages = messages
        return nn.functional.batch_norm(
            input, mean, variance, weight, bias, training=False, eps=eps
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, count, mean, inverse_std = ctx.saved_tensors
        dims = _all_but_channels(input)
        z = (_wide(input) - _by_channel(mean, input)) * _by_channel(inverse_std, input)
        g = _wide(grad_output)
        own = torch.stack([g.sum(dims), (g * z).sum(dims)])  # (2, channels)
        sums = own.clone()
        ctx.messages.sum(sums)
        mean_g, mean_gz = sums / count.to(sums.dtype)
        grad = g - _by_channel(mean_g, input) - z * _by_channel(mean_gz, input)
        grad *= _by_channel(inverse_std, input)
        if weight is None:  # affine=False
            return grad.to(input.dtype), None, None, None, None, None
        grad *= _by_channel(weight, input)
        grad_bias, grad_weight = own
        return grad.to(input.dtype), grad_weight, grad_bias, None, None, None


def _wide(tensor: Tensor) -> Tensor:
    """Return the values in float32 or float64: bf16 and fp16 are too coarse for sums."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _by_channel(values: Tensor, input: Tensor) -> Tensor:
    """Return (channels,) as (1, channels, 1, ...), to be combined with the input."""
    return values.view(1, -1, *[1] * (input.dim() - 2))
