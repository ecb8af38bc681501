"""This rank's own gradients: what its backward computes, before anything is exchanged.

A hook on each parameter sees the gradient before it is added to ``.grad``, so also before DDP
averages it. ``optimizers`` asks here for the sum that belongs to what is now in ``.grad``.
"""

import functools
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..sampling import square_norm, take, wide
from ..state import Probe


class OwnSum:
    """The sum of one parameter's own gradients since its ``.grad`` was last cleared.

    Parameters
    ----------
    sharded : the gradient arrives at a leaf that FSDP2 has gathered; its ``.grad`` tells nothing.

    ``backwards`` counts the backward passes since the last step or clearing. ``unclear`` is True
    when ``.grad`` vanished between two of them, so that nobody knows what the sum should hold.
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self.sharded = sharded
        self.clear()

    def clear(self) -> None:
        """Forget the sum: ``.grad`` has been cleared."""
        self.samples: Tensor | None = None
        self.square: Tensor | None = None
        self.calls, self.backwards, self.backward = 0, 0, -1
        self.stepped = self.unclear = False

    def end_step(self) -> None:
        """Note that an optimiser has used the sum, which stays until ``.grad`` is cleared."""
        self.stepped, self.backwards = True, 0

    def add(self, gradient: Tensor, held: Tensor | None, *, backward: int, alone: bool) -> None:
        """Add the gradient of one call of the hook.

        Parameters
        ----------
        held : ``.grad`` of the parameter before the gradient is added to it.
        backward : the number of the backward pass.
        alone : the gradient is returned by torch.autograd.grad, not added to ``.grad``.
        """
        if self.samples is not None and self.backward != backward:
            self._fit(held, alone=alone)
        samples = take(gradient)
        self.samples = samples if self.samples is None else wide(self.samples) + samples
        self.calls += 1
        self.square = square_norm(gradient) if self.calls == 1 else None
        self.backwards += self.backward != backward
        self.backward, self.stepped = backward, False

    def _fit(self, held: Tensor | None, *, alone: bool) -> None:
        """Forget the sum if ``.grad`` was cleared without a word since the last backward."""
        if self.sharded and not alone:
            if self.stepped:
                self.clear()
        elif held is None or alone:
            unclear = not self.stepped
            self.clear()
            self.unclear = unclear
        elif self.samples is not None:
            self.samples = wide(self.samples) * (take(held) != 0).any()


class OwnGradients:
    """The own gradients of all parameters of this process.

    ``last_seconds`` is the time of the latest gradient (time.monotonic()), ``backward`` the number
    of backward passes so far; ``alone`` is True within torch.autograd.grad.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._known: Any = WeakTensorKeyDictionary()
        self.last_seconds, self.backward, self.alone = 0.0, 0, False
        self.any_sharded = False

    def tensors(self) -> list[Tensor]:
        """Return all parameters that are watched."""
        return list(self._known.keys())

    def of(self, tensor: Tensor) -> OwnSum | None:
        """Return the own gradient of a parameter; None if its gradients cannot be seen."""
        return self._known.get(tensor)

    def watch(self, tensor: Tensor) -> None:
        """See the gradients of a leaf from now on, before any hook that is added later."""
        if type(tensor).__name__ == "DTensor" or hasattr(tensor, "_local_tensor"):
            if tensor not in self._known:
                self._known[tensor] = OwnSum(sharded=True)
                self.any_sharded = True
        elif tensor.requires_grad and tensor.is_leaf and tensor not in self._known:
            self._known[tensor] = own = OwnSum()
            self._register(tensor, own)

    def watch_gathered(self, leaf: Tensor, sharded: Tensor) -> None:
        """See the gradients of a leaf that FSDP2 has gathered from its sharded parameter."""
        if leaf not in self._known and leaf.requires_grad:
            self.watch(sharded)
            self._known[leaf] = own = self._known[sharded]
            self._register(leaf, own)

    def _register(self, leaf: Tensor, own: OwnSum) -> None:
        reference = weakref.ref(leaf)

        @self._probe.guard
        def hook(gradient: Tensor) -> None:
            if torch.compiler.is_compiling():
                return
            parameter = reference()
            held = None if parameter is None else parameter.grad
            own.add(gradient, held, backward=self.backward, alone=self.alone)
            self.last_seconds = time.monotonic()

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # else saving warns
        leaf.register_hook(hook)

    def clear(self, tensors: Iterable[Tensor]) -> None:
        """Forget the sums of parameters whose ``.grad`` has been cleared."""
        for tensor in tensors:
            if (own := self._known.get(tensor)) is not None:
                own.clear()


def watch(probe: Probe) -> None:
    """Watch the gradients of every parameter of a module or of an optimiser."""
    probe.gradients = gradients = OwnGradients(probe)

    @probe.guard
    def registered(_module: Any, _name: str, parameter: Tensor | None) -> None:
        if parameter is not None and not torch.compiler.is_compiling():
            gradients.watch(parameter)

    register_module_parameter_registration_hook(registered)
    _after(torch.nn.Module, "zero_grad", lambda module: gradients.clear(module.parameters()), probe)
    _after(
        torch.optim.Optimizer, "zero_grad", lambda one: gradients.clear(parameters_of(one)), probe
    )
    probe.hear("backward_begin", lambda *_: _count(gradients))


def _count(gradients: OwnGradients) -> None:
    gradients.backward += 1


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimiser."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _after(owner: type, name: str, then: Callable[[Any], None], probe: Probe) -> None:
    """Call ``then`` with the object after its method, or a subclass's that calls super, returns."""
    original, then = getattr(owner, name), probe.guard(then)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            then(self)
        return result

    setattr(owner, name, method)
