"""Watches forward passes: the random state of those that draw, and BatchNorm at evaluation."""

import zlib
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from .state import Probe

RANDOM_STEPS = 6
EVALUATIONS = 8
BUFFER_COORDINATES = 64


class PassWatch:
    """Writes the records ``random`` and ``eval``."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.before: int | None = None
        self.drawn: set[int] = set()
        self.evaluated = {0}
        probe.hear("forward_begin", self.before_forward)
        probe.hear("forward", self.after_forward)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Remember the random state before a training forward."""
        drawing = module.training and torch.is_grad_enabled() and len(self.drawn) < RANDOM_STEPS
        self.before = _random_state() if drawing else None

    def after_forward(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """Record what a forward shows."""
        before, self.before = self.before, None
        step = self.probe.step
        if not torch.is_grad_enabled() or not module.training:
            self.evaluate(module)
        elif before is not None and step not in self.drawn and before != _random_state():
            self.drawn.add(step)
            self.probe.record("random", step=step, hash=before)

    def evaluate(self, module: torch.nn.Module) -> None:
        """Record the running statistics, once a step."""
        step = self.probe.step
        if step in self.evaluated or len(self.evaluated) > EVALUATIONS:
            return
        layers = [
            one
            for one in module.modules()
            if isinstance(one, _NormBase) and not isinstance(one, torch.nn.SyncBatchNorm)
        ]
        found = [
            [name.removeprefix("module."), _some(buffer)]
            for name, buffer in module.named_buffers()
            if name.endswith(("running_mean", "running_var")) and type(buffer) is torch.Tensor
        ]
        self.evaluated.add(step)
        self.probe.record(
            "eval", step=step, buffers=found, batchnorm=len(layers), at=self.probe.place()
        )


def _random_state() -> int:
    """Return a hash of the generators' states; reading them draws nothing."""
    code = zlib.crc32(bytes(torch.get_rng_state().tolist()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        if torch.cuda.is_current_stream_capturing():
            return code
        code = zlib.crc32(bytes(torch.cuda.get_rng_state().tolist()), code)
    return code


def _some(buffer: torch.Tensor) -> list[float]:
    flat = buffer.detach().reshape(-1)
    values: list[float] = flat[:: max(1, -(-flat.numel() // BUFFER_COORDINATES))].double().tolist()
    return values


def watch(probe: Probe) -> None:
    """Watch the forward passes of this process."""
    PassWatch(probe)
