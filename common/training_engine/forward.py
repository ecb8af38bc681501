"""One forward pass: what model and criterion make of a batch, in training and in evaluation.

``ForwardPass`` is the one place that knows what a batch may be. Its ``Result`` has the mean loss,
the count over which it is a mean (samples, or what the criterion counts, e.g. tokens), and the
outputs. The engine weighs shards and micro-batches by that count.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.process_group import World
from common.errors import UserError, first_line
from common.training_engine.batches import (
    WHAT_A_LOADER_YIELDS,
    MicroBatch,
    count_samples,
    is_pair,
    targets_of,
    tensors_in,
)

Count = int | float | Tensor  # a tensor has shape ()
ForwardStep = Callable[[Any, Any], tuple]  # (model, batch) -> loss, outputs[, count]
Criterion = Callable[..., Any] | None
_IGNORED_BY_DEFAULT = -100  # the ignore_index of torch's criteria


class Numbers(NamedTuple):
    """Mean loss, its count, right predictions (NaN: unknown) and samples, perhaps on the GPU."""

    loss: Any
    counted: Any
    correct: Any
    samples: Any


@dataclass(frozen=True)
class Result:
    """Of one forward pass: the mean loss, shape (), over ``count``, and what it was made of."""

    loss: Tensor
    count: Count
    outputs: Any
    batch: MicroBatch

    @property
    def targets(self) -> Any:
        """The targets of the batch, see ``targets_of``."""
        return targets_of(self.batch)

    @property
    def samples(self) -> int:
        """The number of samples of the batch."""
        return count_samples(self.batch)

    def correct(self) -> Any:
        """Return how many predictions are right; None unless there are class logits and labels.

        These are outputs (samples, classes) and one whole number for each sample.
        """
        outputs, labels = self.outputs, self.targets
        if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor):
            return None
        if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
            return None
        if outputs.dim() != 2 or outputs.shape[1] < 2 or outputs.shape[0] != labels.shape[0]:
            return None
        return (outputs.argmax(dim=1) == labels).sum()

    def numbers(self) -> Numbers:
        """Return the numbers for ``summed``; nothing is computed but the right predictions."""
        correct = self.correct()
        if correct is None:
            correct = math.nan
        return Numbers(self.loss.detach(), self.count, correct, self.samples)


class Sums(NamedTuple):
    """Over several results: the losses times their counts, the counts, and so on."""

    loss: float
    counted: float
    correct: float
    samples: float


def read(values: Sequence[Count]) -> list[float]:
    """Return the values as numbers; a GPU is read once."""
    on_gpu = [value for value in values if isinstance(value, Tensor) and value.is_cuda]
    if not on_gpu:
        return [float(value) for value in values]
    from_gpu = iter(torch.stack([value.double() for value in on_gpu]).tolist())
    numbers = []
    for value in values:
        is_read = isinstance(value, Tensor) and value.is_cuda
        numbers.append(next(from_gpu) if is_read else float(value))
    return numbers


def rows_of(values: Sequence[float]) -> list[Numbers]:
    """Return the rows of a flat list of numbers."""
    width = len(Numbers._fields)
    return [Numbers(*values[at : at + width]) for at in range(0, len(values), width)]


def summed(rows: Sequence[Numbers]) -> Sums:
    """Return the sums of numbers that ``read`` has returned; exact for float32 losses."""
    return Sums(
        sum(row.loss * row.counted if row.counted else 0.0 for row in rows),
        sum(row.counted for row in rows),
        sum(row.correct for row in rows),
        sum(row.samples for row in rows),
    )


class ForwardPass:
    """Computes loss and outputs of a batch.

    Parameters
    ----------
    criterion : criterion(outputs, targets) returns the mean loss over the samples, or
        ``loss, count``. None: the model returns its loss, as ``outputs.loss`` or
        ``outputs["loss"]``. torch's CrossEntropyLoss and NLLLoss count what they average over:
        targets that are not ignored, each with its class's weight.
    forward_step : forward_step(model, batch) returns ``loss, outputs`` or ``loss, outputs, count``,
        instead.

    Without ``forward_step``, a batch (inputs, targets) calls ``model(inputs)``; with a dict or a
    tuple of inputs, ``model(**inputs)`` or ``model(*inputs)``. A dict calls ``model(**batch)``; if
    there is a criterion, its "labels" are the targets and no argument of the model.
    """

    def __init__(self, criterion: Criterion, forward_step: ForwardStep | None = None) -> None:
        reduction = getattr(criterion, "reduction", "mean")
        if reduction != "mean":
            raise UserError(
                f"the criterion has reduction={reduction!r}: use 'mean', since the ranks' losses "
                "are weighted as means"
            )
        self._criterion = criterion
        self._step = forward_step
        self._is_torchs = type(criterion).__module__ == nn.modules.loss.__name__
        self._is_checked = self._is_torchs
        self._sum_criterion: Any = None
        if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
            self._sum_criterion = copy.copy(criterion)
            self._sum_criterion.reduction = "sum"

    def may_count_other_than_samples(self, batch: MicroBatch) -> bool:
        """Whether the loss may be a mean over anything but samples; the same on every rank."""
        if self._step is not None:
            return True
        if self._sum_criterion is not None:
            return self._divides_by_other_than_samples(targets_of(batch))
        return not self._is_torchs

    def refuse_ignored_labels(self, batch: MicroBatch) -> None:
        """Raise UserError if a sample's only label is one that the criterion ignores by default.

        Such a loss is a mean over the other samples, but ``may_count_other_than_samples`` must give
        all ranks the same answer, without a look at their labels. Labels on a GPU are not read.
        """
        if self._sum_criterion is None or self._step is not None:
            return
        labels = targets_of(batch)
        if not isinstance(labels, Tensor) or labels.device.type != "cpu":
            return
        if labels.is_floating_point() or self._divides_by_other_than_samples(labels):
            return
        if labels.numel() and int(labels.min()) == _IGNORED_BY_DEFAULT:  # else 0 or more
            kind = type(self._criterion).__name__
            raise UserError(
                f"a label is {_IGNORED_BY_DEFAULT}, which {kind} leaves out of its mean, while one "
                f"label a sample counts as a sample: use another number for these labels, e.g. -1, "
                f"and {kind}(ignore_index=-1), which counts the others"
            )

    def __call__(self, model: Callable[..., Any], batch: MicroBatch) -> Result:
        """Return the result of one batch; raises UserError if it cannot be one."""
        try:
            return self._forward(model, batch)
        except TypeError as error:
            strings = _strings_in(batch)
            if self._step is not None or not strings:
                raise
            raise UserError(
                f"the batch has strings in {', '.join(strings)}, which the model or the criterion "
                f"does not take ({first_line(error)}): leave them out in the dataset, or give "
                "forward_step(model, batch) -> loss, outputs"
            ) from error
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UserError(
                "BatchNorm cannot train on a batch of one sample, mostly the last batch of an "
                "epoch: give the DataLoader drop_last=True, or a batch_size that leaves more"
            ) from error

    def _forward(self, model: Callable[..., Any], batch: MicroBatch) -> Result:
        if self._step is not None:
            loss, outputs, *counted = self._step(model, batch)
            return _result(batch, outputs, loss, *counted)
        if isinstance(batch, Mapping):
            if self._criterion is None:
                _refuse_unknown_count(batch)
                outputs = model(**batch)
                return _result(batch, outputs, _own_loss(outputs))
            arguments = {name: value for name, value in batch.items() if name != "labels"}
            outputs = model(**arguments)
        elif is_pair(batch):
            outputs = _call(model, batch[0])
        else:
            kind = type(batch).__name__
            raise UserError(f"the loader yielded a {kind}: {WHAT_A_LOADER_YIELDS}")
        return self._judged(batch, outputs)

    def _judged(self, batch: MicroBatch, outputs: Any) -> Result:
        """Return the result of outputs that the criterion judges."""
        if not count_samples(batch):  # a loss of 0, so that backward still gives zeros
            return Result(_zero(outputs), 0, outputs, batch)
        if self._criterion is None:
            raise UserError("batches (inputs, targets) need a criterion, or a forward_step")
        targets = targets_of(batch)
        if self._sum_criterion is not None and self._divides_by_other_than_samples(targets):
            count = self._divisor(targets)
            # Without any target the mean would be 0 / 0, also for the other ranks.
            loss = self._sum_criterion(outputs, targets) / torch.where(count > 0, count, 1)
            return Result(loss, count, outputs, batch)
        judged = self._criterion(outputs, targets)
        if isinstance(judged, tuple):
            return _result(batch, outputs, *judged)
        if not self._is_checked:
            self._is_checked = True
            self._warn_of_a_sum(outputs, targets, judged)
        if _has_several_a_sample(targets):
            warnings.warn(
                "the criterion returns no count, so its loss counts as a mean over samples: if it "
                "is one over labels whose number differs between samples, return loss, count",
                stacklevel=2,
            )
        return _result(batch, outputs, judged)

    @torch.no_grad()
    def _warn_of_a_sum(self, outputs: Any, targets: Any, loss: Tensor) -> None:
        """Warn if the loss doubles when each sample comes twice, as a sum does and no mean."""
        assert self._criterion is not None
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return
        if not outputs.dim() or not targets.dim():
            return
        twice = self._criterion(torch.cat([outputs, outputs]), torch.cat([targets, targets]))
        if loss != 0 and torch.isclose(twice, 2 * loss, rtol=1e-4, atol=0):
            warnings.warn(
                "the criterion's loss doubles when each sample comes twice, as a sum over samples "
                "does, and it counts as a mean: return loss / len(outputs)",
                stacklevel=2,
            )

    def _divisor(self, targets: Tensor) -> Tensor:
        """Return what torch divides the sum by, shape (); without a wait for the GPU."""
        kept = targets != self._sum_criterion.ignore_index
        if self._sum_criterion.weight is None:
            return kept.sum()
        return (self._sum_criterion.weight[torch.where(kept, targets, 0)] * kept).sum()

    def _divides_by_other_than_samples(self, targets: Any) -> bool:
        """Whether CrossEntropyLoss or NLLLoss divides by anything but the samples."""
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            return False
        chosen = (
            self._sum_criterion.weight is not None
            or self._sum_criterion.ignore_index != _IGNORED_BY_DEFAULT
        )
        return chosen or targets.dim() > 1


def _result(batch: MicroBatch, outputs: Any, loss: Tensor, count: Count | None = None) -> Result:
    """Return a result; without a count the loss is a mean over the samples."""
    return Result(loss, count_samples(batch) if count is None else count, outputs, batch)


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)


def _strings_in(batch: MicroBatch) -> list[str]:
    """Return the names of a dict's entries that are strings, or lists that begin with one."""
    found = []
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            if isinstance(value, str | list | tuple) and isinstance(next(iter(value), None), str):
                found.append(repr(name))
    return found


