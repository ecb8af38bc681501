"""The week on data parallelism of a course on efficient deep learning (Yandex and HSE).

``syncbn.py`` has the class SyncBatchNorm, ``allreduce.py`` the function ring_allreduce(send, rank,
size). Both are compared with one process that has all ranks' data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from lab.grade.driver.checks import Check, Flaw, Message, Messages, Rank, Returned, close

# --- synchronised batch normalisation ---

_MOMENTUM = 0.1
_EPS = 1e-5
# Of outputs, as in the task.
_TOLERANCE = 1e-3


def _activations(rank: Rank, features: int, batch: int) -> torch.Tensor:
    """Return a rank's inputs, (batch, features)."""
    return 3 * torch.randn(batch, features, generator=rank.generator(features)) + 1


def _weights(rank: Rank, features: int, batch: int) -> torch.Tensor:
    """Return by what a rank's loss weights the outputs, (batch, features)."""
    return torch.randn(batch, features, generator=rank.generator(features + 1))


def _layer(module: Any, features: int) -> Any:
    return module.SyncBatchNorm(features, eps=_EPS, momentum=_MOMENTUM)


def _normalise(features: int, batch: int, module: Any, rank: Rank) -> dict[str, Any]:
    """Return output, input gradient and messages of one pass in each direction."""
    own = _activations(rank, features, batch).requires_grad_()
    layer = _layer(module, features)
    messages = Messages()
    with messages.during("forward"):
        output = layer(own)
    loss = (output * _weights(rank, features, batch)).sum()
    with messages.during("backward"):
        loss.backward()
    return {"output": output, "gradient": own.grad, "sent": messages.sent}


def _judge_pass(features: int, batch: int, ranks: Sequence[Returned]) -> Iterator[Flaw]:
    """Yield what is wrong with a pass.

    Raises ValueError, so that a person looks, if nothing is, and no message was seen.
    """
    flaws = list(_flaws_of_pass(features, batch, ranks))
    yield from flaws
    if not flaws and not all(returned["sent"] for returned in ranks):
        raise ValueError("all numbers are right, and no message was seen")


def _flaws_of_pass(features: int, batch: int, ranks: Sequence[Returned]) -> Iterator[Flaw]:
    """Compare one pass in each direction with that of one process."""
    own = [_activations(returned.rank, features, batch) for returned in ranks]
    whole = torch.cat(own).requires_grad_()
    weights = torch.cat([_weights(returned.rank, features, batch) for returned in ranks])
    right = torch.nn.BatchNorm1d(features, _EPS, _MOMENTUM, affine=False)(whole)
    (right * weights).sum().backward()
    assert whole.grad is not None
    outputs = right.detach().split(batch)
    gradients = whole.grad.split(batch)
    where = f"{features} features, batches of {batch} on {len(ranks)} ranks: "
    for returned, x, output, gradient in zip(ranks, own, outputs, gradients):
        error = (returned["output"] - output).abs().max().item()
        if not error <= _TOLERANCE:
            alone = torch.nn.BatchNorm1d(features, _EPS, affine=False)(x)
            is_alone = close(returned["output"], alone)
            how = "each rank normalises by itself" if is_alone else f"off by up to {error:.2g}"
            yield Flaw("wrong-output", f"{where}{how}")
        got = returned["gradient"]
        if got is None or not close(got, gradient, 2e-3):
            off = float("nan") if got is None else (got - gradient).abs().max().item()
            largest = gradient.abs().max().item()
            evidence = f"{where}off by up to {off:.2g}, where the largest is {largest:.2g}"
            yield Flaw("wrong-input-gradient", evidence)
        yield from _one_message(returned["sent"])


def _batch_norm(features: int, batch: int) -> Check:
    run = partial(_normalise, features, batch)
    return Check(f"{features} features", run, partial(_judge_pass, features, batch))


def _one_message(sent: list[Message]) -> Iterator[Flaw]:
    for phase in ("forward", "backward"):
        of_phase = [message for message in sent if message.phase == phase]
        if len(of_phase) > 1:
            evidence = f"{len(of_phase)} in a {phase} pass"
            yield Flaw("several-messages", evidence, of_phase[-1].at)


