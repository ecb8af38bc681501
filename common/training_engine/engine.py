"""TrainingEngine: the training step and the epoch around it, the same for every strategy, device and part.

Order of the calls: ``TrainingEngine(...)``, ``prepare`` once, ``train_epoch`` for each epoch, ``close``.
"""

import hashlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.data.sharding import STEP_STREAM, stream_seed
from common.distributed import World, agree, current_world, gather_objects
from common.errors import GroupError, UserError
from common.sync import build_sync
from common.sync.base import GradientSync
from common.sync.none import NoSync
from common.timing import StepTimer
from common.training_engine.batchnorm import agree_on_buffers
from common.training_engine.prediction import to_device, unwrap


@dataclass(frozen=True)
class StepRecord:
    """One step: ``loss`` and ``accuracy`` over the global batch, ``local_loss`` over this rank's share, seconds by
    section, the learning rate it used. Steps count from 1 over the whole training."""

    epoch: int
    step: int
    samples: int
    loss: float
    accuracy: float
    local_loss: float
    learning_rate: float
    seconds: dict[str, float]


@dataclass
class EpochResult:
    """What this rank did in one epoch: ``samples``, their summed loss, how many it predicted right, the seconds of each
    step and of the whole epoch."""

    samples: int = 0
    loss_sum: float = 0.0
    correct: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, *, loss_sum: float, correct: float, samples: int, step_seconds: float) -> None:
        """Count one step."""
        self.samples += samples
        self.loss_sum += loss_sum
        self.correct += correct
        self.step_seconds.append(step_seconds)

    @property
    def loss(self) -> float:
        """Mean over this rank's samples."""
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """Share of this rank's samples predicted right, before each step's update; 0 to 1."""
        return self.correct / self.samples if self.samples else math.nan

    @property
    def mean_step_seconds(self) -> float:
        """Mean over the steps but the first, which warms up."""
        warm = self.step_seconds[1:] or self.step_seconds
        return sum(warm) / len(warm) if warm else math.nan


@dataclass(frozen=True)
class _Pending:
    """A step whose numbers may still be on the GPU: mean loss, right predictions, norm of the gradients."""

    step: int
    loss: Tensor
    correct: Tensor
    gradient_norm: Tensor
    samples: int
    learning_rate: float
    times: dict[str, tuple]


