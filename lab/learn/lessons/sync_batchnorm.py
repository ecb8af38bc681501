"""Lesson 7, second step: the student's sums of a SyncBatchNorm, and VGG-11 trained with them.

``check_sums`` runs the student's two functions on known values, on ranks with unequal numbers of
them. ``check_vgg11`` puts them into the layers of VGG-11 and compares with one process.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from common.data import load_dataset
from common.errors import UserError
from common.models import build_model
from common.models.sync_batchnorm import MessageGroup, SyncBatchNorm, moments_over_ranks
from common.profiling.comm_trace import MessageRecorder
from common.say import count, listed
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile, shown

# Values that each rank has of a channel. First 3 ranks: on 2, many causes look alike.
VALUES = ((4, 2, 7), (2, 5))
SHARDS = ((3, 1, 2), (3, 2))  # images of VGG-11 on each rank, in a step
STEPS = 3
_CHANNELS = 2
_FAR = 1000.0  # a mean at which float32 is too coarse for squares of values near it
_EQUAL = 1e-9
_LIMIT_SECONDS = 600.0  # of VGG-11, which a busy machine trains slowly
_MOMENTS = ("count", "mean", "variance", "running_variance")
_GRADIENTS = ("grad_x", "grad_weight", "grad_bias")

Batch = tuple[Tensor, Tensor]  # images and labels
Ways = Iterator[tuple[str, Tensor]]  # what to say about a mistake, and what it computes


def check_sums(student: StudentFile, say: Say) -> None:
    """Check the student's sums on known values."""
    for shares in VALUES:
        where = f"on {len(shares)} ranks with {listed(shares)} values"
        found = student.on_ranks(len(shares), _on_known_values, shares)
        for rank in found:
            if rank.problem:
                raise Mistake(f"{where} {rank.problem}")
        forward = _messages(found[0].forward)
        backward = _messages(found[0].backward)
        say(
            f"{where} moments and gradients are those of all {sum(shares)}, with {forward} in "
            f"forward and {backward} in backward"
        )


def check_vgg11(student: StudentFile, say: Say) -> None:
    """Train VGG-11 with the student's sums, with BatchNorm and in one process; compare them."""
    pictures, labels, name = _pictures()
    for shares in SHARDS:
        differences, *_ = student.on_ranks(
            len(shares), _train_vgg11, shares, pictures, labels, limit_seconds=_LIMIT_SECONDS
        )
        told = (
            f"VGG-11 on {len(shares)} ranks with {listed(shares)} {name}, {STEPS} steps: with "
            f"your sums the weights differ from one process's by {differences.own:.0e}, with "
            f"BatchNorm by {differences.local:.0e}"
        )
        if not differences.own <= _EQUAL:
            raise Mistake(f"the known values are right, and yet {told}")
        say(told)


def _messages(number: int) -> str:
    told = count(number, "message")
    if number > 1:
        told += " (one would do: all sums in one tensor)"
    return told


# --- known values ---


class KnownValuesResult(NamedTuple):
    """What a rank found: the first thing that is wrong, and the messages of each pass."""

    problem: str | None
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class _KnownValues:
    """The values of a layer on all ranks, and what is right on this one.

    batches, arriving : of each rank x and dL/dy, of shape (values, channels).
    weight, mean, variance : of each channel; mean and variance are those of all values.
    right : what the student's functions must return, by name.
    """

    rank: int
    batches: Sequence[Tensor]
    arriving: Sequence[Tensor]
    weight: Tensor
    mean: Tensor
    variance: Tensor
    right: Mapping[str, Tensor]

    @property
    def ranks(self) -> int:
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

    def normalised(self) -> list[Tensor]:
        """Return the right z of each rank."""
        std = (self.variance + 1e-5).sqrt()
        return [(batch - self.mean) / std for batch in self.batches]


