"""Training steps of a real model on generated images, for calibrations: without a dataset, and without other ranks."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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

_CLASSES = 10
_WARM_UP_STEPS = 1
_BATCHES = 8  # of the largest size, in the generated set
_SEED = 0


def cpu_seconds() -> dict[str, float]:
    """Seconds on the clock, those that this process has computed, and those that all processes of the machine have."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    return {"clock": time.monotonic(), "own": time.process_time(), "all": sum(times[:8]) - idle}


def since(began: dict[str, float]) -> dict[str, float]:
    """How much more it is than it was then."""
    return {name: seconds - began[name] for name, seconds in cpu_seconds().items()}


class Trainer:
    """The project's own training step, with its loader, loss and optimiser, on images of uniform noise.

    Parameters
    ----------
    model : by name, see common/models.
    image : height and width.
    most_samples : of a step, of all that will be asked for.
    device : "cpu" or "cuda".

    ``model`` and ``criterion`` are those that train, for hooks.
    """

    def __init__(
        self, model: str, image: tuple[int, int], *, most_samples: int, device: str = "cpu"
    ) -> None:
        torch.manual_seed(_SEED)
        images = torch.randint(0, 256, (_BATCHES * most_samples, *image, 3), dtype=torch.uint8)
        labels = torch.randint(0, _CLASSES, (len(images),))
        noise = ImageSet(images, labels)
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
        self._trained = [p for p in self._engine.model.parameters() if p.requires_grad]
        self.gradients = GradientSize.of(self._trained)

    @staticmethod
    def number_of_steps(sizes: int, *, steps: int) -> int:
        """How many steps ``time_steps`` makes."""
        return sizes * (_WARM_UP_STEPS + steps)

    def time_steps(
        self, samples: Sequence[int], *, steps: int, after_step: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """Return for each step "samples", "before" (data and forward), "backward" and "update", in seconds, and "cpu".

        Each number of samples has ``steps`` of them. ``after_step`` is called after each step, outside its time.
        """
        found = []
        for count in samples:
            records: list[StepRecord] = []
            spent: list[dict[str, float]] = []
            began = cpu_seconds()

            def stepped(
                step: int, spent: list[dict[str, float]] = spent, began: dict[str, float] = began
            ) -> None:
                after_step(step)
                spent.append(since(began))
                began |= cpu_seconds()

            self._train(count, _WARM_UP_STEPS + steps, records, stepped)
            found += [
                {
                    "samples": count,
                    "before": record.seconds["data"] + record.seconds["forward"],
                    "cpu": cpu,
                    "backward": record.seconds["backward"],
                    "update": record.seconds["sync"] + record.seconds["update"],
                }
                for record, cpu in list(zip(records, spent, strict=True))[_WARM_UP_STEPS:]
                if record.samples == count
            ]
        return found

    def _train(
        self, samples: int, steps: int, records: list[StepRecord], after_step: Callable[[int], None]
    ) -> None:
        last = self._engine.step + steps
        while self._engine.step < last:  # an epoch may be shorter
            loader = TrainLoader(
                self._dataset,
                GlobalBatchSampler(len(self._dataset.train), batch_size=samples),
                device=self._device,
            )
            self._engine.train_epoch(
                loader,
                epoch=1,
                seed=_SEED,
                max_steps=last,
                on_steps=records.extend,
                after_step=after_step,
            )

    def time_gradients(self, samples: int, *, repeats: int = 3) -> list[float]:
        """Return for each parameter, in their order, the share of backward after which its gradient is ready (median)."""
        moments: dict[int, float] = {}
        starts: list[float] = []

        def record_start() -> None:
            starts.append(time.perf_counter())

        def record(index: int, _gradient: Tensor) -> None:
            moments[index] = time.perf_counter()

        hooks = [p.register_hook(partial(record, index)) for index, p in enumerate(self._trained)]
        shares: list[list[float]] = []
        try:
            for _ in range(_WARM_UP_STEPS + repeats):
                self.backward_seconds(samples, before=record_start)
                whole = max(moments.values()) - starts[-1]
                ready = [moments[index] - starts[-1] for index in range(len(self._trained))]
                shares.append([seconds / whole for seconds in ready])
        finally:
            for hook in hooks:
                hook.remove()
        return [statistics.median(column) for column in zip(*shares[_WARM_UP_STEPS:], strict=True)]

    def backward_seconds(
        self, samples: int, *, before: Callable[[], object] = lambda: None
    ) -> float:
        """Return the seconds of one backward; ``before`` is called when it begins, outside of them."""
        images, labels = self._batch(samples)
        loss = self.criterion(self._engine.model(images), labels)
        before()
        began = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - began
        self._engine.model.zero_grad(set_to_none=True)
        return seconds

    def _batch(self, samples: int) -> tuple[Tensor, Tensor]:
        loader = TrainLoader(
            self._dataset,
            GlobalBatchSampler(len(self._dataset.train), batch_size=samples),
            device=self._device,
        )
        return next(iter(loader))
