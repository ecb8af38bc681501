"""Lesson 7: what BatchNorm computes on shards, and what "equal to one process" then means."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.say import count
from lab.evidence import explain, judge
from lab.learn.lessons.sync_batchnorm import check_sums, check_vgg11
from lab.learn.program import flat_gradients, from_all_ranks
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile, shown

VALUES = ([1.0, 3.0, 5.0, 11.0], [1.0, 3.0], [1.0, 1.001], [2.0, 2.0])
SHARDS = 4


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 7; return what BatchNorm makes of the 3 on the rank with 1 and 3.

    The second step, SyncBatchNorm, is checked once it has no blanks.
    """
    [found] = student.on_ranks(1, _normalise)
    for values, own in zip(VALUES, found, strict=True):
        _check_normalised(values, own)
    say("normalise is what BatchNorm does in training")
    for name, norm in (("without", False), ("with", True)):
        differences, *_ = student.on_ranks(SHARDS, _compare_with_ranks, norm)
        for problem in (differences.wrong_one, differences.wrong_shards):
            if problem:
                raise Mistake(problem)
        say(
            f"{name} BatchNorm {SHARDS} ranks differ from {SHARDS} shards in turn by "
            f"{differences.shards:.0e}, from the whole batch by {differences.batch:.0e}"
        )
    if not student.blanks():
        check_sums(student, say)
        check_vgg11(student, say)
    _, of_1_and_3, *_ = found
    return of_1_and_3[1]


def _check_normalised(values: Sequence[float], own: Any) -> None:
    """Raise Mistake unless this is what BatchNorm makes of the values."""
    mean = np.mean(values)
    variance = np.var(values)
    if not _are_numbers(own, len(values)):
        raise Mistake(f"normalise({values}) returns {shown(own)}: return a number for each value")
    true = (np.array(values) - mean) / np.sqrt(variance + 1e-5)
    if np.allclose(own, true, atol=1e-4):
        return
    problem = "(value - mean) / sqrt(variance + 1e-5) is the formula"
    for way, wrong in _wrong_ways(np.array(values)).items():
        if np.allclose(own, wrong, atol=1e-4):
            problem = way
    raise Mistake(
        f"normalise({values}) is {np.round(own, 3).tolist()}, BatchNorm makes "
        f"{true.round(3).tolist()}: {problem}"
    )


def _are_numbers(values: Any, length: int) -> bool:
    """Return whether these are as many numbers."""
    if not isinstance(values, list) or len(values) != length:
        return False
    return all(isinstance(value, int | float) for value in values)


def _wrong_ways(values: NDArray) -> dict[str, NDArray]:
    """Return what the usual mistakes make of the values, by what to say about them."""
    centred = values - values.mean()
    variance = values.var()
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "the variance divides by the number of values, not by one less": centred
            / np.sqrt(values.var(ddof=1) + 1e-5),
            "the 1e-5 is added to the variance, not to its root": centred
            / (np.sqrt(variance) + 1e-5),
            "BatchNorm adds 1e-5 to the variance before it takes the root": centred
            / np.sqrt(variance),
            "divide by the root of the variance, not by the variance": centred / (variance + 1e-5),
            "subtract the mean first": values / np.sqrt(variance + 1e-5),
            "divide by the root of the variance as well": centred,
        }


def _normalise(student: Namespace) -> list[Any]:
    """Return what the student's BatchNorm makes of each of VALUES."""
    return [student["normalise"](list(values)) for values in VALUES]


class Differences(NamedTuple):
    """How far gradient_of_shards is from the gradients that real ranks compute.

    batch : the whole batch from the ranks' mean.
    shards : all shards from the ranks' mean.
    wrong_one, wrong_shards : what is wrong with one shard, and with all; None if nothing is.
    """

    batch: float
    shards: float
    wrong_one: str | None
    wrong_shards: str | None


def _wrong_shards(found: Any, own: Tensor) -> str | None:
    """Say what is wrong with a gradient of shards; None if nothing is.

    own : each shard's own gradient, of shape (shards, n).
    """
    shards = len(own)
    call = f"gradient_of_shards(model, images, labels, {shards})"
    if not isinstance(found, list) or not all(isinstance(part, Tensor) for part in found):
        return f"{call} returns {shown(found)}, and must return the list of gradients"
    flat = torch.cat([part.flatten() for part in found])
    evidence = explain(own.numpy(), flat.expand(shards, -1).numpy())
    if evidence.right:
        return None
    told = f"with {count(shards, 'shard')} it differs from the mean gradient of as many ranks"
    if evidence.factor == 0:
        return (
            f"{told}: it is zero, nothing was added. Change `gradient` itself, with +=: a new "
            "tensor is lost when the loop goes on"
        )
    return (
        f"{told}: {judge(evidence).sentence} (a shard counts as a rank). Add each shard's own "
        "gradient to what is there, with +=, and divide it by `shards`, once"
    )


def _compare_with_ranks(student: Namespace, norm: bool) -> Differences:
    """Compute gradients on the ranks and in shards, with or without BatchNorm."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    brightness = torch.linspace(0.2, 2, 32).reshape(-1, 1, 1, 1)  # so that the shards differ
    noise = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    images = brightness * noise
    labels = torch.arange(32) % 10
    own_images = images.chunk(size)[rank]
    own_labels = labels.chunk(size)[rank]

    def gradient(images: Tensor, labels: Tensor, shards: int) -> Any:
        model = student["build_model"](norm)
        return student["gradient_of_shards"](model, images, labels, shards)

    model = student["build_model"](norm)
    cross_entropy(model(own_images), own_labels).backward()
    own = flat_gradients(model)
    rows = from_all_ranks(own)
    mean = rows.mean(0)
    whole = gradient(images, labels, 1)
    one = gradient(own_images, own_labels, 1)
    in_turn = gradient(images, labels, size)
    wrong_one = _wrong_shards(one, own.unsqueeze(0))
    wrong_shards = _wrong_shards(in_turn, rows)
    if wrong_one or wrong_shards:
        return Differences(0, 0, wrong_one, wrong_shards)
    difference = student["difference"]
    return Differences(difference(whole, [mean]), difference(in_turn, [mean]), None, None)