def _known_values(shares: Sequence[int]) -> _KnownValues:
    """Return values for all ranks, and what SyncBatchNorm makes of them. Collective."""
    rank = dist.get_rank()
    seeded = torch.Generator().manual_seed(1)
    batches: list[Tensor] = []
    arriving: list[Tensor] = []
    for number, values in enumerate(shares):
        draw = torch.randn(2, values, _CHANNELS, dtype=torch.float64, generator=seeded)
        batches.append((1 + number) * draw[0] + 2 * number)  # no rank's are like another's
        arriving.append(draw[1] + number)
    messages = MessageGroup()
    moments = moments_over_ranks(batches[rank], messages)
    plain = nn.BatchNorm1d(_CHANNELS, momentum=1.0, dtype=torch.float64)
    layer: Any = SyncBatchNorm.in_place_of(plain, messages)
    nn.init.uniform_(layer.weight, 0.5, 1.5, generator=seeded)
    x: Any = batches[rank].clone().requires_grad_()
    layer(x).backward(arriving[rank])
    total = moments.values.expand(_CHANNELS)
    of_moments = (total, moments.mean, moments.variance, layer.running_var)
    of_gradients = (x.grad, layer.weight.grad, layer.bias.grad)
    right = dict(zip(_MOMENTS + _GRADIENTS, of_moments + of_gradients, strict=True))
    weight = layer.weight.detach()
    return _KnownValues(rank, batches, arriving, weight, moments.mean, moments.variance, right)


def _on_known_values(student: Namespace, shares: Sequence[int]) -> KnownValuesResult:
    """Run the student's functions on known values."""
    known = _known_values(shares)
    x = known.batches[known.rank]
    with MessageRecorder() as forward:
        returned = student["moments_over_ranks"](x.clone())
    sent = _on_any_rank(bool(forward.messages))
    problem = _problem(_moments(returned, _CHANNELS), known, sent=sent)
    if _on_any_rank(problem is not None):
        return KnownValuesResult(problem)
    problem = _coarse_variance(student, _FAR + x.float() / 10)
    if _on_any_rank(problem is not None):
        return KnownValuesResult(problem)

    g = known.arriving[known.rank]
    moments = [known.right[name].clone() for name in _MOMENTS[:3]]
    with MessageRecorder() as backward:
        returned = student["gradients_over_ranks"](
            x.clone(), g.clone(), known.weight.clone(), *moments
        )
    sent = _on_any_rank(bool(backward.messages))
    problem = _problem(_gradients(returned, x), known, sent=sent)
    return KnownValuesResult(problem, len(forward.messages), len(backward.messages))


def _moments(returned: Any, channels: int) -> dict[str, Tensor]:
    """Return what moments_over_ranks returned, by name. Raises Mistake if it cannot be that."""
    parts = _parts("moments_over_ranks", returned, _MOMENTS)
    if isinstance(parts["count"], int | float):  # the same for all channels
        parts["count"] = torch.full((channels,), float(parts["count"]))
    shapes = dict.fromkeys(_MOMENTS, torch.Size([channels]))
    return _tensors("moments_over_ranks", parts, shapes)


def _gradients(returned: Any, x: Tensor) -> dict[str, Tensor]:
    """Return what gradients_over_ranks returned, by name. Raises Mistake if it cannot be that."""
    parts = _parts("gradients_over_ranks", returned, _GRADIENTS)
    # grad_x comes last: a wrong sum makes it wrong, too
    shapes = {"grad_weight": x.shape[1:], "grad_bias": x.shape[1:], "grad_x": x.shape}
    return _tensors("gradients_over_ranks", parts, shapes)