def _own_loss(outputs: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if not isinstance(loss, Tensor):
        raise UserError(
            f"without a criterion the model must return its loss, as .loss or ['loss'], and it "
            f"returned a {type(outputs).__name__} without one: give a criterion, or "
            "forward_step(model, batch) -> loss, outputs"
        )
    return loss


def _refuse_unknown_count(batch: Mapping[str, Any]) -> None:
    """Raise UserError if a model's own loss may be a mean over anything but samples.

    A language model averages over the tokens that its labels do not leave out, as it sees fit.
    """
    labels = batch.get("labels")
    if _has_several_a_sample(labels):
        raise UserError(
            f"labels of shape {tuple(labels.shape)} and a model's own loss: over how many of them "
            "it is a mean decides its weight. Give forward_step(model, batch) -> loss, outputs, "
            "count, with a causal language model's count, for example: "
            "(batch['labels'][:, 1:] != -100).sum()"
        )


def _has_several_a_sample(labels: Any) -> TypeGuard[Tensor]:
    """Whether there are several whole numbers for each sample, e.g. one for each token."""
    return isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point()


def _zero(outputs: Any) -> Tensor:
    """Return 0 that depends on all outputs."""
    return torch.stack([tensor.sum() * 0 for tensor in tensors_in(outputs)]).sum()


class GlobalCount:
    """The samples of a step over all ranks, or what the criterion counts.

    ``expected`` weighs the losses before backward. Where it may not be the step's own count, that
    travels beside the gradients: ``start`` sends this rank's, and ``correction`` is the factor that
    makes the exchanged gradients those of the mean over the global batch.
    """

    def __init__(self, world: World, expected: int) -> None:
        self.expected = max(1, expected)
        self._world = world
        self._work: Any = None
        self._total: Tensor | None = None

    def weighted(self, result: Result) -> Tensor:
        """Return the loss times its share of the global batch times the number of ranks."""
        if isinstance(result.count, Tensor):  # first, since a whole number / n would be float32
            return result.loss * result.count * (self._world.size / self.expected)
        weight = result.count * self._world.size / self.expected
        return result.loss if weight == 1 else result.loss * weight

    def start(self, count: Count) -> None:
        """Send this rank's count. Collective; does not wait."""
        self._total = torch.as_tensor(count, dtype=torch.float64, device=self._world.device).clone()
        if self._world.size > 1:
            self._work = dist.all_reduce(self._total, async_op=True)

    def correction(self) -> Tensor | None:
        """Return the factor, shape (); None: 1. Collective; a GPU's host does not wait."""
        if self._work is not None:
            self._work.wait()
        total = self._total
        if total is None:
            return None
        if not total.is_cuda and float(total) == self.expected:
            return None
        return self.expected / total
