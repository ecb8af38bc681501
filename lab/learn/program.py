"""Run a student's whole program on a rank, as torchrun would, and record what its steps do.

``run_program`` watches the program from outside: which batch a step computes with, what backward
adds to the gradients, what the optimiser gets, what is sent in between, and the weights.
"""

import contextlib
import copy
import io
import os
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from common.profiling.comm_trace import MessageRecorder
from lab.learn.student_file import Namespace

KEPT_STEPS = 3  # whose tensors are kept


class _Enough(BaseException):
    """Ends a program that has made its steps."""


@dataclass
class ProgramStep:
    """One step of a rank; all tensors are flat and hold all parameters, in their order.

    images, labels : the batch.
    start : the weights before it.
    stale : what the gradients held before backward, zeros included.
    own : what backward added to that.
    used : what the optimiser got; None if it was not called.
    sent_early, sent, sent_late : messages before this step's backward, until the update, and after
        it until the next step.
    """

    images: Tensor
    labels: Tensor
    start: Tensor
    stale: Tensor
    own: Tensor
    used: Tensor | None = None
    sent_early: int = 0
    sent: int = 0
    sent_late: int = 0


@dataclass
class ProgramRecording:
    """What a rank's program did.

    joined : whether it called init_process_group.
    model : a copy of what it trained, from before the first step; None if it computed nothing.
    lengths : the number of entries of each parameter, by name.
    optimizer : the class of its optimiser, and that one's settings.
    steps : the first ones.
    batches : of every step: a number that tells its images from others.
    updates : how many times the optimiser was called.
    foreign : whether it was given other parameters than the model's.
    end : the weights at the end.
    kinds : of all that it sent, e.g. all_reduce.
    names : what the program defines.
    printed : what it prints.
    """

    joined: bool = False
    model: nn.Module | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    optimizer: tuple[type[Optimizer], dict[str, Any]] | None = None
    steps: list[ProgramStep] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    updates: int = 0
    foreign: bool = False
    end: Tensor | None = None
    kinds: set[str] = field(default_factory=set)
    names: Namespace = field(default_factory=Namespace)
    printed: str = ""


def run_program(
    path: Path, arguments: Sequence[str] = (), *, steps: int | None = None
) -> ProgramRecording:
    """Run the file as a program on this rank of the open process group; return what it did.

    arguments : what follows the file's name on the command line.
    steps : end it after this many; None: run it to its end.
    """
    watch = _Watch(steps)
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(patch.object(sys, "argv", [str(path), *arguments]))
        stack.enter_context(patch.dict(os.environ, _torchrun_environment()))
        stack.enter_context(watch.watching())
        stack.enter_context(contextlib.suppress(_Enough))
        watch.recording.names = Namespace(runpy.run_path(str(path), run_name="__main__"))
    watch.finish()
    watch.recording.printed = printed.getvalue()
    return watch.recording


def _torchrun_environment() -> dict[str, str]:
    """Return what torchrun tells a process."""
    rank = str(dist.get_rank())
    size = str(dist.get_world_size())
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


class _Watch:
    """Record a program's steps, from torch's hooks."""

    def __init__(self, limit: int | None) -> None:
        self.recording = ProgramRecording()
        self._limit = limit
        self._recorder = MessageRecorder()
        self._model: nn.Module | None = None
        self._depth = 0  # of modules that are computing
        self._batch: tuple[Tensor, Tensor] | None = None
        self._step: ProgramStep | None = None  # the last one
        self._mark = 0  # messages that have been counted

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what this thread does meanwhile; the open process group stays open."""
        right_loss = nn.functional.cross_entropy
        right_backward = torch.autograd.backward

        def noted_loss(outputs: Tensor, labels: Tensor, *more: Any, **options: Any) -> Tensor:
            if self._batch is not None:
                self._batch = (self._batch[0], labels)
            return right_loss(outputs, labels, *more, **options)

        def noted_backward(*given: Any, **options: Any) -> None:
            before = self._begin_step()
            right_backward(*given, **options)
            self._end_backward(before)

        def join(*_: Any, **__: Any) -> None:
            self.recording.joined = True

        with contextlib.ExitStack() as stack:
            for owner, name, replacement in (
                (nn.functional, "cross_entropy", noted_loss),
                (torch.autograd, "backward", noted_backward),
                (dist, "init_process_group", join),
                (dist, "destroy_process_group", lambda *_: None),
            ):
                stack.enter_context(patch.object(owner, name, replacement))
            for hook in (
                module_hooks.register_module_forward_pre_hook(self._enter_module),
                module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
                optimizer_hooks.register_optimizer_step_pre_hook(self._before_update),
                optimizer_hooks.register_optimizer_step_post_hook(self._after_update),
            ):
                stack.callback(hook.remove)
            stack.enter_context(self._recorder)
            yield

    def finish(self) -> None:
        """Count the last messages, and keep all messages' kinds and the weights at the end."""
        self.recording.kinds = {message.kind for message in self._recorder.messages}
        if self._step is not None:
            self._step.sent_late += self._count_messages()
        if self._model is not None:
            self.recording.end = flat(self._model.parameters())

    def _enter_module(self, module: nn.Module, inputs: tuple) -> None:
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled() or not inputs:
            return
        if self._step is not None:
            self._step.sent_late += self._count_messages()
        recording = self.recording
        if self._model is None:
            recording.model = copy.deepcopy(module)
            recording.lengths = {name: p.numel() for name, p in module.named_parameters()}
        self._model = module
        if self._limit is not None and len(recording.batches) >= self._limit:
            self._depth = 0
            raise _Enough
        images = inputs[0].detach().clone()
        weights = torch.arange(1, images.numel() + 1, dtype=torch.float64).sqrt()
        recording.batches.append(float(images.flatten().double() @ weights))
        self._batch = (images, torch.empty(0))

    def _leave_module(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def _begin_step(self) -> Tensor:
        """Return the gradients before backward."""
        if self._model is None:
            return torch.empty(0)
        return flat_gradients(self._model)

    def _end_backward(self, before: Tensor) -> None:
        """Record what backward has added to the gradients."""
        if self._model is None or self._batch is None:
            return
        images, labels = self._batch
        own = flat_gradients(self._model) - before
        start = flat(self._model.parameters())
        step = ProgramStep(images, labels, start, before, own, sent_early=self._count_messages())
        self._step = step
        if len(self.recording.steps) < KEPT_STEPS:
            self.recording.steps.append(step)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self.recording.updates += 1
        if self.recording.optimizer is None:
            self.recording.optimizer = (type(optimizer), dict(optimizer.defaults))
        if self._step is not None and self._model is not None:
            given = [
                id(parameter) for group in optimizer.param_groups for parameter in group["params"]
            ]
            self.recording.foreign |= set(given).isdisjoint(map(id, self._model.parameters()))
            self._step.sent += self._count_messages()
            self._step.used = flat_gradients(self._model)

    def _after_update(self, *_: Any) -> None:
        self._count_messages()

    def _count_messages(self) -> int:
        """Return the messages since the last call."""
        found = len(self._recorder.messages)
        new = found - self._mark
        self._mark = found
        return new


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the numbers of tensors in one tensor of their own."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def flat_gradients(model: nn.Module, *, missing: float = 0.0) -> Tensor:
    """Return all gradients in one tensor; ``missing`` stands for each number of a None."""
    found: list[Tensor] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        found.append(torch.full_like(parameter, missing) if gradient is None else gradient)
    return flat(found)


def from_all_ranks(row: Tensor) -> Tensor:
    """Return the rows of all ranks, of shape (ranks, n). Collective."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)
