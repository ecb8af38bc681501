"""TrainingEngine: one training step and one loop for every strategy, device, part and recipe.

``TrainingEngine(...).train(...)`` does everything. To write your own loop, call ``prepare`` once,
``load_state`` to resume, then ``fit`` for several epochs or ``train_epoch`` for one, then
``close``. The methods stand in the order in which they call each other: ``train``, ``fit``,
``train_epoch``, ``train_step``.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from common.checkpoint import load_model_state, load_optimizer_state, load_plain_state
from common.data.sharding import STEP_STREAM, stream_seed
from common.distributed.collectives import (
    broadcast_checkpoint,
    check_same_on_all_ranks,
    gather_states,
    warn_of_equal_batches,
)
from common.distributed.process_group import (
    World,
    check_open,
    cleanup_distributed,
    current_world,
    own_device,
    setup_distributed,
)
from common.errors import UserError
from common.profiling.records import StepRecord
from common.profiling.step_timer import StepTimer
from common.sync import build_sync
from common.sync.base import GradientSync, check_strategy
from common.sync.none import NoSync
from common.training_engine import batchnorm
from common.training_engine.amp import autocast, build_scaler, choose_amp
from common.training_engine.batches import (
    MicroBatch,
    agreed_sizes,
    check_lengths,
    count_samples,
    is_pair,
    number_of_batches,
    set_epoch,
    skip_steps,
    tensors_in,
    to_device,
)
from common.training_engine.callbacks import Callback, EpochEnd, History, Validator
from common.training_engine.checkpoint_manager import CheckpointManager, SavePolicy
from common.training_engine.compile import compile_for, forget_compiled
from common.training_engine.evaluation_loop import model_to_device, unwrap
from common.training_engine.forward import (
    Criterion,
    ForwardPass,
    ForwardStep,
    GlobalCount,
    Numbers,
    rows_of,
)
from common.training_engine.metrics import (
    EpochResult,
    MetricsBuffer,
    StepOutcome,
    own_sums,
    sum_over_ranks,
)
from common.training_engine.own_metrics import Metrics, check_metrics

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from common.emulation.emulated_model import Emulation
    from common.profiling.comm_trace import Timeline
    from common.profiling.step_timer import RawSpans
    from common.training_engine.claim import ClaimCheck
    from common.training_engine.ema import WeightAverage


def _check_above_0(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise UserError(f"{name}: got {value}, give a number above 0")


class TrainingEngine:
    """Trains any ``nn.Module`` on any loader (batches.py), alone or in a process group.

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
    sync_batchnorm : in a group, BatchNorm layers that train normalise over all ranks: on GPUs with
        PyTorch's SyncBatchNorm, on CPUs, and with "ours", with common/models/sync_batchnorm.py.
        False: each rank normalises its own batch.
    accumulation_steps : micro-batches (the loader's batches) of one optimiser step; ranks
        communicate once for all of them.
    sync : a strategy or its name, see common/sync; used if ``distributed``.
    clip_norm : upper limit for the norm of all gradients taken together.
    compile_model : compile the model with ``torch.compile`` for the shape of the loader's first
        batch, which is loaded once more; other shapes and evaluation run uncompiled. The attribute
        ``compile_seconds`` is the time that it took, before the first step.
    experiment_name, output_dir : ``train`` writes to ``output_dir/experiment_name/``.
    world : the open group, if the caller knows it.

    Set ``timeline`` (comm_trace.py) to record the messages of some steps. Set ``emulation``
    (emulated_model.py) if the model sleeps instead of computing: weights then never change.
    """

    timeline: "Timeline | None" = None
    emulation: "Emulation | None" = None
    claim: "ClaimCheck | None" = None  # with several ranks: whether they get the mean
    metrics: MetricsBuffer | None = None  # of the epoch that trains
    compile_seconds = 0.0
    ema: "WeightAverage | None" = None

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
        sync_batchnorm: bool | Literal["ours"] = True,
        accumulation_steps: int = 1,
        sync: GradientSync | str = "ddp",
        clip_norm: float | None = None,
        compile_model: bool = False,
        experiment_name: str = "experiment",
        output_dir: str | Path = "reports",
        world: World | None = None,
    ) -> None:
        self.device = own_device(device, local_rank, distributed=distributed)
        self.sync: GradientSync = NoSync()
        if distributed:
            self.sync = build_sync(sync) if isinstance(sync, str) else sync
        self.world = World(device=self.device)
        if not isinstance(self.sync, NoSync):
            check_open(world_size, backend)
            self.world = world or current_world(self.device)
        _check_above_0("accumulation_steps", accumulation_steps)
        _check_above_0("clip_norm", clip_norm)
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
        self.world.activity.period = self.sync.plan.period
        model = model_to_device(model, self.device)
        if use_ema:
            from common.training_engine.ema import WeightAverage  # a run imports what it uses

            self.ema = WeightAverage(unwrap(model), ema_decay)
        if sync_batchnorm and self.world.size > 1:
            ours = sync_batchnorm == "ours" or self.device.type != "cuda"
            model = batchnorm.synchronise_batchnorm(model, ours=ours, waiting=self.sync.waiting)
        self.model = model
        self.accumulation_steps = accumulation_steps
        self._clip_norm = clip_norm
        self.output_folder = Path(output_dir) / experiment_name
        self.compiles = compile_model
        self.step = 0
        self.stop_requested = False  # on this rank
        self.stopping = False  # as all ranks have agreed
        self._first_batch_compared = False
        self.resumed_epoch = EpochResult()  # of the steps before a resume

    @staticmethod
    def setup_distributed(rank: int, world_size: int, backend: str | None = None) -> World:
        """Open the process group, unless it is open: see ``process_group.setup_distributed``."""
        return setup_distributed(rank, world_size, backend)

    @staticmethod
    def cleanup_distributed() -> None:
        """Close the process group, if one is open."""
        cleanup_distributed()

    def notice(self, text: str) -> None:
        """Warn on rank 0 that the engine deviates from the request; ignore an empty ``text``."""
        if text and self.world.is_rank0:
            warnings.warn(text, stacklevel=3)

    def prepare(
        self,
        optimizer: "Optimizer",
        criterion: Criterion | ForwardPass,
        scheduler: "LRScheduler | None" = None,
        *,
        scheduler_by_epoch: bool = False,
    ) -> None:
        """Check that all ranks train the same model, and give them rank 0's weights. Collective.

        The engine steps ``scheduler`` after every optimiser step; with ``scheduler_by_epoch`` the
        caller steps it after every epoch. Raises UserError if the ranks' parameters differ in name,
        shape or type, or if ``criterion`` is not a mean over the batch.
        """
        self.optimizer = optimizer
        self.forward = criterion if isinstance(criterion, ForwardPass) else ForwardPass(criterion)
        self.scheduler = scheduler
        self._scheduler_by_epoch = scheduler_by_epoch
        parameters = {}
        for name, parameter in unwrap(self.model).named_parameters():
            frozen = "" if parameter.requires_grad else " frozen"
            parameters[name] = f"{tuple(parameter.shape)} {parameter.dtype}{frozen}"
        check_same_on_all_ranks(self.world, parameters, what="the model's parameters")
        self.model = self.sync.prepare(self.model, optimizer)
        self.shards = batchnorm.ShardStatistics(unwrap(self.model), 1)
        if self.world.size > 1:  # with one rank nothing is exchanged after the last gradient
            self.timer.watch_gradients(self.model)
            if self.emulation is None:
                from common.training_engine.claim import ClaimCheck

                if self.claim is not None:
                    self.claim.close()
                self.claim = ClaimCheck(self.world, unwrap(self.model), self.sync)
                self.claim.watch()

    def load_state(self, entries: Mapping[str, Any]) -> None:
        """Resume from a checkpoint, except weights and optimiser, which are loaded before.

        Call ``prepare`` first. Raises UserError if they belong to another training.
        """
        name = "to resume from"
        if self.scheduler is not None and entries.get("scheduler_state_dict") is not None:
            load_plain_state(self.scheduler, entries["scheduler_state_dict"], name=name)
            # Again, since building the scheduler has changed the learning rates.
            load_optimizer_state(self.optimizer, entries, name=name)
        if entries.get("scaler_state_dict"):
            load_plain_state(self.scaler, entries["scaler_state_dict"], name=name)
        if self.ema is not None:
            averages = entries.get("ema_state_dict") or entries["model_state_dict"]
            load_model_state(self.ema.module, {"model_state_dict": averages}, name=name)
            self.ema.updates = entries.get("ema_updates", 0)
        self.step = entries.get("step", 0)
        if entries.get("step_in_epoch"):
            self.resumed_epoch = own_sums(self.world, entries.get("epoch_sums"))
        states = entries.get("sync_state_dicts") or []
        if self.world.rank < len(states):
            load_plain_state(self.sync, states[self.world.rank], name=name)

    def train(
        self,
        train_loader: Iterable[MicroBatch],
        val_loader: Iterable[MicroBatch] | None,
        optimizer: "Optimizer",
        criterion: Criterion,
        *,
        num_epochs: int,
        scheduler: "LRScheduler | None" = None,
        scheduler_by_epoch: bool | None = None,
        save_best: bool = True,
        save_last: bool = True,
        target_accuracy: float | None = None,
        patience: int = 2,
        seed: int | None = None,
        resume: str | Path | Mapping[str, Any] | None = None,
        forward_step: ForwardStep | None = None,
        metrics: Metrics | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, list[float]]:
        """Train up to epoch ``num_epochs``, validate each, and return every epoch's numbers.

        Rank 0 writes ``best.pt`` (the best epoch so far) and ``last.pt`` to
        ``output_dir/experiment_name/``; both include the moving average of the weights, if there
        is one. It also prints one line per epoch.

        Parameters
        ----------
        train_loader, val_loader : yield batches (batches.py) of this rank's share. In a group, give
            them a DistributedSampler; all ranks need the same number of training batches. If a
            loader has no length, the epoch ends when the first rank has no more. Without
            ``val_loader`` there is no ``best.pt``.
        criterion, forward_step : see ``ForwardPass`` (forward.py).
        scheduler : OneCycleLR and CyclicLR are stepped after every optimiser step, others after
            every epoch, unless ``scheduler_by_epoch`` says otherwise. ReduceLROnPlateau gets the
            validation loss.
        target_accuracy : stop once the validation accuracy (0 to 1) has reached it in ``patience``
            epochs in a row.
        seed : sets torch's generator before each micro-batch.
        resume : continue after the epoch of this checkpoint: the path of a ``last.pt`` or
            ``best.pt``, which only rank 0 needs to have, or the entries that ``load_checkpoint``
            returned on every rank. With ``seed``, the weights are those of an uninterrupted
            training, bit for bit on a CPU.
        metrics : your own, by name (own_metrics.py), over the validation set. The first decides
            which epoch is the best; without any it is the accuracy of class logits with one label
            each, or else the lowest loss. One that is named "accuracy" is the accuracy.
        callbacks : called after those of ``train``, as ``fit`` does; e.g. ``CheckpointManager``
            with ``SavePolicy(every_steps=100)``.

        Returns lists of equal length, one entry for each epoch trained here: ``epoch``,
        ``train_loss``, ``train_accuracy``, ``val_loss``, ``val_accuracy``, ``ema_val_loss``,
        ``ema_val_accuracy``, ``learning_rate``, ``samples_per_second``, ``seconds``, and
        ``val_NAME`` and ``ema_val_NAME`` of your metrics. NaN: unknown. Raises UserError on
        settings or a checkpoint that do not fit, GroupError if the loss is not finite.
        """
        if num_epochs < 1:
            raise UserError(f"num_epochs: got {num_epochs}, give at least 1")
        if target_accuracy is not None and val_loader is None:
            raise UserError("target_accuracy needs a val_loader: give one, or leave it out")
        check_metrics(metrics or {}, self.world)
        check_lengths(self.world, train_loader, epochs=f"1 to {num_epochs}")
        entries = self._load_weights(resume, optimizer) if resume else {}
        if scheduler_by_epoch is None:
            scheduler_by_epoch = not isinstance(scheduler, OneCycleLR | CyclicLR)
        forward = ForwardPass(criterion, forward_step)
        validator = Validator(
            val_loader,
            forward,
            target_accuracy=target_accuracy,
            patience=patience,
            metrics=metrics,
            progress=entries.get("progress"),
        )
        extra: dict[str, Any] = {"progress": validator.progress}
        history = History(scheduler if scheduler_by_epoch else None, extra)
        files = SavePolicy(every_epochs=int(save_last), best=save_best, single="last.pt")
        saver = CheckpointManager(self.output_folder, policy=files, extra=extra)
        try:
            self.prepare(optimizer, forward, scheduler, scheduler_by_epoch=scheduler_by_epoch)
            if entries:
                self.load_state(entries)
            self.fit(
                train_loader,
                entries.get("epoch", 0) + 1,
                num_epochs,
                callbacks=[validator, history, saver, *callbacks],
                start_step=entries.get("step_in_epoch", 0),
                seed=seed,
            )
        finally:
            self.close()
        return history.by_name

    def _load_weights(
        self, resume: str | Path | Mapping[str, Any], optimizer: "Optimizer"
    ) -> Mapping[str, Any]:
        """Load a checkpoint's weights and optimiser state, and return its entries. Collective."""
        entries = (
            resume if isinstance(resume, Mapping) else broadcast_checkpoint(self.world, resume)
        )
        load_model_state(unwrap(self.model), entries, name="to resume from")
        load_optimizer_state(optimizer, entries, name="to resume from")
        return entries

    def fit(
        self,
        loader: Iterable[MicroBatch],
        first_epoch: int,
        last_epoch: int,
        *,
        callbacks: Sequence[Callback] = (),
        start_step: int = 0,
        max_steps: int | None = None,
        **options: Any,
    ) -> None:
        """Train epochs ``first_epoch`` to ``last_epoch``, both included; call the callbacks' hooks.

        Stops early after ``max_steps``, if a callback sets a ``stop_reason``, or if the ranks have
        agreed to stop. Call ``prepare`` first.

        Parameters
        ----------
        start_step : number of steps of the first epoch that are already done.
        options : ``seed`` and ``log_every`` of ``train_epoch``.
        """

        def notify(hook: str, *arguments: Any) -> None:
            for callback in callbacks:
                getattr(callback, hook)(*arguments)

        compile_for(self, loader)  # before the callbacks' clocks start
        notify("on_train_begin", self, first_epoch)
        for epoch in range(first_epoch, last_epoch + 1):
            set_epoch(loader, epoch)
            result = self.train_epoch(
                loader,
                epoch=epoch,
                start_step=start_step,
                max_steps=max_steps,
                on_steps=partial(notify, "on_steps"),
                after_step=partial(notify, "on_step_end"),
                **options,
            )
            if not result.steps and not start_step:  # a resumed epoch may have none left
                break
            start_step = 0
            self.world.activity.enter("end of the epoch")
            self.agree_on_buffers()
            is_last = epoch == last_epoch or self.step == max_steps
            end = EpochEnd(epoch, result, is_last=is_last)
            notify("on_epoch_end", end)
            if end.stop_reason or self.stopping:
                break
        notify("on_train_end")

    def train_epoch(
        self,
        loader: Iterable[MicroBatch],
        *,
        epoch: int,
        seed: int | None = None,
        start_step: int = 0,
        max_steps: int | None = None,
        log_every: int = 1000,
        on_steps: Callable[[list[StepRecord]], object] = lambda records: None,
        after_step: Callable[[int], object] = lambda step_in_epoch: None,
    ) -> EpochResult:
        """Train on every batch of ``loader`` once, or until ``step`` reaches ``max_steps``.

        Parameters
        ----------
        loader : batches.py says what it yields, and which attributes it may have.
        seed : sets torch's generator before each micro-batch, with epoch, step and micro-batch.
        start_step : number of steps of this epoch that are done already; ``loader.start_at`` skips
            them.
        on_steps : called on every rank every ``log_every`` steps, or every two seconds, with their
            records.
        after_step : called on every rank after every step with the number of steps done in this
            epoch.

        Raises GroupError on every rank if the loss or the gradients are not finite on any rank.
        """
        compile_for(self, loader)
        metrics = self._begin_metrics(epoch, log_every, on_steps)
        if start_step:
            skip_steps(loader, start_step, epoch=epoch)
        if self.timeline is not None:
            self.sync.recording = self.timeline.for_thread
        shards = getattr(loader, "shards_here", 1)
        if shards != len(self.shards):
            self.shards = batchnorm.ShardStatistics(unwrap(self.model), shards)
        self.set_training_mode()
        self.timer.begin()
        sizes = agreed_sizes(self.world, loader, self.accumulation_steps)
        steps_left = None if max_steps is None else max(0, max_steps - self.step)
        steps = itertools.islice(itertools.count(start_step), steps_left)
        counts = self._global_counts(loader, sizes)
        for index, window, seeds in self._windows(loader, steps, epoch=epoch, seed=seed):
            count = counts(index, window)
            if count is None:
                break
            rate = self.optimizer.param_groups[0]["lr"]
            numbers, times = self._recorded_step(window, count, seeds)
            if self.claim is not None and self.claim.watching:
                self.claim.gather(self.step)
            metrics.add(StepOutcome(self.step, numbers, rate, times))
            if metrics.due:
                self.flush_metrics(wait=not self.sync.weights_under_way)
            after_step(index + 1)
            if self.stopping:
                metrics.result.complete = sizes is not None and index + 1 == len(sizes)
                break
        self.flush_metrics()
        return metrics.result

    def _global_counts(
        self, loader: Iterable[MicroBatch], sizes: Sequence[int] | None
    ) -> Callable[[int, Sequence[MicroBatch]], GlobalCount | None]:
        """Return the function that starts the count of a step over all ranks. Collective.

        Without ``sizes``, each step expects the samples of the epoch's first one, and the ranks
        agree on its own while they compute. A strategy that is not exact may keep a part of the
        gradient for the next step, so it must know them before. So must a loader without a length:
        None is returned once a rank has no more batches.
        """
        endless = number_of_batches(loader) is None
        expected: int | None = None

        def count(index: int, window: Sequence[MicroBatch]) -> GlobalCount | None:
            nonlocal expected
            if sizes is not None:
                return GlobalCount(self.world, sizes[index])
            samples = sum(map(count_samples, window))
            if expected is not None and self.sync.exact and not endless:
                known = GlobalCount(self.world, expected)
                if not self.forward.may_count_other_than_samples(window[0]):
                    known.start(samples)
                return known
            with self.timer.section("sync"):
                expected = self.sum_over_ranks(samples)
                ranks = self.sum_over_ranks(bool(window)) if endless else self.world.size
            if ranks == self.world.size:
                return GlobalCount(self.world, expected)
            if ranks:
                self.notice(
                    f"the epoch ended after {index} steps, when a rank had no more batches: "
                    f"{ranks} of {self.world.size} ranks had more, which nobody trained on"
                )
            return None

        return count

    def _begin_metrics(
        self, epoch: int, log_every: int, on_steps: Callable[[list[StepRecord]], object]
    ) -> MetricsBuffer:
        """Return the buffer of an epoch; it begins with what a resumed epoch has already."""
        self.metrics = MetricsBuffer(
            self.world,
            self.timer,
            epoch=epoch,
            log_every=log_every,
            overflow_is_normal=self.scaler.is_enabled(),
            equal_gradients=self.sync.equal_gradients,
            on_steps=on_steps,
        )
        self.metrics.emulated = self.emulation is not None
        self.metrics.result = self.resumed_epoch
        self.resumed_epoch = EpochResult()
        if self.sync.weights_under_way:
            self.metrics.exchanges = 2  # before, "sync" waits for messages that began earlier
        return self.metrics

    def _windows(
        self, loader: Iterable[MicroBatch], steps: Iterable[int], *, epoch: int, seed: int | None
    ) -> Iterator[tuple[int, list[MicroBatch], list[int] | None]]:
        """Yield for each step its index, this rank's micro-batches, on the device, and seeds."""
        first = self.world.rank * self.accumulation_steps
        own = range(first, first + self.accumulation_steps)
        numbers = getattr(loader, "micro_batches", own)  # within each global batch
        sized = number_of_batches(loader) is not None
        batches = iter(loader)
        for index in steps:
            seeds = None
            if seed is not None:
                seeds = [stream_seed(seed, STEP_STREAM, epoch, index, number) for number in numbers]
                torch.manual_seed(seeds[0])  # for loaders that draw random numbers
            with self.timer.section("data"):
                loaded = itertools.islice(batches, len(numbers))
                window = []
                for batch in loaded:
                    self.forward.refuse_ignored_labels(batch)
                    window.append(to_device(batch, self.device))
            if not window and sized:
                return
            if not self._first_batch_compared:
                self._first_batch_compared = True
                inputs, labels = window[0] if window and is_pair(window[0]) else (window, None)
                warn_of_equal_batches(self.world, tensors_in(inputs), labels)
            yield index, window, seeds

    def _recorded_step(
        self, window: list[MicroBatch], count: GlobalCount, seeds: list[int] | None
    ) -> "tuple[list[Any], RawSpans]":
        """Do a step; return its numbers and times. The timeline, if any, records its messages."""
        timeline = self.timeline
        with nullcontext() if timeline is None else timeline.around(self.step + 1):
            numbers = self.train_step(window, global_samples=count, seeds=seeds)
        times = self.timer.take()
        if timeline is not None:
            timeline.took(self.step, self.timer, times)
        return numbers, times

    def set_training_mode(self) -> None:
        """Put the model in training mode, but for frozen BatchNorm layers."""
        self.model.train()
        batchnorm.hold_frozen_batchnorm(self.model)

    def flush_metrics(self, *, wait: bool = True) -> None:
        """Record the steps since the last flush, and agree whether to stop. Collective.

        Call it before a checkpoint within an epoch, which then holds no step that is not recorded.
        ``wait`` : see ``MetricsBuffer.flush``. Raises GroupError on every rank if the loss or the
        gradients are not finite on any rank.
        """
        assert self.metrics is not None  # train_epoch sets it
        self.stopping = self.metrics.flush(stop=self.stop_requested, wait=wait) or self.stopping

    def request_stop(self) -> None:
        """Ask all ranks to stop at the next step on which they agree; safe in a signal handler."""
        self.stop_requested = True

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        global_samples: int | GlobalCount,
        seeds: Sequence[int] | None = None,
    ) -> list[Any]:
        """Do one optimiser step on this rank's micro-batches of a global batch. Collective.

        The mean loss of a micro-batch is weighted by its samples x ranks / ``global_samples``. So
        the plain mean of the ranks' gradients is the gradient of the mean loss over the global
        batch, even if the ranks' shares differ in size. If the criterion counts anything else, e.g.
        tokens, that takes the place of the samples; the ranks' sum of it scales the gradients after
        the exchange. Gradients are exchanged once, after the last micro-batch. ``seeds`` : for
        torch's generator, one for each micro-batch. Returns the ``numbers`` of a ``StepOutcome``.
        """
        self.world.activity.step = self.step + 1
        if isinstance(global_samples, int):
            global_samples = GlobalCount(self.world, global_samples)
        outcome = self._compute(micro_batches, global_samples, seeds)
        with self.timer.section("sync"):
            self.sync.after_step(self.model)  # some strategies exchange weights
        if self.ema is not None and self.emulation is None:
            with self.timer.section("update"):
                self.sync.wait_for_weights()
                self.shards.blend()
                self.ema.update(unwrap(self.model))
        self.step += 1
        return outcome

    def _compute(
        self, micro_batches: Sequence[MicroBatch], count: GlobalCount, seeds: Sequence[int] | None
    ) -> list[Any]:
        """Do forward, backward, exchange and update, without a wait for the GPU."""
        timer = self.timer
        last = len(micro_batches) - 1
        counts = self.forward.may_count_other_than_samples(micro_batches[0])
        numbers: list[Any] = []
        self.optimizer.zero_grad(set_to_none=True)
        for index, batch in enumerate(micro_batches):
            if seeds is not None:
                torch.manual_seed(seeds[index])  # a resumed run draws the same dropout masks
            samples = count_samples(batch)
            shard = self.shards.of(index * len(self.shards) // len(micro_batches), samples)
            sync = self.sync.no_sync() if index < last else nullcontext()
            empty = nullcontext() if samples else batchnorm.without_samples(self.model)
            with sync, shard, empty:
                with timer.section("forward"), autocast(self.device, self.amp_dtype):
                    result = self.forward(self.model, batch)
                numbers += result.numbers()
                if counts and index == last:
                    count.start(sum(numbers[1 :: len(Numbers._fields)]))
                with timer.section("backward"):
                    loss = count.weighted(result)
                    self.scaler.scale(loss).backward()  # adds to p.grad
        with timer.section("sync"):
            self.sync.synchronize(self.model)  # p.grad becomes the mean over all ranks
            correction = count.correction()
        if self.claim is not None and self.claim.watching:
            self.claim.take_synchronised()
        with timer.section("update"):
            return self._update(numbers, correction)

    def _update(self, numbers: list[Any], correction: Tensor | None) -> list[Any]:
        """Update the weights; return the step's ``numbers``, with the gradients' norm."""
        if self.emulation is not None:
            self.emulation.update(self.sync.plan.update_share(self.world.size))
            unknown = {"loss": math.nan, "correct": math.nan}
            emulated = [row._replace(**unknown) for row in rows_of(numbers)]
            return [*itertools.chain.from_iterable(emulated), 0.0]
        gradient_norm = self._unscale_and_clip(correction)
        self.scaler.step(self.optimizer)  # skips a step whose fp16 gradients overflowed
        self.scaler.update()
        if self.scheduler is not None and not self._scheduler_by_epoch:
            self.scheduler.step()
        return [*numbers, gradient_norm]

    def _unscale_and_clip(self, correction: Tensor | None) -> Tensor:
        """Unscale, correct and clip the gradients, and return their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        updated: list[nn.Parameter] = []
        for group in self.optimizer.param_groups:
            updated += group["params"]
        gradients = [p.grad for p in updated if p.grad is not None]
        if correction is not None and gradients:
            torch._foreach_mul_(gradients, correction)
        if self._clip_norm is None:  # a rank's own part shows whether it is finite
            norms = torch._foreach_norm(gradients) if gradients else [torch.zeros(())]
            return torch.linalg.vector_norm(torch.stack(norms))
        norm = self.sync.gradient_norm(gradients)
        clip_grads_with_norm_(updated, self._clip_norm, norm)
        return norm

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
        ranks = self.world.size
        shards = self.shards.take()
        if ranks == 1 and len(shards) == 1:
            return
        batchnorm.agree_on_buffers(unwrap(self.model), shards, ranks)
        self.shards.spread()
        if self.ema is not None:
            average = self.ema.module
            samples = sum(samples for samples, _statistics in shards)
            batchnorm.agree_on_buffers(average, [(samples, batchnorm.read(average))], ranks)

    def state(self, *, epoch: int, loss: float, step_in_epoch: int = 0) -> dict[str, Any]:
        """Return a checkpoint's entries. Collective. Call ``agree_on_buffers`` first.

        Parameters
        ----------
        epoch : the last completed epoch.
        loss : that epoch's mean training loss.
        step_in_epoch : number of steps completed in the next epoch; their sums are saved, too.
        """
        entries = {
            "epoch": epoch,
            "step": self.step,
            "step_in_epoch": step_in_epoch,
            "loss": loss,
            "model_state_dict": unwrap(self.model).state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": self.scheduler.state_dict() if self.scheduler else None,
            "scaler_state_dict": self.scaler.state_dict(),
            "sync_state_dicts": gather_states(self.world, self.sync.state_dict()),
        }
        if step_in_epoch and self.metrics is not None:
            entries["epoch_sums"] = gather_states(self.world, asdict(self.metrics.result))
        if self.ema is not None:
            entries["ema_state_dict"] = self.ema.module.state_dict()
            entries["ema_updates"] = self.ema.updates
        return entries

    def sum_over_ranks(self, count: int) -> int:
        """Return the sum of a count over the ranks. Collective."""
        return int(sum_over_ranks(self.world, [count])[0])

    def _reduce_tensor(self, tensor: Tensor) -> Tensor:
        """Return the mean of a metric of your own over the ranks. Collective.

        ``tensor`` : of the same shape on every rank; it is not changed. Returns a new tensor of
        that shape on the same device; a mean of integers is float32.
        """
        mean = tensor.detach().to(self.device).clone(memory_format=torch.contiguous_format)
        if not mean.is_floating_point():
            mean = mean.float()
        if self.world.size > 1:
            dist.all_reduce(mean)
            mean /= self.world.size
        return mean.to(tensor.device)

    def close(self) -> None:
        """Remove the hooks and the compiled code from the model."""
        forget_compiled(self)
        if self.claim is not None:
            self.claim.close()
        self.timer.close()
        self.sync.close()
