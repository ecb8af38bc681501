"""TrainingEngine: the training step, the same for every strategy, device, part and recipe.

``TrainingEngine(...).train(...)`` does everything. To write your own loop, call ``prepare`` once,
then ``fit`` for several epochs or ``train_epoch`` for one, then ``close``. ``train_step`` is the
step itself; the loops around it are in epochs.py.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.distributed.collectives import check_same_on_all_ranks
from common.distributed.process_group import (
    World,
    check_open,
    cleanup_distributed,
    current_world,
    own_device,
    setup_distributed,
)
from common.errors import UserError
from common.profiling.step_timer import StepTimer
from common.sync import build_sync
from common.sync.base import GradientSync, check_strategy
from common.sync.none import NoSync
from common.training_engine import batchnorm
from common.training_engine.amp import autocast, build_scaler, choose_amp
from common.training_engine.captured_step import CapturedStep, compile_for, obstacle, release
from common.training_engine.checkpoint_manager import load_state, state
from common.training_engine.ema import WeightAverage, checked_decay
from common.training_engine.epochs import MicroBatch, fit, flush_metrics, train_epoch
from common.training_engine.evaluation_loop import model_to_device, unwrap
from common.training_engine.metrics import EpochResult, MetricsBuffer, StepOutcome, sum_over_ranks
from common.training_engine.train import train

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from common.emulation.emulated_model import Emulation
    from common.profiling.comm_trace import Timeline


class TrainingEngine:
    """Trains any ``nn.Module`` on any loader of (inputs, labels), alone or in a process group.

    Parameters
    ----------
    model : moved to ``device`` here; may be wrapped in DistributedDataParallel.
    device : "cuda" in a group means the GPU of ``local_rank``.
    distributed : average gradients over the open group (``setup_distributed`` and
        ``launch_distributed_training`` open one).
    world_size, backend : what the caller expects of the group; a contradiction is an error.
    use_amp : mixed precision: fp16 with a GradScaler on a GPU; bf16 on a CPU that is fast at it,
        and with a strategy that is not exact. ``amp_dtype`` (torch.float16, torch.bfloat16) chooses
        the type instead.
    use_ema : keep, evaluate and save an exponential moving average of the weights, too (ema.py).
    sync_batchnorm : in a group on GPUs, BatchNorm layers that train normalise over all ranks.
        Otherwise each rank normalises its own batch.
    accumulation_steps : micro-batches (the loader's batches) of one optimiser step; ranks
        communicate once for all of them.
    sync : a strategy or its name, see common/sync; used if ``distributed``.
    clip_norm : upper limit for the norm of all gradients taken together.
    capture : record the step as a CUDA graph where that is possible (captured_step.py); the
        attribute ``not_captured`` then says why it is not. Its sections are not timed.
    compile_model : compile the model with ``torch.compile`` for the shape of the loader's first
        batch, which is loaded once more; other shapes and evaluation run uncompiled. The attribute
        ``compile_seconds`` is the time that it took, before the first step.
    experiment_name, output_dir : ``train`` writes to ``output_dir/experiment_name/``.
    world : the open group, if the caller knows it.

    Set ``timeline`` (comm_trace.py) to record the messages of some steps. Set ``emulation``
    (emulated_model.py) if the model sleeps instead of computing: weights then never change.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str,
        *,
        distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        backend: str | None = None,
        use_amp: bool = False,
        amp_dtype: torch.dtype | None = None,
        use_ema: bool = False,
        ema_decay: float = 0.9999,
        sync_batchnorm: bool = True,
        accumulation_steps: int = 1,
        sync: GradientSync | str = "ddp",
        clip_norm: float | None = None,
        capture: bool = False,
        compile_model: bool = False,
        experiment_name: str = "experiment",
        output_dir: str | Path = "reports",
        world: World | None = None,
    ) -> None:
        self.device = own_device(device, local_rank, distributed=distributed)
        self.sync: GradientSync = NoSync()
        if distributed:
            self.sync = build_sync(sync) if isinstance(sync, str) else sync
        alone = isinstance(self.sync, NoSync)
        if not alone:
            check_open(world_size, backend)
        self.world = World(device=self.device) if alone else world or current_world(self.device)
        for name, value in (("accumulation_steps", accumulation_steps), ("clip_norm", clip_norm)):
            if value is not None and value <= 0:
                raise UserError(f"{name}: got {value}, give a number above 0")
        if use_amp and amp_dtype is None:
            amp_dtype, notice = choose_amp(
                True, None, default=True, device=self.device, exact=self.sync.exact
            )
            self.notice(notice)
        self.amp_dtype = amp_dtype
        self.scaler = build_scaler(self.device, amp_dtype, sharded=not self.sync.equal_gradients)
        check_strategy(self.sync, scales=self.scaler.is_enabled(), use_ema=use_ema)
        self.timer = StepTimer(self.device, self.world.activity)
        self.sync.waiting = partial(self.timer.section, "sync")
        self.world.activity.period = self.sync.period
        model = model_to_device(model, self.device)
        if sync_batchnorm and self.world.size > 1:
            model, notice = batchnorm.synchronise_where_possible(model, self.device)
            self.notice(notice)
        self.model = model
        self.ema: WeightAverage | None = None
        self._ema_decay = checked_decay(ema_decay) if use_ema else None
        self.accumulation_steps, self._clip_norm = accumulation_steps, clip_norm
        self.output_folder = Path(output_dir) / experiment_name
        self.compiles, self.compile_seconds = compile_model, 0.0
        self._capture = capture
        self.captured: CapturedStep | None = None
        self.not_captured = "" if capture else "--capture off or --profile (capture=False)"
        self.step = 0
        self.timeline: Timeline | None = None
        self.emulation: Emulation | None = None
        self.stopping = self.stop_requested = False
        self.first_batch_compared = False
        self.metrics: MetricsBuffer | None = None  # of the epoch that trains
        self.resumed_epoch = EpochResult()

    setup_distributed = staticmethod(setup_distributed)
    cleanup_distributed = staticmethod(cleanup_distributed)
    train = train
    fit = fit
    train_epoch = train_epoch
    flush_metrics = flush_metrics
    compile_for = compile_for
    state = state
    load_state = load_state

    def notice(self, text: str) -> None:
        """Warn on rank 0 that the engine deviates from the request; ignore an empty ``text``."""
        if text and self.world.is_rank0:
            warnings.warn(text, stacklevel=3)

    def prepare(
        self,
        optimizer: "Optimizer",
        criterion: nn.Module,
        scheduler: "LRScheduler | None" = None,
        *,
        scheduler_by_epoch: bool = False,
    ) -> None:
        """Check that all ranks train the same model, and give them rank 0's weights. Collective.

        The engine steps ``scheduler`` after every optimiser step; with ``scheduler_by_epoch`` the
        caller steps it after every epoch. Raises UserError if the ranks' parameters differ in name,
        shape or type, or if ``criterion`` is not a mean over the batch.
        """
        if getattr(criterion, "reduction", "mean") != "mean":
            raise UserError(
                f"the criterion has reduction={criterion.reduction!r}: use 'mean', since the "
                "ranks' losses are weighted as means"
            )
        self.optimizer, self.criterion, self.scheduler = optimizer, criterion, scheduler
        self._scheduler_by_epoch = scheduler_by_epoch
        parameters = {
            name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for name, p in unwrap(self.model).named_parameters()
        }
        check_same_on_all_ranks(self.world, parameters, what="the model's parameters")
        if not any(p.requires_grad for p in self.model.parameters()):
            raise UserError(
                "no parameter of the model trains: set requires_grad=True on those that should"
            )
        self.model = self.sync.prepare(self.model, optimizer)
        if self._ema_decay is not None and self.ema is None:
            self.ema = WeightAverage(unwrap(self.model), self._ema_decay)
        self.shards = batchnorm.ShardStatistics(unwrap(self.model), 1)
        if self.world.size > 1:  # with one rank nothing is exchanged after the last gradient
            self.timer.watch_gradients(self.model)
        if self._capture:
            self.not_captured = obstacle(self)
            if not self.not_captured:
                self.captured = CapturedStep(self._compute_alone, optimizer)

    def close(self) -> None:
        """Remove the hooks and the compiled code from the model, and the recorded step."""
        release(self)
        self.timer.close()
        self.sync.close()

    def request_stop(self) -> None:
        """Ask all ranks to stop at the next step on which they agree; safe in a signal handler."""
        self.stop_requested = True

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        global_samples: int,
        seeds: Sequence[int] | None = None,
    ) -> StepOutcome:
        """Do one optimiser step on this rank's micro-batches of a global batch. Collective.

        The mean loss of a micro-batch is weighted by its samples x ranks / ``global_samples``. So
        the plain mean of the ranks' gradients is the gradient of the mean loss over the global
        batch, even if the ranks' shares differ in size. Gradients are exchanged once, after the
        last one. ``seeds`` : for torch's generator, one for each micro-batch.
        """
        self.world.activity.step = self.step + 1
        if self.captured and len(micro_batches) == 1 and self.captured.fits(*micro_batches[0]):
            if seeds is not None:
                torch.manual_seed(seeds[0])
            outcome = StepOutcome(self.captured(*micro_batches[0]))
        else:
            outcome = self._compute(micro_batches, global_samples, seeds)
            with self.timer.section("sync"):
                self.sync.after_step(self.model)  # some strategies exchange weights
        with self.timer.section("update"):
            self._after_update()
        self.step += 1
        return outcome

    def _compute(
        self, micro_batches: Sequence[MicroBatch], global_samples: int, seeds: Sequence[int] | None
    ) -> StepOutcome:
        """Do forward, backward, exchange and update, without a wait for the GPU."""
        timer = self.timer
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for index, (inputs, labels) in enumerate(micro_batches):
            if seeds is not None:
                torch.manual_seed(seeds[index])  # a resumed run draws the same dropout masks
            weight = len(labels) * self.world.size / global_samples
            with self._micro_batch(index, len(micro_batches), len(labels)):
                with timer.section("forward"), autocast(self.device, self.amp_dtype):
                    outputs = self.model(inputs)  # (samples, classes)
                    loss = self._mean_loss(outputs, labels)
                with timer.section("backward"):
                    self.scaler.scale(loss * weight).backward()  # adds to p.grad
            loss_sum += loss.detach().double() * len(labels)  # exact for a float32 loss
            correct += (outputs.argmax(dim=1) == labels).sum()
        with timer.section("sync"):
            self.sync.synchronize(self.model)  # p.grad becomes the mean over all ranks
        with timer.section("update"):
            if self.emulation is not None:
                self.emulation.update(self.sync.update_share(self.world.size))
                return StepOutcome.of_no_training()
            gradient_norm = self._unscale_and_clip()
            self.scaler.step(self.optimizer)  # skips a step whose fp16 gradients overflowed
            self.scaler.update()
        samples = sum(len(labels) for _, labels in micro_batches)
        return StepOutcome.of(loss_sum / max(1, samples), correct, gradient_norm)

    def _compute_alone(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Do ``_compute`` on a batch of one rank, without times; return the step's numbers."""
        with self.timer.untimed():
            return self._compute([(inputs, labels)], len(labels), None).numbers

    @contextmanager
    def _micro_batch(self, index: int, count: int, samples: int) -> Iterator[None]:
        """Enclose forward and backward of micro-batch ``index`` of ``count``.

        Only the last one communicates. BatchNorm learns nothing from an empty one.
        """
        shard = self.shards.of(index * len(self.shards) // count, samples)
        sync = self.sync.no_sync() if index < count - 1 else nullcontext()
        empty = nullcontext() if samples else batchnorm.without_samples(self.model)
        with sync, shard, empty:
            yield

    def _mean_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss; 0 if there are no samples, so that backward still gives zeros."""
        return self.criterion(outputs, labels) if len(labels) else outputs.sum() * 0

    def _unscale_and_clip(self) -> Tensor:
        """Divide gradients by the loss scale, clip them, and return the norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        updated = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in updated if p.grad is not None]
        if self._clip_norm is None:
            return get_total_norm(gradients)  # a rank's own part shows whether it is finite
        norm = self.sync.gradient_norm(gradients)
        clip_grads_with_norm_(updated, self._clip_norm, norm)
        return norm

    def _after_update(self) -> None:
        """Step the scheduler and the moving average of the weights."""
        if self.emulation is not None:
            return
        if self.scheduler is not None and not self._scheduler_by_epoch:
            self.scheduler.step()
        if self.ema is not None:
            self.sync.wait_for_weights()
            self.shards.blend()
            self.ema.update(unwrap(self.model))

    @property
    def evaluated_models(self) -> list[nn.Module]:
        """The model, then the moving average of its weights if there is one."""
        return [self.model] if self.ema is None else [self.model, self.ema.module]

    def agree_on_buffers(self) -> None:
        """Make all ranks hold the same weights and buffers. Collective.

        Call it before an evaluation and before a checkpoint; batchnorm.py says how BatchNorm's
        statistics are averaged.
        """
        self.sync.sync_replicas(self.model)
        statistics, size = self.shards.take(), self.world.size
        if size > 1 or len(statistics) > 1:
            batchnorm.agree_on_buffers(unwrap(self.model), statistics, size)
            self.shards.spread()
            if self.ema is not None:
                samples = sum(count for count, _ in statistics)
                averages = batchnorm.statistics(self.ema.module)
                batchnorm.agree_on_buffers(self.ema.module, [(samples, averages)], size)

    def sum_over_ranks(self, count: int) -> int:
        """Return the sum of a count over the ranks. Collective."""
        return int(sum_over_ranks(self.world, [count])[0])

    def _reduce_tensor(self, t: Tensor) -> Tensor:
        """Return the mean of a metric over the ranks, as a new tensor. Collective."""
        mean = t.detach().clone().to(self.device)
        if self.world.size > 1:
            dist.all_reduce(mean)
            mean /= self.world.size
        return mean
