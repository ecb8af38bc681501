"""Training steps of a real model on generated images, without other ranks, for calibrations."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import psutil
import torch
from torch import Tensor

from common.data.dataset import Dataset, ImageSet
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.models import build_model
from common.sync.message_cost import GradientSize
from common.training import prepare_model_for_training
from common.training_engine import StepRecord, TrainingEngine
from common.training_engine.batchnorm import synchronised_layers
from lab.calibrate.measurements import CpuSeconds, StepTimes

IMAGE = (32, 32)  # height and width
WARM_UP_STEPS = 1
_CLASSES = 10
_BATCHES = 8  # of the largest size: more than the steps that are timed in a row
_SEED = 0


def cpu_seconds() -> CpuSeconds:
    """Return the clock, and the CPU seconds of this process and of all processes, until now."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    all_kinds = sum(times[:8])  # what follows, guests' time, is a part of the first two
    return CpuSeconds(time.monotonic(), time.process_time(), all_kinds - idle)


def spent(began: CpuSeconds, ended: CpuSeconds) -> CpuSeconds:
    """Return how much ``cpu_seconds`` grew from ``began`` to ``ended``."""
    return CpuSeconds(ended.clock - began.clock, ended.own - began.own, ended.all - began.all)


class Trainer:
    """The project's own training step with loader, loss and optimiser, on images of uniform noise.

    Parameters
    ----------
    model : by name, see common/models.
    most_samples : the largest number of samples of a step.
    device : "cpu" or "cuda".

    The attributes ``model`` and ``criterion`` are public for hooks.
    """

    def __init__(self, model: str, *, most_samples: int, device: str = "cpu") -> None:
        torch.manual_seed(_SEED)
        images = torch.randint(0, 256, (_BATCHES * most_samples, *IMAGE, 3), dtype=torch.uint8)
        noise = ImageSet(images, torch.randint(0, _CLASSES, (len(images),)))
        self._dataset = Dataset(
            "noise", noise, noise, tuple(map(str, range(_CLASSES))), (0.5,) * 3, (0.29,) * 3
        )
        network, self.criterion, optimizer = prepare_model_for_training(
            build_model(model, _CLASSES), device, 1e-4, 0.9, 5e-4, False, nesterov=True
        )
        self._device = device
        self._engine = TrainingEngine(network, device)
        self._engine.prepare(optimizer, self.criterion)
        self.model = self._engine.model
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self.gradients = GradientSize.of(self._trained)
        self.batchnorm = synchronised_layers(self.model)

    def time_steps(
        self, samples: Sequence[int], *, steps: int, after_step: Callable[[int], None]
    ) -> list[StepTimes]:
        """Time ``steps`` steps for each number of samples, after ``WARM_UP_STEPS`` others.

        ``after_step`` is called after every step, outside the timed part.
        """
        taken = []
        for count in samples:
            trained = self._train(count, WARM_UP_STEPS + steps, after_step)
            for record, cpu in trained[WARM_UP_STEPS:]:
                step = StepTimes(
                    samples=count,
                    before=record.data_seconds + record.forward_seconds,
                    backward=record.backward_seconds,
                    update=record.sync_seconds + record.update_seconds,
                    cpu=cpu,
                )
                taken.append(step)
        return taken

    def _train(
        self, samples: int, steps: int, after_step: Callable[[int], None]
    ) -> list[tuple[StepRecord, CpuSeconds]]:
        """Train ``steps`` steps; return each one's record and CPU time, ``after_step`` included."""
        records: list[StepRecord] = []
        ends = [cpu_seconds()]  # the start of the first step, then the end of each

        def end_step(step: int) -> None:
            after_step(step)
            ends.append(cpu_seconds())

        last_step = self._engine.step + steps  # the engine goes on counting from call to call
        self._engine.train_epoch(
            self._loader(samples),
            epoch=1,
            seed=_SEED,
            max_steps=last_step,
            on_steps=records.extend,
            after_step=end_step,
        )
        return [
            (record, spent(began, ended))
            for record, (began, ended) in zip(records, pairwise(ends), strict=True)
        ]

    def time_gradients(self, samples: int, *, repeats: int = 3) -> list[float]:
        """Return the share of backward after which each parameter's gradient is ready (median)."""
        starts: list[float] = []
        ready = [0.0] * len(self._trained)

        def record(index: int, _gradient: Tensor) -> None:
            ready[index] = time.perf_counter()

        hooks = [p.register_hook(partial(record, index)) for index, p in enumerate(self._trained)]
        shares: list[list[float]] = []
        for _ in range(WARM_UP_STEPS + repeats):
            self.backward_seconds(samples, before=lambda: starts.append(time.perf_counter()))
            began = starts[-1]
            whole = max(ready) - began
            shares.append([(moment - began) / whole for moment in ready])
        for hook in hooks:
            hook.remove()
        return [statistics.median(column) for column in zip(*shares[WARM_UP_STEPS:], strict=True)]

    def backward_seconds(
        self, samples: int, *, before: Callable[[], object] = lambda: None
    ) -> float:
        """Return the seconds of one backward, right after a call of ``before``."""
        images, labels = next(iter(self._loader(samples)))
        loss = self.criterion(self.model(images), labels)
        before()
        began = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - began
        self.model.zero_grad(set_to_none=True)
        return seconds

    def _loader(self, samples: int) -> TrainLoader:
        """Return a loader of all images in batches of ``samples``."""
        return TrainLoader(
            self._dataset,
            GlobalBatchSampler(len(self._dataset.train), batch_size=samples),
            device=self._device,
        )
