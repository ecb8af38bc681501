"""Keep what the first steps need to be computed again in one process (only with ``replay``).

Every rank keeps, of each forward that a gradient reached: the arguments, the random state before
it, and the gradient that reached the model's output. At the cut each rank saves them to
``replay-<rank>.pt``, and rank 0 computes the steps again, see replaying.py.
"""

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..state import Probe
from .again import RankSteps, compute_again, tensors_of

STEPS = 4
_WAIT_SECONDS = 15.0


class Replay:
    """What this rank keeps of its first steps.

    ``why_not`` is the first reason for which the steps cannot be computed again.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe, self.why_not = probe, ""
        self.steps: dict[int, list[dict[str, Any]]] = {}
        self.model: Module | None = None
        self.copy: Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.groups: list[list[str]] = []
        self.state: Any = None
        self.before: dict[str, Any] = {}
        self.done = False
        self.group: tuple[int, int] | None = None

    def attempt(self, method: Callable[..., None]) -> Callable[..., None]:
        """Return the method, but an error in it, or in a former one, becomes ``why_not``."""

        def attempted(*args: Any) -> None:
            if self.why_not or self.done or self.probe.step >= STEPS:
                return
            try:
                method(*args)
            except Exception as error:
                kind = "" if type(error) is ValueError else f" ({type(error).__name__})"
                self.why_not = f"{error}{kind}"

        return attempted

    def forward_begin(self, module: Module) -> None:
        """Keep the random state, and before the first backward the model as it is."""
        if not torch.is_grad_enabled():
            return
        whole = _unwrapped(module)
        if not self.steps:
            if any(isinstance(part, torch.nn.SyncBatchNorm) for part in whole.modules()):
                raise ValueError("SyncBatchNorm needs all ranks")
            if any(hasattr(one, "_local_tensor") for one in whole.parameters()):
                raise ValueError("the model's parameters are sharded")
            self.model, self.copy = whole, copy.deepcopy(whole)
        elif whole is not self.model:
            raise ValueError("the script trains with several models, or parts of one")
        device = next(whole.parameters()).device.type
        self.before = {
            "random": torch.get_rng_state(),
            "autocast": (device, torch.get_autocast_dtype(device))
            if torch.is_autocast_enabled(device)
            else None,
        }

    def forward(self, _module: Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Keep the arguments, and the gradient that reaches the output."""
        outputs = [one for one in tensors_of(output) if one.requires_grad]
        if not torch.is_grad_enabled() or not outputs or not self.before:
            return
        entry = {**self.before, "arguments": copy.deepcopy(_detached(arguments)), "gradients": {}}
        step, self.before = self.probe.step, {}
        gradients: dict[int, Tensor] = entry["gradients"]

        def keep(place: int) -> Callable[[Tensor], None]:
            def arrives(gradient: Tensor) -> None:
                if not gradients:
                    self.steps.setdefault(step, []).append(entry)
                gradients[place] = gradient.detach().clone()

            return arrives

        for place, one in enumerate(outputs):
            one.register_hook(keep(place))

    def step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Note at its first step which parameters the optimiser holds, and its state."""
        if self.optimizer is not None:
            if optimizer is not self.optimizer:
                raise ValueError("the script has several optimisers")
            return
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer" or self.model is None:
            raise ValueError("the optimiser cannot be built again in one process")
        names = {id(one): name for name, one in self.model.named_parameters()}
        self.optimizer, self.state = optimizer, copy.deepcopy(optimizer.state_dict())
        for group in optimizer.param_groups:
            if any(id(one) not in names for one in group["params"]):
                raise ValueError("the optimiser holds parameters that the model lacks")
            self.groups.append([names[id(one)] for one in group["params"]])

    def cut(self, *_: Any) -> None:
        """Save what was kept; on rank 0 compute the steps again and write the record."""
        if self.done:
            return
        self.done = True
        if self.group is None:
            self.probe.record("replay", steps=[], why_not="no process group was seen")
            return
        rank, size = self.group
        steps = [self.steps[step] for step in range(STEPS) if step in self.steps]
        kept = RankSteps(self.probe.pid, steps, self.why_not)
        path = self.probe.folder / f"replay-{rank}.pt"
        try:
            torch.save(vars(kept), path.with_suffix(".part"))
        except Exception as error:
            kept = RankSteps(self.probe.pid, [], f"its batches cannot be saved ({error})")
            torch.save(vars(kept), path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        if rank == 0:
            self.probe.busy = True  # type: ignore[attr-defined]  # stopping.py asks for it
            try:
                found, why_not = self.replay(size)
            except Exception as error:
                found, why_not = [], f"{type(error).__name__}: {error}"
            finally:
                self.probe.busy = False  # type: ignore[attr-defined]  # as above
            self.probe.record("replay", steps=found, why_not=why_not or None)

    def replay(self, size: int) -> tuple[list[list[Any]], str]:
        """Wait for the other ranks' files, then compute the steps again."""
        paths = [self.probe.folder / f"replay-{rank}.pt" for rank in range(size)]
        limit = time.monotonic() + _WAIT_SECONDS
        while not all(path.exists() for path in paths):
            if time.monotonic() > limit:
                return [], "not every rank has saved its batches in time"
            time.sleep(0.05)
        ranks = [RankSteps(**torch.load(path, weights_only=False)) for path in paths]
        for rank, one in enumerate(ranks):
            if one.why_not:
                return [], f"rank {rank}: {one.why_not}"
        if self.copy is None or self.optimizer is None:
            return [], "no step of one model and one optimiser was seen"
        optimizer = self.build_optimizer(self.copy)
        with _silent(self.probe):
            return compute_again(self.probe.folder, self.copy, optimizer, ranks)

    def build_optimizer(self, model: Module) -> torch.optim.Optimizer:
        """Build the script's optimiser again, for the copy of the model."""
        parameters = dict(model.named_parameters())
        groups = [{"params": [parameters[name] for name in names]} for names in self.groups]
        rate = float(self.state["param_groups"][0].get("lr", 0.1))
        kind: Any = type(self.optimizer)
        optimizer: torch.optim.Optimizer = kind(groups, lr=rate)
        optimizer.load_state_dict(self.state)
        return optimizer

    def note_group(self, *_: Any) -> None:
        """Remember rank and size while the group exists."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.group = torch.distributed.get_rank(), torch.distributed.get_world_size()


@contextmanager
def _silent(probe: Probe) -> Iterator[None]:
    """Let the probe write no record and tell no event meanwhile."""
    instead: dict[str, Any] = {
        "record": lambda *_, **__: None,
        "tell": lambda *_: None,
        "numbers": lambda _: [0, 0],
    }
    vars(probe).update(instead)
    try:
        yield
    finally:
        for name in instead:
            del vars(probe)[name]


def _unwrapped(module: Module) -> Module:
    """Return the model within DistributedDataParallel, or the module itself."""
    inner = getattr(module, "module", None)
    wraps = isinstance(module, torch.nn.parallel.DistributedDataParallel)
    return inner if wraps and isinstance(inner, Module) else module


def _detached(value: Any) -> Any:
    """Return arguments whose tensors can be copied."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_detached(one) for one in value)
    return value


def watch(probe: Probe) -> None:
    """Keep the first steps if they are to be computed again."""
    if not probe.settings.get("replay"):
        return
    replay = Replay(probe)
    probe.hear("forward_begin", replay.note_group)
    probe.hear("forward_begin", replay.attempt(replay.forward_begin))
    probe.hear("forward", replay.attempt(replay.forward))
    probe.hear("step_begin", replay.attempt(replay.step_begin))
    probe.hear("cut", replay.cut)