def _parts(function: str, returned: Any, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        raise Mistake(f"{function} returns {shown(returned)}, and must return {', '.join(names)}")
    return dict(zip(names, returned, strict=True))


def _tensors(
    function: str, parts: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    for name, shape in shapes.items():
        part = parts[name]
        if not isinstance(part, Tensor) or part.numel() != shape.numel():
            raise Mistake(
                f"{function} returns {shown(part)} as {name}, and must return a tensor of shape "
                f"{tuple(shape)}"
            )
    return {name: parts[name].detach().double().reshape(shapes[name]) for name in shapes}


def _on_any_rank(found: bool) -> bool:
    """Return whether any rank has found it. Collective."""
    number = torch.tensor([int(found)])
    dist.all_reduce(number)
    return bool(number)


def _problem(found: Mapping[str, Tensor], known: _KnownValues, *, sent: bool) -> str | None:
    """Say what is wrong with what a function returned on this rank; None if nothing is.

    sent : whether any rank sent anything.
    """
    wrong = [name for name, part in found.items() if not _close(part, known.right[name])]
    if not wrong:
        return None
    name, told = _most_telling(wrong, found, known)
    if _OWN_SUMS in told and not sent:
        told += ". No rank sends anything: dist.all_reduce(sums) adds up the ranks' sums"
    elif _OWN_SUMS in told:
        told += ", although a message is sent: use `sums` after it"
    return f"rank {known.rank}'s {_differs(name, found[name], known.right[name], told)}"


def _most_telling(
    wrong: Sequence[str], found: Mapping[str, Tensor], known: _KnownValues
) -> tuple[str, str]:
    """Return a wrong part whose cause is known, and the cause; else the first one's formula."""
    for name in wrong:
        told = _cause(found[name], _MISTAKES[name](known))
        if told is not None:
            return name, told
    return wrong[0], _FORMULAS[wrong[0]]


def _cause(found: Tensor, ways: Ways) -> str | None:
    """Return which mistake gives what was found, by and large; None if none does."""
    for told, wrong in ways:
        if told and torch.allclose(found, wrong, rtol=1e-4):
            return told
    return None


def _close(found: Tensor, right: Tensor) -> bool:
    return torch.allclose(found, right, rtol=_EQUAL, atol=_EQUAL)


def _differs(name: str, found: Tensor, right: Tensor, why: str) -> str:
    """Return that a result is wrong, with its first number, and why."""
    place = ", ".join("0" * found.dim())
    first_found = float(found.flatten()[0])
    first_right = float(right.flatten()[0])
    return f"{name}[{place}] is {first_found:.4g}, and must be {first_right:.4g}: {why}"


_OWN_SUMS = "it is made of this rank's own sums alone"


def _wrong_counts(known: _KnownValues) -> Ways:
    ones = torch.ones(_CHANNELS, dtype=torch.float64)
    own = known.own_count
    yield _OWN_SUMS, ones * own
    yield (
        "it is this rank's count times the number of ranks, but counts are unequal",
        ones * own * known.ranks,
    )
    yield "it is the mean of the ranks' counts: add them up", ones * known.count / known.ranks
    yield "it is the number of ranks, not of values", ones * known.ranks
    yield "the ranks add up their sums twice", ones * known.count * known.ranks


def _wrong_means(known: _KnownValues) -> Ways:
    total = torch.cat([*known.batches]).sum(0)
    means = torch.stack([batch.mean(0) for batch in known.batches])
    cure = "Send sums, and divide once, by all ranks' count"
    yield _OWN_SUMS, means[known.rank]
    yield (
        "it is the mean of the ranks' means, in which a rank with few values counts as much as one "
        f"with many. {cure}",
        means.mean(0),
    )
    yield f"it is the sum of the ranks' means. {cure}", means.sum(0)
    yield "all ranks' sum is divided by this rank's own count", total / known.own_count
    yield "all ranks' sum is divided by the number of ranks", total / known.ranks
    yield "it is the sum: divide by count", total


def _wrong_variances(known: _KnownValues) -> Ways:
    every = torch.cat([*known.batches])
    squares = every.square().mean(0)
    yield (
        "it divides by one less than the number of values. BatchNorm normalises with the number "
        "itself; one less is for running_variance",
        every.var(0),
    )
    yield "it is the mean of x**2: subtract mean**2", squares
    yield "subtract mean**2, not the mean", squares - known.mean
    of_sums = torch.stack([batch.sum(0).square() for batch in known.batches]).sum(0) / known.count
    yield (
        "it squares sums of x: square each x, then add them up, (x**2).sum(0)",
        of_sums - known.mean.square(),
    )
    by_own_count = squares * known.count / known.own_count - known.mean.square()
    yield "all ranks' sum of x**2 is divided by this rank's own count", by_own_count
    yield "it is the standard deviation: return its square", known.variance.sqrt()
    counts = torch.tensor([len(batch) for batch in known.batches]).unsqueeze(1)
    missing = (
        "each around its rank's own mean. How far these means lie apart is missing: send the sum "
        "of x**2"
    )
    for correction, divisor in enumerate(("", ", divided by one less")):  # torch.var's default is 1
        variances = torch.stack([batch.var(0, correction=correction) for batch in known.batches])
        mean = f"it is the mean of the ranks' variances{divisor}"
        weighted = (counts * variances).sum(0) / known.count
        yield _OWN_SUMS + divisor, variances[known.rank]
        yield f"{mean}, {missing}", variances.mean(0)
        yield f"{mean}, weighted by count, {missing}", weighted


def _wrong_running_variances(known: _KnownValues) -> Ways:
    own = known.own_count
    yield (
        "it divides by the number of values, as normalising does. Evaluation estimates the "
        "variance of all images, and an estimate divides by one less: variance * count / (count - "
        "1)",
        known.variance,
    )
    yield "its count is this rank's own", known.variance * own / (own - 1)
    squares = torch.cat([*known.batches]).square().sum(0) / (known.count - 1)
    yield (
        "the mean of x**2 alone divides by one less: take variance * count / (count - 1)",
        squares - known.mean.square(),
    )
    upside_down = known.variance * (known.count - 1) / known.count
    yield "it is the wrong way round: count / (count - 1)", upside_down
    yield _OWN_SUMS, known.batches[known.rank].var(0)


def _coarse_variance(student: Namespace, x: Tensor) -> str | None:
    """Say whether the sums are too coarse for these values in float32. Collective."""
    right = moments_over_ranks(x, MessageGroup()).variance
    found = _moments(student["moments_over_ranks"](x.clone()), _CHANNELS)["variance"]
    if torch.allclose(found, right, rtol=1e-3):
        return None
    why = (
        f"the mean of x**2 and mean**2 are both near {_FAR**2:,.0f}, float32 keeps 7 digits of "
        "them, and their difference has hardly any left. Take x.double() before you square"
    )
    return f"around {_FAR:,.0f} in float32, {_differs('variance', found, right, why)}"


def _wrong_input_gradients(known: _KnownValues) -> Ways:
    """Yield what mistakes make of dL/dx, the fewest first.

    Each part of the formula has the right way, "", and wrong ones by what to say about them.
    """
    std = (known.variance + 1e-5).sqrt()
    zs = {
        "": known.normalised(),
        "z is made with this rank's own mean": [
            (batch - batch.mean(0)) / std for batch in known.batches
        ],
        "z is made with this rank's own mean and deviation": [
            nn.functional.batch_norm(batch, None, None, training=True) for batch in known.batches
        ],
    }
    summed = {  # what counts how often
        "": dict.fromkeys(range(known.ranks), 1.0),
        _OWN_SUMS: {known.rank: 1.0},
        "the ranks send means, not sums": {
            rank: 1 / len(batch) for rank, batch in enumerate(known.batches)
        },
    }
    divisors = {
        "": known.count,
        "the sums are divided by this rank's own count, not by `count`": known.own_count,
        "the sums are divided by the number of ranks, not by `count`": known.ranks,
        "the sums are not divided by `count`": 1,
        "the ranks add up their sums twice": known.count / known.ranks,
    }
    firsts = {
        "": -1,
        "- sum(g) / count is missing: each x moves the mean, and with it every z": 0,
        "sum(g) / count is added, not subtracted": 1,
    }
    seconds = {  # the sign, and the power of z
        "": (-1, 1),
        "- z * sum(g * z) / count is missing: each x moves the deviation, and with it every z": (
            0,
            1,
        ),
        "z * sum(g * z) / count is added, not subtracted": (1, 1),
        "sum(g * z) / count is not multiplied by z": (-1, 0),
    }
    scales = {
        "": known.weight / std,
        "weight is missing": 1 / std,
        "it is not divided by std": known.weight,
        "it is divided by the variance, not by std": known.weight / std.square(),
    }
    options: list[Mapping[str, Any]] = [zs, summed, divisors, firsts, seconds, scales]
    choices = itertools.product(*(parts.items() for parts in options))
    g = known.arriving
    for choice in sorted(choices, key=lambda choice: len(_told(choice))):
        z, ranks, divisor, first, (second, power), scale = (value for _, value in choice)
        sums_g = [times * g[rank].sum(0) for rank, times in ranks.items()]
        sums_gz = [times * (g[rank] * z[rank]).sum(0) for rank, times in ranks.items()]
        first_term = first * torch.stack(sums_g).sum(0) / divisor
        second_term = second * z[known.rank] ** power * torch.stack(sums_gz).sum(0) / divisor
        yield "; ".join(_told(choice)), scale * (g[known.rank] + first_term + second_term)


def _told(choice: Sequence[tuple[str, Any]]) -> list[str]:
    """Return what to say about the wrong ways in a choice."""
    return [told for told, _ in choice if told]


def _wrong_grad_weights(known: _KnownValues) -> Ways:
    yield "it is grad_bias", known.right["grad_bias"]
    own = zip(known.arriving, known.normalised(), strict=True)
    yield from _wrong_parts(known, torch.stack([(g * z).sum(0) for g, z in own]))


def _wrong_grad_biases(known: _KnownValues) -> Ways:
    yield "it is grad_weight", known.right["grad_weight"]
    yield from _wrong_parts(known, torch.stack([g.sum(0) for g in known.arriving]))


def _wrong_parts(known: _KnownValues, parts: Tensor) -> Ways:
    """Yield what mistakes make of the gradient of weight or bias. parts : right, of each rank."""
    cure = "Return this rank's part, from before the message: training averages all gradients later"
    yield f"it is the sum over all ranks, and would count {known.ranks} times. {cure}", parts.sum(0)
    yield f"it is the mean over all ranks. {cure}", parts.mean(0)
    own = parts[known.rank]
    yield "it is divided by count, as the loss is already", own / known.count
    yield "it is divided by this rank's count, as the loss is already", own / known.own_count


_MISTAKES: Mapping[str, Callable[[_KnownValues], Ways]] = {
    "count": _wrong_counts,
    "mean": _wrong_means,
    "variance": _wrong_variances,
    "running_variance": _wrong_running_variances,
    "grad_x": _wrong_input_gradients,
    "grad_weight": _wrong_grad_weights,
    "grad_bias": _wrong_grad_biases,
}
_FORMULAS = {
    "count": "add up the numbers of values on every rank: dist.all_reduce",
    "mean": "divide all ranks' sum of x by count",
    "variance": "divide all ranks' sum of x**2 by count, and subtract mean**2",
    "running_variance": "take variance * count / (count - 1)",
    "grad_x": "take weight / std * (g - sum(g) / count - z * sum(g * z) / count), with the sums of "
    "all ranks",
    "grad_weight": "take the sum of g * z over this rank's values",
    "grad_bias": "take the sum of g over this rank's values",
}


# --- VGG-11 ---


class WeightDifferences(NamedTuple):
    """How far ranks end from one process on the whole batch, relative to its weights.

    own : with the student's sums. local : with BatchNorm, which normalises each rank's batch.
    """

    own: float
    local: float


class _StudentNormalise(torch.autograd.Function):
    """y = weight * z + bias, whose backward is the student's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: "_StudentBatchNorm", weight: Tensor, bias: Tensor
    ) -> Tensor:
        ctx.moments = layer.moments_over_ranks(x)
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        _, mean, variance = ctx.moments
        return weight * (x - mean) / (variance + layer.eps).sqrt() + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        returned = ctx.layer.student["gradients_over_ranks"](x, g, weight, *ctx.moments)
        grad_weight, grad_bias, grad_x = _gradients(returned, x).values()
        return grad_x, None, grad_weight, grad_bias


class _StudentBatchNorm(nn.BatchNorm2d):
    """A BatchNorm layer in float64 that takes its sums from the student's functions."""

    def __init__(self, channels: int, student: Namespace) -> None:
        super().__init__(channels, dtype=torch.float64)
        self.student = student

    def forward(self, input: Tensor) -> Tensor:
        rows = input.movedim(1, -1)
        y = _StudentNormalise.apply(rows.flatten(0, -2), self, self.weight, self.bias)
        return y.view_as(rows).movedim(-1, 1)

    def moments_over_ranks(self, x: Tensor) -> list[Tensor]:
        """Return count, mean and variance, and learn the running ones. x : (values, channels)."""
        returned = self.student["moments_over_ranks"](x)
        *moments, running_variance = _moments(returned, self.num_features).values()
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.lerp_(moments[1], self.momentum)
        self.running_var.lerp_(running_variance, self.momentum)
        return moments


def _pictures() -> tuple[Tensor, Tensor, str]:
    """Return images and labels for all steps, and what they are: CIFAR-10's if they are here.

    Images are uint8 of shape (n, 32, 32, 3).
    """
    number = STEPS * max(map(sum, SHARDS))
    try:
        train = load_dataset("cifar10", Path("data"), mirror="").train
    except UserError:
        seeded = torch.Generator().manual_seed(0)
        images = torch.randint(256, (number, 32, 32, 3), dtype=torch.uint8, generator=seeded)
        return images, torch.randint(10, (number,), generator=seeded), "random images"
    return train.images[:number].clone(), train.labels[:number], "CIFAR-10 images"


def _train_vgg11(
    student: Namespace, shares: Sequence[int], pictures: Tensor, labels: Tensor
) -> WeightDifferences:
    """Train three times from the same weights; rank 0 returns the differences."""
    rank = dist.get_rank()
    samples = sum(shares)
    images = pictures.permute(0, 3, 1, 2).double()
    images = (images - images.mean()) / images.std()
    batches = list(zip(images.split(samples), labels.split(samples), strict=True))[:STEPS]
    own = [(images.split(shares)[rank], labels.split(shares)[rank]) for images, labels in batches]
    torch.manual_seed(0)
    local: Any = build_model("vgg11", 10).double()
    one_process = copy.deepcopy(local)
    with_sums = copy.deepcopy(local)
    for number, layer in enumerate(with_sums.features):
        if isinstance(layer, nn.BatchNorm2d):
            with_sums.features[number] = _StudentBatchNorm(layer.num_features, student)
    if rank == 0:
        _train(one_process, batches, samples)
    for model in (local, with_sums):
        _train(model, own, samples, average=True)
    right = _state(one_process)
    differences = [(_state(model) - right).norm() / right.norm() for model in (with_sums, local)]
    return WeightDifferences(*map(float, differences))


def _train(
    model: nn.Module, batches: Sequence[Batch], samples: int, *, average: bool = False
) -> None:
    """Take a step with each batch, with the assignment's settings.

    samples : in a step, on all ranks. average : over the ranks' samples; collective.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for images, labels in batches:
        optimizer.zero_grad()
        (cross_entropy(model(images), labels, reduction="sum") / samples).backward()
        if average:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
        optimizer.step()


def _state(model: nn.Module) -> Tensor:
    """Return weights and running statistics."""
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return torch.cat([tensor.flatten() for tensor in tensors])
