"""Lesson 7, second step: the student's sums of a SyncBatchNorm, and VGG-11 trained with them.

``check_sums`` runs the student's two functions on known values, on ranks with unequal numbers of
them. ``check_vgg11`` puts them into a layer of VGG-11 and compares the training with one process.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from common.data import load_dataset
from common.errors import UserError, count
from common.models import build_model
from common.models.sync_batchnorm import MessageGroup, SyncBatchNorm, moments_over_ranks
from common.profiling.comm_trace import MessageRecorder
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile, shown

# Values that each rank has of a channel. First 3 ranks: on 2, many causes look alike.
VALUES = ((4, 2, 7), (2, 5))
SHARDS = ((3, 1, 2), (3, 2))  # images of VGG-11 on each rank, in a step
STEPS = 3
_CHANNELS = 2
_FAR = 1000.0  # a mean at which float32 is too coarse for squares
_EQUAL = 1e-9
_LIMIT_SECONDS = 180.0


def check_sums(student: StudentFile, say: Say) -> None:
    """Check the student's sums on known values."""
    for shares in VALUES:
        size = len(shares)
        found = student.on_ranks(size, _on_known_values, shares)
        for rank in found:
            if rank.problem:
                raise Mistake(
                    f"on {count(size, 'rank')} with {_listed(shares)} values {rank.problem}"
                )
        sent = found[0]
        say(
            f"on {size} ranks with {_listed(shares)} values your moments and gradients are those "
            f"of all {sum(shares)}, with {_messages(sent.forward)} forward and "
            f"{_messages(sent.backward)} backward"
        )


def check_vgg11(student: StudentFile, say: Say) -> None:
    """Train VGG-11 with the student's layer, with BatchNorm and in one process; compare them."""
    for shares in SHARDS:
        images, labels, name = _batches(sum(shares))
        differences, *_ = student.on_ranks(
            len(shares), _train_vgg11, shares, images, labels, limit_seconds=_LIMIT_SECONDS
        )
        told = (
            f"VGG-11 on {len(shares)} ranks with {_listed(shares)} {name}, weights after {STEPS} "
            f"steps: with your sums they differ from one process's by {differences.own:.0e}, with "
            f"BatchNorm by {differences.local:.0e}"
        )
        if not differences.own <= _EQUAL:
            raise Mistake(f"the known values are right, and yet {told}")
        say(told)


def _listed(numbers: Sequence[int]) -> str:
    """Return "4, 2 and 7"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"


def _messages(number: int) -> str:
    told = count(number, "message")
    return told if number == 1 else f"{told} (one would do: all sums in one tensor)"


# --- known values ---


class KnownValuesResult(NamedTuple):
    """What a rank found: the first thing that is wrong, and the messages of each pass."""

    problem: str | None
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class _Known:
    """The values of a layer on all ranks.

    batches, arriving : of each rank x and dL/dy, of shape (values, channels).
    weight, mean, variance : of each channel; mean and variance are those of all values.
    """

    rank: int
    batches: Sequence[Tensor]
    arriving: Sequence[Tensor]
    weight: Tensor
    mean: Tensor
    variance: Tensor

    def normalised(self) -> list[Tensor]:
        """Return the right z of each rank."""
        std = (self.variance + 1e-5).sqrt()
        return [(batch - self.mean) / std for batch in self.batches]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.batches)

    @property
    def own_count(self) -> int:
        """This rank's number of values."""
        return len(self.batches[self.rank])

    @property
    def count(self) -> int:
        """All ranks' number of values."""
        return sum(map(len, self.batches))


