"""Backward passes and the loss from which each one starts: the record ``backward``."""

import functools
import time
import zlib
from typing import Any

import torch
from torch import Tensor

from .sampling import join, take
from .state import Probe

_LOSSES = (
    "NllLoss",
    "CrossEntropy",
    "MseLoss",
    "BinaryCrossEntropy",
    "SmoothL1Loss",
    "HuberLoss",
    "L1Loss",
    "KlDiv",
    "PoissonNllLoss",
    "SoftMarginLoss",
    "MultiMarginLoss",
    "MultilabelMarginLoss",
    "CtcLoss",
)
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
_NODES = 200


class Loss:
    """The node of the autograd graph that computes the loss, seen before backward begins."""

    def __init__(self, root: Tensor, node: Any) -> None:
        self.root, self.node_name = root.detach(), node.name()
        self.arriving: Tensor | None = None
        self.reduction = _reduction(node)
        self.samples: int | None = None
        self.target: Tensor | None = None
        target = _saved_target(node)
        if target is not None:
            self.samples = target.shape[0] if target.dim() else 1
            self.target = take(target) if target.numel() else None
        self._handle = node.register_prehook(self._arrives)

    def _arrives(self, gradients: Any) -> None:
        if gradients and gradients[0] is not None:
            self.arriving = gradients[0].detach().sum()

    def fields(self) -> dict[str, Any]:
        """Return the entry "loss" of the record, and stop to watch the node."""
        self._handle.remove()
        return {
            "value": self.root.item() if self.root.numel() == 1 else None,
            "node": self.node_name,
            "reduction": self.reduction,
            "arriving": None if self.arriving is None else self.arriving.item(),
            "samples": self.samples,
            "target_hash": None
            if self.target is None
            else zlib.crc32(join([self.target]).tobytes()),
        }


def find_loss(root: Tensor) -> Loss | None:
    """Return the loss nearest to the root of a backward; None if it cannot be told."""
    first = root.grad_fn
    if first is None:
        return None
    queue, seen, fallback = [first], {first}, None
    while queue and len(seen) < _NODES:
        node = queue.pop(0)
        name = node.name()
        if name.startswith(_LOSSES):
            return Loss(root, node)
        if fallback is None and name.startswith(("MeanBackward", "SumBackward")):
            fallback = node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return None if fallback is None else Loss(root, fallback)


def _reduction(node: Any) -> str | None:
    if hasattr(node, "_saved_reduction"):
        return _REDUCTIONS.get(int(node._saved_reduction))
    name = node.name()
    return "mean" if name.startswith("Mean") else "sum" if name.startswith("Sum") else None


def _saved_target(node: Any) -> Tensor | None:
    """Return the target that the node has kept; None where it keeps none or has freed it."""
    try:
        target = getattr(node, "_saved_target", None)
    except RuntimeError:
        return None
    return target if isinstance(target, Tensor) else None


class BackwardWatch:
    """Tells of the beginning and the end of each outermost backward, and records it."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._micro, self._step = 0, -1
        self._loss: Loss | None = None
        self._begun = 0.0
        self._place: list[Any] | None = None

    def begin(self, roots: list[Tensor]) -> None:
        """Note the beginning of a backward pass."""
        if self._step != self._probe.step:
            self._micro, self._step = 0, self._probe.step
        self._place = self._probe.place()
        self._loss = None
        self._probe.tell("backward_begin", roots)
        if len(roots) == 1:
            self._loss = self._probe.guard(find_loss)(roots[0])
        self._begun = time.monotonic()

    def end(self) -> None:
        """Write the record of the backward pass, which has succeeded."""
        ended = time.monotonic()
        latest = self._probe.gradients.last_seconds
        loss = None if self._loss is None else self._probe.guard(self._loss.fields)()
        self._probe.record(
            "backward",
            step=self._step,
            micro=self._micro,
            forwards=self._probe.forwards.take_reached(),
            synced=self._probe.forwards.synced,
            loss=loss,
            seconds=ended - self._begun,
            exposed_seconds=ended - latest if latest > self._begun else None,
            at=self._place,
        )
        self._micro += 1
        self._loss = None

    def run(self, original: Any, roots: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Call torch's function as one backward pass, unless it runs within another."""
        if self._probe.in_backward or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        self._probe.in_backward = True
        try:
            self._probe.guard(self.begin)(roots)
            result = original(*args, **kwargs)
            self._probe.guard(self.end)()
        finally:
            self._probe.in_backward = False
            self._probe.tell("backward_end")
        return result


def watch(probe: Probe) -> None:
    """Watch Tensor.backward, torch.autograd.backward and torch.autograd.grad."""
    watched = BackwardWatch(probe)
    method, function, grad = torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad

    @functools.wraps(method)
    def tensor_backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return watched.run(method, [self], (self, *args), kwargs)

    @functools.wraps(function)
    def backward(*args: Any, **kwargs: Any) -> Any:
        return watched.run(function, _roots(args, kwargs, "tensors"), args, kwargs)

    @functools.wraps(grad)
    def autograd_grad(*args: Any, **kwargs: Any) -> Any:
        inputs = _listed(args[1] if len(args) > 1 else kwargs.get("inputs"))
        known = [one for one in inputs if probe.gradients.of(one) is not None]
        if not known or probe.in_backward:
            return grad(*args, **kwargs)
        probe.gradients.alone = True
        try:
            return watched.run(grad, _roots(args, kwargs, "outputs"), args, kwargs)
        finally:
            probe.gradients.alone = False

    torch.Tensor.backward = tensor_backward  # type: ignore[method-assign]  # ours
    torch.autograd.backward = backward
    torch.autograd.grad = autograd_grad


def _roots(args: Any, kwargs: Any, name: str) -> list[Tensor]:
    return _listed(args[0] if args else kwargs.get(name))


def _listed(value: Any) -> list[Tensor]:
    """Return one tensor, or a sequence of them, as a list."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, Tensor)]
