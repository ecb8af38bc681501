"""The week on data parallelism of a course on efficient deep learning (Yandex and HSE).

``syncbn.py`` has the class SyncBatchNorm, ``allreduce.py`` the function ring_allreduce(send, rank,
size). Both are compared with one process that has all ranks' data.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lab.grade.driver.checks import Check, Flaw, Message, Messages, close

# --- synchronised batch normalisation ---

_MOMENTUM = 0.1
_EPS = 1e-5
# Of outputs, as in the task.
_TOLERANCE = 1e-3


def _activations(features: int, batch: int) -> torch.Tensor:
    """Return all ranks' inputs, (ranks * batch, features), the same on all ranks."""
    generator = torch.Generator().manual_seed(features)
    return 3 * torch.randn(dist.get_world_size() * batch, features, generator=generator) + 1


def _rows(whole: torch.Tensor, batch: int) -> torch.Tensor:
    first = batch * dist.get_rank()
    return whole[first : first + batch].clone()


def _layer(module: Any, features: int) -> Any:
    return module.SyncBatchNorm(features, eps=_EPS, momentum=_MOMENTUM)


def _normalises(features: int, batch: int, module: Any) -> Iterator[Flaw]:
    """Check output, input gradient and messages of one pass in each direction."""
    x = _activations(features, batch)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = x.clone().requires_grad_()
    right = torch.nn.BatchNorm1d(features, _EPS, _MOMENTUM, affine=False)(expected)
    (right * weights).sum().backward()
    own = _rows(x, batch).requires_grad_()
    layer = _layer(module, features)
    messages = Messages()
    with messages.during("forward"):
        output = layer(own)
    loss = (output * _rows(weights, batch)).sum()
    with messages.during("backward"):
        loss.backward()
    where = f"{features} features, batches of {batch} on {dist.get_world_size()} ranks: "
    error = (output - _rows(right.detach(), batch)).abs().max().item()
    if not error <= _TOLERANCE:
        alone = torch.nn.BatchNorm1d(features, _EPS, affine=False)(own.detach())
        is_alone = close(output.detach(), alone)
        how = "each rank normalises by itself" if is_alone else f"off by up to {error:.2g}"
        yield Flaw("wrong-output", f"{where}{how}")
    assert expected.grad is not None
    gradient = _rows(expected.grad, batch)
    if own.grad is None or not close(own.grad, gradient, 2e-3):
        off = float("nan") if own.grad is None else (own.grad - gradient).abs().max().item()
        largest = gradient.abs().max().item()
        evidence = f"{where}off by up to {off:.2g}, where the largest is {largest:.2g}"
        yield Flaw("wrong-input-gradient", evidence)
    yield from _one_message(messages.sent)


def _one_message(sent: list[Message]) -> Iterator[Flaw]:
    for phase in ("forward", "backward"):
        of_phase = [message for message in sent if message.phase == phase]
        if len(of_phase) > 1:
            evidence = f"{len(of_phase)} in a {phase} pass"
            yield Flaw("several-messages", evidence, of_phase[-1].at)


def _running(module: Any) -> Iterator[Flaw]:
    """Check what the layer uses in eval() after one pass in train().

    The task's template keeps a running deviation, torch a running unbiased variance: both are
    right, biased or not.
    """
    features, batch = 16, 32
    x = _activations(features, batch)
    layer = _layer(module, features)
    layer.train()
    layer(_rows(x, batch))
    layer.eval()
    with torch.no_grad():
        zeros, ones = layer(torch.stack([torch.zeros(features), torch.ones(features)]))
    deviation = 1 / (ones - zeros)
    mean = -zeros * deviation
    right_mean = _MOMENTUM * x.mean(0)
    rights: list[torch.Tensor] = []
    for correction in (0, 1):
        variance = x.var(0, correction=correction)
        rights.append((1 - _MOMENTUM + _MOMENTUM * variance).sqrt())
        rights.append(1 - _MOMENTUM + _MOMENTUM * variance.sqrt())
    if not close(mean, right_mean, 2e-2):
        evidence = f"the mean is {mean[0]:.3g}, right is {right_mean[0]:.3g}"
        yield Flaw("running-statistics", f"after one pass, momentum {_MOMENTUM}: {evidence}")
    elif not any(close(deviation, right, 2e-2) for right in rights):
        evidence = f"the deviation is {deviation[0]:.3g}, right is {rights[0][0]:.3g}"
        yield Flaw("running-statistics", f"after one pass, momentum {_MOMENTUM}: {evidence}")


# --- the ring ---


def _averages(length: int, module: Any) -> Iterator[Flaw]:
    """Check the result, the bytes and the neighbours for a vector of a length.

    length : 0 stands for the number of ranks.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    length = length or size
    every = torch.randn(size, length, generator=torch.Generator().manual_seed(length))
    tensor = every[rank].clone()
    messages = Messages()
    with messages.during("ring"):
        module.ring_allreduce(tensor, rank, size)
    where = f"{length:,} elements on {size} ranks"
    wrong = _difference(tensor, every, rank)
    if wrong:
        yield Flaw("wrong-average", f"{where}: {wrong}")
    yield from _ring(messages.sent, length, where, is_right=wrong is None)


def _difference(tensor: torch.Tensor, every: torch.Tensor, rank: int) -> str | None:
    """Return what a tensor is in place of the mean; None if it is the mean."""
    mean = every.mean(0)
    if close(tensor, mean, 1e-4):
        return None
    if close(tensor, every.sum(0), 1e-4):
        return "the tensor holds the sum"
    if torch.equal(tensor, every[rank]):
        return "the tensor is unchanged"
    wrong = ((tensor - mean).abs() > 1e-4).sum().item()
    return f"rank {rank} has {wrong:,} wrong elements"


def _ring(sent: list[Message], length: int, where: str, *, is_right: bool) -> Iterator[Flaw]:
    """Yield what a ring does not send: collectives, to ranks that are no neighbours, too much."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    collectives = [message for message in sent if message.name != "send"]
    if collectives:
        evidence = f"{where}: it calls {collectives[0].name.strip('_')}"
        yield Flaw("not-a-ring", evidence, collectives[0].at)
        return
    neighbours = {(rank + 1) % size, (rank - 1) % size}
    strangers = [message for message in sent if message.peer not in neighbours]
    if strangers:
        evidence = f"{where}: rank {rank} sends to rank {strangers[0].peer}"
        yield Flaw("not-a-ring", evidence, strangers[0].at)
        return
    chunk = -(-length // size) * 4  # bytes
    most = 1.1 * 2 * (size - 1) * chunk
    total = sum(message.nbytes for message in sent)
    if is_right and total > most:
        evidence = f"{where}: rank {rank} sends {total:,} bytes, a ring {2 * (size - 1) * chunk:,}"
        yield Flaw("too-many-bytes", evidence, sent[0].at)


PARTS = {
    "syncbn": [
        Check("128 features", partial(_normalises, 128, 32)),
        Check("512 features", partial(_normalises, 512, 64)),
        Check("running statistics", _running, "running-statistics"),
    ],
    "ring": [
        Check("as many elements as ranks", partial(_averages, 0)),
        Check("equal chunks", partial(_averages, 3000)),
        Check("chunks of different lengths", partial(_averages, 1003)),
    ],
}