def _on_known_values(student: Namespace, shares: Sequence[int]) -> KnownValuesResult:
    """Run the student's functions on known values."""
    rank = dist.get_rank()
    messages = MessageGroup()
    seeded = torch.Generator().manual_seed(1)
    batches: list[Tensor] = []
    arriving: list[Tensor] = []
    for number, values in enumerate(shares):
        draw = torch.randn(2, values, _CHANNELS, dtype=torch.float64, generator=seeded)
        batches.append((1 + number) * draw[0] + 2 * number)  # no rank's are like another's
        arriving.append(draw[1] + number)
    moments = moments_over_ranks(batches[rank], messages)
    weight = torch.tensor([1.5, 0.5], dtype=torch.float64)
    known = _Known(rank, batches, arriving, weight, moments.mean, moments.variance)

    layer = nn.BatchNorm1d(_CHANNELS, momentum=1.0, dtype=torch.float64)
    right = SyncBatchNorm.in_place_of(layer, messages)
    with torch.no_grad():
        right.weight.copy_(weight)
    x = batches[rank].clone().requires_grad_()
    right(x).backward(arriving[rank])

    with MessageRecorder() as recorder:
        returned = student["moments_over_ranks"](batches[rank].clone())
    forward = len(recorder.messages)
    assert right.running_var is not None
    problem = _wrong_moments(returned, known, right.running_var, sent=_sent(forward))
    if problem is None:
        far = _FAR + batches[rank].float()
        true = moments_over_ranks(far, messages).variance
        problem = _coarse_variance(student["moments_over_ranks"](far), true)
    if problem is not None:
        return KnownValuesResult(problem)

    own = (batches[rank].clone(), arriving[rank].clone(), weight.clone())
    total = torch.full((_CHANNELS,), float(known.count), dtype=torch.float64)
    with MessageRecorder() as recorder:
        returned = student["gradients_over_ranks"](
            *own, total, known.mean.clone(), known.variance.clone()
        )
    backward = len(recorder.messages)
    assert x.grad is not None
    assert right.weight.grad is not None
    assert right.bias.grad is not None
    gradients = (x.grad, right.weight.grad, right.bias.grad)
    problem = _wrong_gradients(returned, known, gradients, sent=_sent(backward))
    return KnownValuesResult(problem, forward, backward)


def _sent(messages: int) -> bool:
    """Return whether any rank sent anything. Collective."""
    sent = torch.tensor([messages])
    dist.all_reduce(sent)
    return bool(sent)


def _tensors(function: str, returned: Any, shapes: Mapping[str, torch.Size]) -> list[Tensor]:
    """Return what a function of the student's returned, in float64.

    shapes : of each part, by name. Raises Mistake if there are other parts or shapes.
    """
    if not isinstance(returned, tuple | list) or len(returned) != len(shapes):
        names = ", ".join(shapes)
        raise Mistake(f"{function} returns {shown(returned)}, and must return {names}")
    found: list[Tensor] = []
    for part, (name, shape) in zip(returned, shapes.items(), strict=True):
        tensor = part
        if name == "count" and isinstance(part, int | float):  # the same for all channels
            tensor = torch.full(shape, part)
        if not isinstance(tensor, Tensor) or tensor.numel() != shape.numel():
            raise Mistake(
                f"{function} returns {shown(part)} as {name}, and must return a tensor of shape "
                f"{tuple(shape)}"
            )
        found.append(tensor.detach().double().reshape(shape))
    return found


def _close(found: Tensor, right: Tensor | float) -> bool:
    return bool(((found - right).abs() <= _EQUAL * (1 + abs(right))).all())


def _numbers(tensor: Tensor) -> str:
    """Return the first row, or all, of a tensor as a message shows it."""
    row = tensor[0] if tensor.dim() == 2 else tensor
    return ", ".join(f"{number:.4g}" for number in row.tolist())


def _differs(what: str, found: Tensor, right: Tensor, why: str) -> str:
    """Return that something is wrong, in words and numbers, and why."""
    return f"{what} is {_numbers(found)}, and must be {_numbers(right)}: {why}"


def _ways(found: Tensor, ways: Iterator[tuple[str, Tensor]], formula: str) -> str:
    """Return the first of the mistakes that gives what was found, else that the formula is right."""
    for told, wrong in ways:
        if _close(found, wrong):
            return told
    return f"it is {formula}"


# --- forward ---


def _wrong_moments(returned: Any, known: _Known, running: Tensor, *, sent: bool) -> str | None:
    """Say what is wrong with what moments_over_ranks returns; None if nothing is.

    running : the right running variance. sent : whether any rank sent anything.
    """
    names = ("count", "mean", "variance", "running_variance")
    shape = torch.Size([_CHANNELS])
    found = _tensors("moments_over_ranks", returned, dict.fromkeys(names, shape))
    total = torch.full(shape, float(known.count), dtype=torch.float64)
    alone = "is this rank's own: " + _unused("sums", sent=sent)
    for name, part, right, ways, formula in (
        ("count", found[0], total, _wrong_counts(known, alone), "the sum of the ranks' counts"),
        (
            "mean",
            found[1],
            known.mean,
            _wrong_means(known, alone),
            "all ranks' sum of x, divided by all ranks' count",
        ),
        (
            "variance",
            found[2],
            known.variance,
            _wrong_variances(known, alone),
            "all ranks' sum of x**2, divided by all ranks' count, less mean**2",
        ),
        (
            "running_variance",
            found[3],
            running,
            _wrong_running_variances(known, alone),
            "variance * count / (count - 1)",
        ),
    ):
        if not _close(part, right):
            why = _ways(part, ways, formula)
            return _differs(f"rank {known.rank}'s {name} of each channel", part, right, why)
    return None