class TrainingEngine:
    """Trains any ``nn.Module`` on any loader of (inputs, labels), alone or in the open process group.

    Parameters
    ----------
    model : moved to ``device`` already; may be wrapped in DistributedDataParallel.
    sync : a strategy or its name; see common/sync.
    amp_dtype : torch.float16 (with a GradScaler) or torch.bfloat16 for mixed precision; None for float32.
    """

    def __init__(self, model: nn.Module, device: torch.device | str, *, sync: GradientSync | str = "none",
                 amp_dtype: torch.dtype | None = None) -> None:
        self.device = torch.device(device)
        self.sync: GradientSync = build_sync(sync) if isinstance(sync, str) else sync
        self.world = World(device=self.device) if isinstance(self.sync, NoSync) else current_world(self.device)
        self._amp_dtype = amp_dtype
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=amp_dtype == torch.float16)
        self.timer = StepTimer(self.device)
        self.model = model
        self.step = 0
        self._first_batch = True
        self._samples_since_agreement = 0

    def prepare(self, optimizer: Optimizer, criterion: nn.Module, scheduler: LRScheduler | None = None) -> None:
        """Hand over what trains, give all ranks rank 0's weights, and check that they train the same model.

        ``scheduler`` is stepped after every optimiser step. Raises UserError where the ranks' parameters differ in
        name, shape or type, and where ``criterion`` is not a mean over the batch.
        """
        if getattr(criterion, "reduction", "mean") != "mean":
            raise UserError(f"the criterion has reduction={criterion.reduction!r}: use 'mean', since the ranks' losses "
                            "are weighted as means")
        self._optimizer, self._criterion, self._scheduler = optimizer, criterion, scheduler
        agree(self.world, {name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
                           for name, p in unwrap(self.model).named_parameters()}, what="the model's parameters")
        self.model = self.sync.prepare(self.model, optimizer)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self.timer.watch_gradients(self.model)

    def close(self) -> None:
        """Remove every hook from the model."""
        self.timer.close()
        self.sync.close()

    def train_step(self, inputs: Tensor, labels: Tensor, *, global_samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """One optimiser step on this rank's share of a global batch of ``global_samples``.

        The mean loss is weighted by local samples x ranks / global samples, so that the plain mean of the ranks'
        gradients is the gradient of the mean loss over the global batch, also where shares differ. Returns the
        unweighted mean loss, the number of right predictions and the norm of the synchronised gradients, as tensors.
        """
        timer, share = self.timer, len(labels)
        self._optimizer.zero_grad(set_to_none=True)
        with timer.section("forward"):
            outputs, loss = self._forward(inputs, labels)
            weighted = loss * (share * self.world.size / global_samples)
        with timer.section("backward"):
            self.scaler.scale(weighted).backward()
        with timer.section("sync"):
            self.sync.synchronize(self.model)
        with timer.section("update"):
            self.scaler.unscale_(self._optimizer)
            norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
            self.scaler.step(self._optimizer)
            self.scaler.update()
            self.sync.after_step(self.model)
            if self._scheduler is not None:
                self._scheduler.step()
            correct = (outputs.detach().argmax(dim=1) == labels).sum() if share else torch.zeros((), device=self.device)
        self.step += 1
        self._samples_since_agreement += share
        return loss.detach(), correct, norm

    def _forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, dtype=self._amp_dtype, enabled=self._amp_dtype is not None):
            if len(labels):
                outputs = self.model(inputs)
                return outputs, self._criterion(outputs, labels)
            # No sample on this rank: take part with zero gradients, but BatchNorm must not learn from nothing.
            learning = [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.training]
            for layer in learning:
                layer.eval()
            outputs = self.model(inputs)
            for layer in learning:
                layer.train()
            return outputs, outputs.sum() * 0

    def train_epoch(self, loader: Iterable[tuple[Tensor, Tensor]], *, epoch: int, seed: int | None = None,
                    max_steps: int | None = None, log_every: int = 10,
                    on_steps: Callable[[list[StepRecord]], None] | None = None) -> EpochResult:
        """Train on every batch of ``loader`` once, or until ``self.step`` reaches ``max_steps``.

        Parameters
        ----------
        loader : yields (inputs, labels). If it has ``global_batch_sizes`` (samples of each step over all ranks), these
            weight the loss; else each step costs an 8-byte all_reduce.
        seed : if given, torch's generator is set before each step from (seed, epoch, step, rank).
        on_steps : called on every rank every ``log_every`` steps with their records; one small all_reduce each time.

        Raises GroupError on every rank where loss or gradients are not finite on one.
        """
        result, began = EpochResult(), time.perf_counter()
        pending: list[_Pending] = []
        sizes = getattr(loader, "global_batch_sizes", None)
        batches = iter(loader)
        self.model.train()
        try:
            for index in itertools.count():
                if max_steps is not None and self.step >= max_steps:
                    break
                if seed is not None:
                    torch.manual_seed(stream_seed(seed, STEP_STREAM, epoch, index, self.world.rank))
                with self.timer.section("data"):
                    batch = next(batches, None)
                    if batch is None:
                        break
                    inputs, labels = to_device(batch[0], self.device), batch[1].to(self.device, non_blocking=True)
                if self._first_batch:
                    self._warn_of_equal_batches(inputs, labels)
                global_samples = sizes[index] if sizes is not None else self._global_samples(len(labels))
                rate = self._optimizer.param_groups[0]["lr"]
                loss, correct, norm = self.train_step(inputs, labels, global_samples=global_samples)
                pending.append(_Pending(self.step, loss, correct, norm, len(labels), rate, self.timer.take()))
                # All ranks hold the same gradients, so all of them see here that they are not finite.
                if self.step % log_every == 0 or (self.device.type == "cpu" and not math.isfinite(float(norm))):
                    self._flush(pending, result, epoch, on_steps)
            self._flush(pending, result, epoch, on_steps)
        except BaseException:
            if on_steps is not None and pending:  # what was trained is recorded, as far as this rank knows it
                on_steps([self._record(epoch, step, loss=math.nan, accuracy=math.nan) for step in pending])
            raise
        result.seconds = time.perf_counter() - began
        return result

    def agree_on_buffers(self) -> None:
        """Make the buffers equal on all ranks, as common/training_engine/batchnorm.py says; before evaluation and
        before a checkpoint. Collective."""
        if self.world.size > 1:
            agree_on_buffers(unwrap(self.model), self._samples_since_agreement)
        self._samples_since_agreement = 0

    def _global_samples(self, local: int) -> int:
        if self.world.size == 1:
            return local
        count = torch.tensor([local], dtype=torch.int64, device=self.device)
        dist.all_reduce(count)
        return int(count)

    def _warn_of_equal_batches(self, inputs: Tensor, labels: Tensor) -> None:
        """The commonest mistake of all: no sampler, so that all ranks train on the same samples."""
        self._first_batch = False
        if self.world.size == 1:
            return
        mine = [hashlib.sha256(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
                for t in (inputs, labels)]
        others = gather_objects(self.world, (*mine, len(labels) >= 8 and len(labels.unique()) > 1))
        same_inputs, same_labels = (len({other[column] for other in others}) == 1 for column in (0, 1))
        if len(labels) and (same_inputs or (same_labels and all(telling for *_, telling in others))):
            warnings.warn("all ranks train on the same samples: their first batches are equal. Give each rank a share of "
                          "its own, e.g. by torch.utils.data.DistributedSampler", stacklevel=4)

    def _flush(self, pending: list[_Pending], result: EpochResult, epoch: int,
               on_steps: Callable[[list[StepRecord]], None] | None) -> None:
        """Turn the steps since the last flush into records of the global batch, and stop where one is not finite."""
        if not pending:
            return
        table = torch.zeros(len(pending), 4, dtype=torch.float64)  # loss sum, right predictions, samples, not finite
        for row, step in zip(table, pending, strict=True):
            loss, bad_norm = float(step.loss), not math.isfinite(float(step.gradient_norm))
            bad = not math.isfinite(loss) or (bad_norm and not self.scaler.is_enabled())
            row[:] = torch.tensor([loss * step.samples if step.samples else 0.0, float(step.correct), step.samples, bad])
        total = table.to(self.device)
        if self.world.size > 1:
            dist.all_reduce(total)
        good = [step for step, row in zip(pending, total.tolist(), strict=True) if row[3] == 0]
        for step, mine in zip(good, table.tolist(), strict=False):
            result.add(loss_sum=mine[0], correct=mine[1], samples=step.samples,
                       step_seconds=sum(self.timer.seconds(step.times).values()))
        if on_steps is not None and good:
            on_steps([self._record(epoch, step, loss=row[0] / row[2], accuracy=row[1] / row[2])
                      for step, row in zip(good, total.tolist(), strict=False)])
        bad_steps = pending[len(good):]
        pending.clear()
        if bad_steps:
            self._raise_not_finite(epoch, bad_steps[0])

    def _record(self, epoch: int, step: _Pending, *, loss: float, accuracy: float) -> StepRecord:
        return StepRecord(epoch, step.step, step.samples, loss, accuracy, float(step.loss), step.learning_rate,
                          self.timer.seconds(step.times))

    def _raise_not_finite(self, epoch: int, step: _Pending) -> None:
        losses = gather_objects(self.world, float(step.loss))
        culprits = [f"loss {loss} on rank {rank}" for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        what = ", ".join(culprits) if culprits else "gradients overflowed, the loss was finite"
        raise GroupError(f"not finite in epoch {epoch}, step {step.step}: {what}. All ranks stop; earlier checkpoints are "
                         "kept. Lower --learning-rate, warm up longer, or look for broken inputs")
