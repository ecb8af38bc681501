"""Run a student's whole program on ranks, and compare its training with one process.

``check_program`` starts the file as torchrun would, with a watch on its optimiser and its
collectives, and raises ``Mistake`` with the first reason for which the ranks do not train as one
process on the ranks' batches together.
"""

import contextlib
import io
import math
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DistributedSampler

from lab.learn.causes import Numbers, cause, explain_average
from lab.learn.student_file import Mistake, Namespace, StudentFile

STEPS = 4  # whose gradients and weights are compared
_TOLERANCE = 1e-5  # float32, after a few steps
_LIMIT_SECONDS = 90.0


@dataclass
class Step:
    """What a rank did in one optimiser step; vectors over all parameters, in float64.

    Parameters
    ----------
    own, got : its gradient after backward, and what the optimiser took.
    before, after : its weights.
    """

    own: Numbers
    got: Numbers
    before: Numbers
    after: Numbers


@dataclass
class Training:
    """What a rank's program did.

    Parameters
    ----------
    epochs : the samples of each epoch, in their order.
    events : "backward", "exchange" (a collective or a message) and "step", in order.
    steps : the first ``STEPS``.
    """

    epochs: list[list[int]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def check_program(student: StudentFile, size: int, *, training: StudentFile) -> None:
    """Run the program on ``size`` ranks. Raises Mistake unless it trains as one process would.

    training : the file with model and loader, which may be the program itself.
    """
    trainings = student.on_ranks(size, _run, student.path, limit_seconds=_LIMIT_SECONDS)
    problem = _problem(trainings)
    if problem is None:
        [problem] = training.on_ranks(1, _compare_with_one_process, trainings)
    if problem is not None:
        raise Mistake(f"on {size} ranks the program is wrong. {problem}")


# --- what a rank records ---


def _run(_names: Namespace, path: Any) -> Training:
    """Run the file as a program in the open group, and return what it did."""
    watch = _Watch()
    with watch.watching(), patch.object(sys, "argv", [str(path)]):
        runpy.run_path(str(path), run_name="__main__")
    return watch.training


class _Watch(TorchDispatchMode):
    """Notes backward passes, exchanges and optimiser steps of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.training = Training()
        self._parameters: list[Tensor] = []
        self._own: Numbers | None = None
        self._before: Numbers | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs within; the program's group is the one that is open."""
        samples_of = DistributedSampler.__iter__
        backward = Tensor.backward
        build = Optimizer.__init__

        def noted_samples(sampler: DistributedSampler) -> Iterator[int]:
            self.training.epochs.append(list(samples_of(sampler)))
            return iter(self.training.epochs[-1])

        def noted_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            backward(loss, *args, **kwargs)
            self.training.events.append("backward")
            self._own = self._gradients()

        def noted_build(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            build(optimizer, *args, **kwargs)
            for group in optimizer.param_groups:
                self._parameters += group["params"]

        hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        try:
            with (
                patch.object(dist, "init_process_group", lambda *_, **__: None),
                patch.object(dist, "destroy_process_group", lambda *_, **__: None),
                patch.object(DistributedSampler, "__iter__", noted_samples),
                patch.object(Tensor, "backward", noted_backward),
                patch.object(Optimizer, "__init__", noted_build),
                contextlib.redirect_stdout(io.StringIO()),
                self,
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note an operation of torch.distributed, and do it."""
        if func.namespace == "c10d":
            self.training.events.append("exchange")
        return func(*args, **(kwargs or {}))

    def _gradients(self) -> Numbers:
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        return _flat(gradients)

    def _before_step(self, *_: Any) -> None:
        self._before = _flat(self._parameters)

    def _after_step(self, *_: Any) -> None:
        self.training.events.append("step")
        if len(self.training.steps) < STEPS and self._own is not None and self._before is not None:
            after = _flat(self._parameters)
            self.training.steps.append(Step(self._own, self._gradients(), self._before, after))


def _flat(tensors: Sequence[Tensor]) -> Numbers:
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    return np.asarray(flat.numpy())


# --- what is wrong ---


def _problem(ranks: Sequence[Training]) -> str | None:
    """Return the first thing that is wrong; None if nothing is."""
    if not all(rank.steps for rank in ranks):
        return "No step of an optimiser follows a backward()"
    starts = [rank.steps[0].before for rank in ranks]
    if any(not np.array_equal(start, starts[0]) for start in starts):
        return cause("different-start", "build_model must draw the same weights on all ranks")
    return _samples_problem(ranks) or _exchange_problem(ranks) or _weights_problem(ranks)


def _samples_problem(ranks: Sequence[Training]) -> str | None:
    """Return what is wrong with the ranks' samples."""
    first = [set(epoch) for rank in ranks for epoch in rank.epochs[:1]]
    if len(first) < len(ranks):
        return cause("same-samples", "no DistributedSampler gives each rank a share of its own")
    drawn = sum(map(len, first))
    different = len(set.union(*first))
    if different < drawn - len(ranks):
        return cause(
            "same-samples", f"in an epoch the ranks draw {drawn} samples, {different} different"
        )
    epochs = ranks[0].epochs
    if len(epochs) > 1 and epochs[0] == epochs[1]:
        return cause("same-order", "tell the sampler each epoch: set_epoch(epoch)")
    return None


def _exchange_problem(ranks: Sequence[Training]) -> str | None:
    """Return what is wrong with the gradients that the optimisers take."""
    if all("exchange" not in rank.events for rank in ranks):
        return cause(
            "group-unused",
            "no step sends a message. Does the training call average(model) after backward()? "
            "Before it, every gradient is None",
        )
    steps = min(len(rank.steps) for rank in ranks)
    for number in range(steps):
        own = np.stack([rank.steps[number].own for rank in ranks])
        got = [rank.steps[number].got for rank in ranks]
        problem = explain_average(got, own)
        if problem is not None:
            return _when(ranks[0].events) or f"In step {number + 1}: {problem}"
    return None


def _when(events: Sequence[str]) -> str | None:
    """Return that the exchange comes at the wrong moment of a step; None if it does not."""
    step = events.index("step")
    backward = events.index("backward")
    first = events.index("exchange")
    if backward < first < step:
        return None
    if first > step:
        return cause(
            "own-gradient",
            "the average comes after optimizer.step(), when the weights have already moved by each "
            "rank's own gradient, so the ranks' weights differ. Average before the step",
        )
    return cause(
        "stale-gradient",
        "the average comes before backward(), which then computes the gradient anew. Average after "
        "backward() and before optimizer.step()",
    )


def _weights_problem(ranks: Sequence[Training]) -> str | None:
    """Return that the ranks' weights are not the same after a step."""
    for number, steps in enumerate(zip(*(rank.steps for rank in ranks), strict=False), 1):
        for rank, step in enumerate(steps):
            if not np.array_equal(step.after, steps[0].after):
                return cause(
                    "weights-diverge", f"after step {number} those of rank {rank} are not rank 0's"
                )
    return None


def _compare_with_one_process(student: Namespace, ranks: Sequence[Training]) -> str | None:
    """Train in this process on the ranks' batches together; return where the weights differ."""
    images, labels = student.call("build_loader").dataset.tensors
    local_batch = student["GLOBAL_BATCH"] // len(ranks)
    wanted = sum(math.ceil(len(epoch) / local_batch) for epoch in ranks[0].epochs)
    taken = ranks[0].events.count("step")
    if taken != wanted:
        return (
            f"{len(ranks[0].epochs)} epochs take {taken} steps, but {wanted} with a global batch "
            f"of {student['GLOBAL_BATCH']}: a rank's batch is its share of that"
        )
    model = student.call("build_model")
    optimizer = torch.optim.SGD(model.parameters(), lr=student["LEARNING_RATE"])
    steps = min(len(rank.steps) for rank in ranks)
    for number in range(steps):
        own = slice(number * local_batch, (number + 1) * local_batch)
        batch = [index for rank in ranks for index in rank.epochs[0][own]]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        one_process = _flat(list(model.parameters()))
        found = ranks[0].steps[number].after
        error = float(np.linalg.norm(found - one_process) / np.linalg.norm(one_process))
        if not error <= _TOLERANCE:
            return (
                f"After step {number + 1} the weights differ by {error:.1e} from those of one "
                "process that trains on the ranks' batches together"
            )
    return None