def _unused(sums: str, *, sent: bool) -> str:
    """Say why a rank uses its own sums alone."""
    if not sent:
        return f"no rank sends anything. dist.all_reduce({sums}) adds up the ranks' {sums} in place"
    return f"the ranks send something, but {sums} after the message are not used"


def _wrong_counts(known: _Known, alone: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what the usual mistakes make of the count, each with what to say about it."""
    ones = torch.ones(_CHANNELS, dtype=torch.float64)
    yield f"it {alone}", ones * known.own_count
    yield (
        "it is this rank's own, times the number of ranks, but ranks have unequal numbers",
        ones * known.own_count * known.size,
    )
    yield "it is the number of ranks, not of values", ones * known.size
    yield "the ranks add up their sums twice", ones * known.count * known.size


def _wrong_means(known: _Known, alone: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what the usual mistakes make of the mean, each with what to say about it."""
    total = torch.cat([*known.batches]).sum(0)
    means = torch.stack([batch.mean(0) for batch in known.batches])
    yield f"it {alone}", means[known.rank]
    yield (
        "it is the mean of the ranks' means, in which a rank with few values counts as much as one "
        "with many. Send the sums, and divide once, by all ranks' count",
        means.mean(0),
    )
    yield "it is the sum of the ranks' means", means.sum(0)
    yield "the sum of all ranks is divided by this rank's own count", total / known.own_count
    yield "the sum of all ranks is divided by the number of ranks", total / known.size
    yield "it is the sum: divide by count", total


def _wrong_variances(known: _Known, alone: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what the usual mistakes make of the variance, each with what to say about it."""
    every = torch.cat([*known.batches])
    squares = every.square().mean(0)
    yield (
        "it divides by the number of values less one. BatchNorm normalises by the number itself; "
        "one less is for running_variance",
        every.var(0),
    )
    for correction in (0, 1):  # torch.var divides by one less unless told otherwise
        variances = [batch.var(0, correction=correction) for batch in known.batches]
        weighted = [
            len(batch) * variance for batch, variance in zip(known.batches, variances, strict=True)
        ]
        missing = (
            "Each is taken around its rank's own mean, so how far these means lie apart is missing. "
            "Send the sum of x**2"
        )
        yield f"it {alone}", variances[known.rank]
        yield f"it is the mean of the ranks' variances. {missing}", torch.stack(variances).mean(0)
        yield (
            f"it is the mean of the ranks' variances, weighted by their counts. {missing}",
            torch.stack(weighted).sum(0) / known.count,
        )
    yield "it is the mean of x**2: subtract mean**2", squares
    yield "subtract mean**2, not the mean", squares - known.mean
    yield (
        "the ranks' sum of x**2 is divided by this rank's own count",
        squares * known.count / known.own_count - known.mean.square(),
    )
    yield "it is the standard deviation, the root of the variance", known.variance.sqrt()


def _wrong_running_variances(known: _Known, alone: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what the usual mistakes make of the running variance, with what to say about it."""
    yield (
        "it divides by the number of values. That is right for normalising; evaluation estimates "
        "the variance of all images, which divides by one less: variance * count / (count - 1)",
        known.variance,
    )
    own = known.own_count
    yield "its count is this rank's own, not that of all ranks", known.variance * own / (own - 1)
    yield (
        "it is the wrong way round: count / (count - 1)",
        known.variance * (known.count - 1) / known.count,
    )
    yield f"it {alone}", known.batches[known.rank].var(0)


def _coarse_variance(returned: Any, right: Tensor) -> str | None:
    """Say whether float32 was too coarse for the sums of values around _FAR; None if not."""
    variance = returned[2].detach().double().reshape(-1)
    if bool(((variance - right).abs() <= 1e-3 * right).all()):
        return None
    why = (
        f"the mean of x**2 and mean**2 are both near {_FAR**2:,.0f}, float32 keeps 7 digits of "
        "them, and their difference has hardly any left. Make x.double() of x before you square"
    )
    what = f"and a mean of {_FAR:,.0f} in float32 the variance of each channel"
    return _differs(what, variance, right, why)


# --- backward ---


def _wrong_gradients(
    returned: Any, known: _Known, gradients: Sequence[Tensor], *, sent: bool
) -> str | None:
    """Say what is wrong with what gradients_over_ranks returns; None if nothing is.

    gradients : the right ones of x, weight and bias.
    """
    names = ("grad_x", "grad_weight", "grad_bias")
    shapes = {name: part.shape for name, part in zip(names, gradients, strict=True)}
    grad_x, *own = _tensors("gradients_over_ranks", returned, shapes)
    if not _close(grad_x, gradients[0]):
        why = _wrong_input_gradient(grad_x, known, sent=sent)
        return _differs(f"rank {known.rank}'s grad_x of the first value", grad_x, gradients[0], why)
    for name, part, right in zip(names[1:], own, gradients[1:], strict=True):
        if not _close(part, right):
            why = _wrong_part(part, name, known)
            return _differs(f"rank {known.rank}'s {name} of each channel", part, right, why)
    return None


def _wrong_part(found: Tensor, name: str, known: _Known) -> str:
    """Say what is wrong with the gradient of weight or bias."""
    parts = {"grad_bias": [g.sum(0) for g in known.arriving]}
    parts["grad_weight"] = [
        (g * z).sum(0) for g, z in zip(known.arriving, known.normalised(), strict=True)
    ]
    own = parts.pop(name)
    [other] = parts.values()
    total = torch.stack(own).sum(0)
    ways = {
        f"it is the sum over all ranks. Training adds up the ranks' gradients of all parameters "
        f"after backward, so it would count {known.size} times. Return this rank's part": total,
        "it is the mean over all ranks. Training averages the gradients of all parameters after "
        "backward. Return this rank's part": total / known.size,
        "grad_weight and grad_bias have changed places": other[known.rank],
        "it is divided by all ranks' count: a loss that is a mean divides already": own[known.rank]
        / known.count,
    }
    formula = {"grad_bias": "the sum of g", "grad_weight": "the sum of g * z"}[name]
    return _ways(found, iter(ways.items()), f"{formula} over this rank's values")


def _wrong_input_gradient(found: Tensor, known: _Known, *, sent: bool) -> str:
    """Say what is wrong with dL/dx: the fewest mistakes that give what was found.

    Each part of the formula has the right way, "", and wrong ones by what to say about them.
    """
    std = (known.variance + 1e-5).sqrt()
    own = known.batches[known.rank]
    zs = {
        "": known.normalised(),
        "z is computed with this rank's own mean, not with all ranks'": [
            (batch - batch.mean(0)) / std for batch in known.batches
        ],
        "z is computed with this rank's own mean and deviation, not with all ranks'": [
            nn.functional.batch_norm(batch, None, None, training=True) for batch in known.batches
        ],
    }
    summed = {
        "": range(known.size),
        f"the sums are this rank's own: {_unused('sums', sent=sent)}": [known.rank],
    }
    divisors = {
        "": known.count,
        "the sums are divided by this rank's own count, not by `count`": len(own),
        "the sums are divided by the number of ranks, not by `count`": known.size,
        "the sums are not divided by `count`": 1,
        "the ranks add up their sums twice": known.count / known.size,
    }
    firsts = {
        "": -1,
        "the term - sum(g) / count is missing: each x moves the mean, and so every z": 0,
        "sum(g) / count is added, not subtracted": 1,
    }
    seconds = {
        "": (-1, 1),
        "the term - z * sum(g * z) / count is missing: each x moves the deviation, and so every "
        "z": (0, 1),
        "z * sum(g * z) / count is added, not subtracted": (1, 1),
        "sum(g * z) / count is not multiplied by z": (-1, 0),
    }
    scales = {
        "": known.weight / std,
        "it is not multiplied by weight": 1 / std,
        "it is not divided by std": known.weight,
        "it is divided by the variance, not by std": known.weight / std.square(),
    }
    options = [way.items() for way in (zs, summed, divisors, firsts, seconds, scales)]
    choices = sorted(itertools.product(*options), key=lambda choice: len(_mistakes(choice)))
    for choice in choices:
        z, ranks, divisor, first, (second, power), scale = (value for _, value in choice)
        mean_g = sum(known.arriving[rank].sum(0) for rank in ranks) / divisor
        mean_gz = sum((known.arriving[rank] * z[rank]).sum(0) for rank in ranks) / divisor
        own_z = z[known.rank] ** power
        g = known.arriving[known.rank]
        if _close(found, scale * (g + first * mean_g + second * own_z * mean_gz)):
            return "; ".join(_mistakes(choice))
    return (
        "it is weight / std * (g - sum(g) / count - z * sum(g * z) / count), with all ranks' sums"
    )


def _mistakes(choice: Sequence[tuple[str, Any]]) -> list[str]:
    """Return what to say about the wrong ways in a choice."""
    return [told for told, _ in choice if told]


# --- VGG-11 ---


class Differences(NamedTuple):
    """How far ranks end from one process on the whole batch, relative to its weights.

    own : with the student's sums. local : with BatchNorm, which normalises each rank's batch.
    """

    own: float
    local: float


class _Normalise(torch.autograd.Function):
    """y = weight * z + bias, whose backward is the student's gradients_over_ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        moments: Sequence[Tensor],
        eps: float,
        student: Namespace,
    ) -> Tensor:
        total, mean, variance, _ = moments
        ctx.save_for_backward(x, weight)
        ctx.moments = (total, mean, variance)
        ctx.student = student
        return weight * (x - mean) / (variance + eps).sqrt() + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradients = ctx.student["gradients_over_ranks"](x, g, weight, *ctx.moments)
        names = ("grad_x", "grad_weight", "grad_bias")
        shapes = dict(zip(names, (x.shape, weight.shape, weight.shape), strict=True))
        return *_tensors("gradients_over_ranks", gradients, shapes), None, None, None


class _StudentBatchNorm(nn.BatchNorm2d):
    """A BatchNorm layer in float64 that takes its sums from the student's functions."""

    def __init__(self, channels: int, student: Namespace) -> None:
        super().__init__(channels, dtype=torch.float64)
        self._student = student

    def forward(self, input: Tensor) -> Tensor:
        rows = input.movedim(1, -1)
        x = rows.flatten(0, -2)  # (values, channels)
        names = ("count", "mean", "variance", "running_variance")
        shape = torch.Size([self.num_features])
        returned = self._student["moments_over_ranks"](x.detach())
        moments = _tensors("moments_over_ranks", returned, dict.fromkeys(names, shape))
        _, mean, _, running = moments
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(running, self.momentum)
        y = _Normalise.apply(x, self.weight, self.bias, moments, self.eps, self._student)
        return y.view_as(rows).movedim(-1, 1)


def _batches(samples: int) -> tuple[Tensor, Tensor, str]:
    """Return images and labels of STEPS batches, and what they are.

    Images have shape (STEPS, samples, 3, 32, 32), labels (STEPS, samples).
    """
    try:
        train = load_dataset("cifar10", Path("data"), mirror="").train
    except UserError:  # it is not here
        seeded = torch.Generator().manual_seed(0)
        images = torch.randn(STEPS, samples, 3, 32, 32, dtype=torch.float64, generator=seeded)
        labels = torch.randint(10, (STEPS, samples), generator=seeded)
        return images, labels, "random images"
    images = train.images[: STEPS * samples].permute(0, 3, 1, 2).double() / 255
    labels = train.labels[: STEPS * samples].long()
    centred = (images - images.mean()) / images.std()
    return (
        centred.unflatten(0, (STEPS, samples)),
        labels.unflatten(0, (STEPS, samples)),
        "CIFAR-10 images",
    )


def _train_vgg11(
    student: Namespace, shares: Sequence[int], images: Tensor, labels: Tensor
) -> Differences:
    """Train three times from the same weights; return the differences on rank 0, else zeros."""
    rank = dist.get_rank()
    samples = sum(shares)
    own_images = [batch.split(shares)[rank] for batch in images]
    own_labels = [batch.split(shares)[rank] for batch in labels]
    torch.manual_seed(0)
    begun = build_model("vgg11", 10).double()

    def end(
        model: nn.Module, images: Sequence[Tensor], labels: Sequence[Tensor], *, ranks: bool
    ) -> Tensor:
        return _train(model, list(zip(images, labels, strict=True)), samples, ranks=ranks)

    one_process = torch.zeros(0)
    if rank == 0:
        one_process = end(copy.deepcopy(begun), [*images], [*labels], ranks=False)
    local = end(copy.deepcopy(begun), own_images, own_labels, ranks=True)
    own = end(_with_student_layers(begun, student), own_images, own_labels, ranks=True)
    if rank > 0:
        return Differences(0, 0)
    scale = one_process.norm()
    return Differences(
        float((own - one_process).norm() / scale), float((local - one_process).norm() / scale)
    )


def _with_student_layers(model: nn.Module, student: Namespace) -> nn.Module:
    """Replace the BatchNorm layers, whose weights are new, and return the model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, _StudentBatchNorm(child.num_features, student))
    return model


def _train(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], samples: int, *, ranks: bool
) -> Tensor:
    """Take a step a batch as the assignment does; return the weights and running statistics.

    samples : of all ranks in a step. ranks : whether the ranks add up their gradients.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for images, labels in batches:
        optimizer.zero_grad()
        (cross_entropy(model(images), labels, reduction="sum") / samples).backward()
        if ranks:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
    state = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return torch.cat([tensor.flatten() for tensor in state])
