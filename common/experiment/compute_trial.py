"""Time the compute of a run before it begins, with a few steps of a copy of its model."""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn

from common.cost_model.compute_model import StepCompute
from common.data.loaders import TrainLoader
from common.experiment.setup import Setup
from common.profiling.layer_timer import LayerTimer
from common.profiling.link_measurements import FLOAT_BYTES, LARGE, over_ranks
from common.training import prepare_model_for_training
from common.training_engine import TrainingEngine

_WARM_UP_STEPS, _STEPS, _TURNS = 1, 3, 2


class ComputeTrial:
    """Steps of a copy of the model, without exchange, on this rank's first batches.

    They have the run's batch, precision and optimiser, and all ranks compute at the same time. The
    copy is not compiled. Model, loader and random streams stay as they are, bit for bit. The
    methods are collective.
    """

    def __init__(self, setup: Setup, model: nn.Module, loader: TrainLoader) -> None:
        config, self._world = setup.config, setup.world
        own, criterion, optimizer = prepare_model_for_training(
            copy.deepcopy(model),
            setup.world.device,
            setup.learning_rate,
            config.momentum,
            config.weight_decay,
            False,
            opt=config.opt,
            nesterov=config.nesterov,
            label_smoothing=config.label_smoothing,
        )
        self._engine = TrainingEngine(own, setup.world.device, amp_dtype=setup.amp[0])
        self._engine.prepare(optimizer, criterion)
        self._batches = chain.from_iterable(repeat(loader))
        self._earlier = len(loader.micro_batches) - 1  # whose backward no message overlaps

    def measure(self, sizes: Mapping[str, int]) -> StepCompute:
        """Return the slowest rank's step, the median of a few.

        sizes : bytes of the gradients, by name, in the order of the parameters.
        """
        engine, names = self._engine, list(sizes)
        with LayerTimer(engine.model, engine.criterion, device=self._world.device) as timer:
            rows = [self._row(timer, names) for _ in range(_WARM_UP_STEPS + _STEPS)]
        slowest = torch.tensor(rows[_WARM_UP_STEPS:], dtype=torch.float64).median(dim=0).values
        slowest = slowest.to(self._world.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        before, update, *moments = slowest.tolist()
        ready = dict(zip(names, moments[: len(names)], strict=True))
        needed = dict(zip(names, moments[len(names) :], strict=True))
        return StepCompute.of_layers(before, ready, update, sizes, needed=needed)

    def overlap_cost(self, nbytes: int) -> float:
        """Return the share of a message's time by which it delays a concurrent step.

        ``nbytes`` pass during a step, or what can. On a GPU this is not measured, but 0.
        """
        if self._world.device.type == "cuda":
            return 0.0
        parts = [torch.zeros(LARGE // FLOAT_BYTES) for _ in range(math.ceil(nbytes / LARGE))]
        began = time.perf_counter()
        dist.all_reduce(parts[0])
        one = over_ranks(time.perf_counter() - began, dist.ReduceOp.MAX)
        costs = []
        for _ in range(_TURNS):
            alone = self._seconds()
            fitting = int(over_ranks(max(1.0, alone / one), dist.ReduceOp.MIN))
            works = [dist.all_reduce(part, async_op=True) for part in parts[:fitting]]
            both = self._seconds()
            for work in works:
                work.wait()
            costs.append((both - alone) / min(both, one * len(works)))
        mean = over_ranks(fmean(costs), dist.ReduceOp.SUM) / self._world.size
        return min(1.0, max(0.0, mean))

    def _seconds(self) -> float:
        """Return the seconds of forward and backward of one step."""
        seconds, _ = self._step()
        return seconds["forward"] + seconds["backward"]

    def _step(self) -> tuple[dict[str, float], float]:
        """Train one micro-batch; return the seconds of the step's sections, and of its data."""
        began = time.perf_counter()
        images, labels = next(self._batches)
        data = time.perf_counter() - began
        # fork_rng: dropout draws from the run's own stream.
        cuda = [self._world.device] if self._world.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            self._engine.train_step([(images, labels)], global_samples=max(1, len(labels)))
        return self._engine.timer.seconds(self._engine.timer.take()), data

    def _row(self, timer: LayerTimer, names: Sequence[str]) -> list[float]:
        """Return the seconds of a step before its last backward, and of its update.

        Then, for each parameter, those of the last backward until its gradient is ready; and those
        until forward needs it.
        """
        seconds, data = self._step()
        calls, forward, backward = timer.take()
        ready: dict[str, float] = {}
        needed: dict[str, float] = {}
        passed, begun = 0.0, data
        for call, own in zip(reversed(calls), reversed(backward), strict=True):
            passed += own
            ready |= dict.fromkeys(call.parameters, passed)
        for call, own in zip(calls, forward, strict=True):
            needed |= dict.fromkeys(call.parameters, begun)
            begun += own
        once = data + seconds["forward"]
        before = once + self._earlier * (once + seconds["backward"])
        # A parameter that no layer without children owns is ready last and needed first.
        return [
            *(before, seconds["update"]),
            *(ready.get(name, passed) for name in names),
            *(needed.get(name, data) for name in names),
        ]