_FEATURES = 16
_BATCH = 32


def _run_in_eval(module: Any, rank: Rank) -> dict[str, Any]:
    """Return what the layer makes of zeros and ones in eval() after one pass in train()."""
    layer = _layer(module, _FEATURES)
    layer.train()
    layer(_activations(rank, _FEATURES, _BATCH))
    layer.eval()
    with torch.no_grad():
        zeros, ones = layer(torch.stack([torch.zeros(_FEATURES), torch.ones(_FEATURES)]))
    return {"zeros": zeros, "ones": ones}


def _judge_running(ranks: Sequence[Returned]) -> Iterator[Flaw]:
    """Compare the running statistics with those of all ranks' inputs.

    The task's template keeps a running deviation, torch a running unbiased variance: both are
    right, biased or not.
    """
    x = torch.cat([_activations(returned.rank, _FEATURES, _BATCH) for returned in ranks])
    right_mean = _MOMENTUM * x.mean(0)
    rights: list[torch.Tensor] = []
    for correction in (0, 1):
        variance = x.var(0, correction=correction)
        rights.append((1 - _MOMENTUM + _MOMENTUM * variance).sqrt())
        rights.append(1 - _MOMENTUM + _MOMENTUM * variance.sqrt())
    for returned in ranks:
        deviation = 1 / (returned["ones"] - returned["zeros"])
        mean = -returned["zeros"] * deviation
        evidence = None
        if not close(mean, right_mean, 2e-2):
            evidence = f"the mean is {mean[0]:.3g}, right is {right_mean[0]:.3g}"
        elif not any(close(deviation, right, 2e-2) for right in rights):
            evidence = f"the deviation is {deviation[0]:.3g}, right is {rights[0][0]:.3g}"
        if evidence:
            yield Flaw("running-statistics", f"after one pass, momentum {_MOMENTUM}: {evidence}")


# --- the ring ---


def _vector(rank: Rank, length: int) -> torch.Tensor:
    """Return a rank's vector. length : 0 stands for the number of ranks."""
    return torch.randn(length or rank.size, generator=rank.generator(length))


def _reduce(length: int, module: Any, rank: Rank) -> dict[str, Any]:
    """Return what the ring leaves in a vector, and what it sends."""
    tensor = _vector(rank, length)
    messages = Messages()
    with messages.during("ring"):
        module.ring_allreduce(tensor, rank.number, rank.size)
    return {"tensor": tensor, "sent": messages.sent}


def _judge_ring(length: int, ranks: Sequence[Returned]) -> Iterator[Flaw]:
    """Check the result, the bytes and the neighbours."""
    every = torch.stack([_vector(returned.rank, length) for returned in ranks])
    where = f"{every.shape[1]:,} elements on {len(ranks)} ranks"
    for returned in ranks:
        wrong = _difference(returned["tensor"], every, returned.rank.number)
        if wrong:
            yield Flaw("wrong-average", f"{where}: {wrong}")
        yield from _ring(returned, every.shape[1], where, is_right=wrong is None)


def _ring_of(title: str, length: int) -> Check:
    return Check(title, partial(_reduce, length), partial(_judge_ring, length))


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


def _ring(returned: Returned, length: int, where: str, *, is_right: bool) -> Iterator[Flaw]:
    """Yield what a ring does not send: collectives, to ranks that are no neighbours, too much.

    Raises ValueError, so that a person looks, if the result is right, and no message was seen.
    """
    rank = returned.rank.number
    size = returned.rank.size
    sent: list[Message] = returned["sent"]
    if is_right and not sent:
        raise ValueError("the mean is right, and no message was seen")
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
        _batch_norm(128, 32),
        _batch_norm(512, 64),
        Check("running statistics", _run_in_eval, _judge_running, "running-statistics"),
    ],
    "ring": [
        _ring_of("as many elements as ranks", 0),
        _ring_of("equal chunks", 3000),
        _ring_of("chunks of different lengths", 1003),
    ],
}
