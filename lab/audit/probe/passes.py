"""Forward and backward passes of whole models, and the losses that lie between them.

Of the forward passes the outermost module of a call counts, and only if a gradient reaches its
output later: the record ``backward`` lists those, with the loss from which the gradients came.
Written here as well: ``ddp``, ``missed``, ``hook``, ``fsdp``, ``eval``, ``random`` and ``load``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules import module as hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from .randomness import torch_state
from .sampling import checksum, is_sampled, take, tensors_in
from .state import Probe, named, patch

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
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}  # torch's numbers
# Where there is no loss function: the reductions of a loss that the script computes itself.
_OTHERS = {"MeanBackward": "mean", "SumBackward": "sum"}
_MOST_NODES = 200
_BUFFER_COORDINATES = 64


@dataclass(eq=False)
class _Forward:
    """A forward pass, and whether a gradient has reached its output.

    root : the id of the whole model, also of layers that the script calls one by one.
    row : what the record ``backward`` says of it.
    """

    root: int
    row: list[Any]
    reached: bool = False

    def see_gradient(self, _gradients: Any) -> None:
        self.reached = True


@dataclass(eq=False)
class _Loss:
    """The loss of the record ``backward``; its last fields are tensors until it has ended."""

    node: str
    reduction: str | None
    samples: int | None
    target_hash: int | None
    arriving: Any = 0.0
    value: Any = None
    counted: Any = None

    def see_gradient(self, gradients: Any) -> None:
        self.arriving = sum(tensor.detach().sum() for tensor in tensors_in(gradients[:1]))


class PassWatch:
    """The passes of this process.

    training : a forward pass that trains is under way.
    _running : returns the outermost module whose forward is under way, or None.
    _parents : by module, a reference to the one that holds it.
    _roots : the whole models that were called.
    _wrapped : the modules within some DDP.
    _through_ddp : DDP has been called in this forward.
    _synced : whether DDP was to average after its latest forward; None without DDP.
    _averaged : by DDP, the parameters that it averages, with the nodes that its hooks lie on.
    _called : returns the DDP that was called last, or None.
    _converted : the script's line that converted a module last, as by double().
    _missed : what the latest record ``missed`` said.
    _pending : the forwards that a backward may reach.
    _random : a hash of the random state when the forward began.
    _dtypes : of what the modules of this forward have returned.
    _evaluated : the latest step after which the script has evaluated.
    _micro : the number of this backward in ``_step``, from 0.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.training = False
        self._running: Callable[[], Module | None] = lambda: None
        self._parents: Any = WeakIdKeyDictionary()
        self._roots: Any = WeakIdKeyDictionary()
        self._wrapped: Any = WeakIdKeyDictionary()
        self._through_ddp = False
        self._synced: bool | None = None
        self._averaged: Any = weakref.WeakKeyDictionary()
        self._called: Callable[[], Any] = lambda: None
        self._converted: list[Any] | None = None
        self._missed: dict[str, list[str]] = {"unused": [], "late": [], "converted": []}
        self._pending: list[_Forward] = []
        self._random: int | None = None
        self._dtypes: set[str] = set()
        self._evaluated = 0
        self._micro = 0
        self._step = -1

    # --- forward ---

    def child_added(self, parent: Module, _name: str, child: Module | None) -> None:
        """Note which module holds which."""
        if child is not None:
            self._parents[child] = weakref.ref(parent)

    def begin(self, module: Module, _arguments: Any) -> None:
        """Note the beginning of a forward, before the module's own hooks.

        Only the outermost module with parameters counts, not the layers that it calls.
        """
        running = self._running()
        if running is not None and running is not module:
            return  # a layer
        has_parameters = next(module.parameters(), None) is not None
        # within backward, checkpoints compute parts of the forward again
        if self._probe.in_backward or not has_parameters:
            return
        self._running = weakref.ref(module)
        self.training = torch.is_grad_enabled() and module.training
        self._random = torch_state()
        self._dtypes = set()
        self._roots[self._root(module)] = True
        self._probe.tell("forward_begin", module)

    def end(self, module: Module, arguments: Any, *rest: Any) -> None:
        """Note the end of the outermost forward.

        rest : the output; with torch 2.5 and newer, the named arguments before it.
        """
        if isinstance(rest[-1], Tensor):
            self._dtypes.add(str(rest[-1].dtype)[len("torch.") :])
        if self._running() is not module:
            return
        self._running = lambda: None
        drew = self._random != torch_state()  # as dropout does
        if torch.is_grad_enabled():
            self._await_gradient(module, (arguments, *rest[:-1]), rest[-1])
        if self.training and drew:
            self._probe.record(
                "random", step=self._probe.step, hash=self._random, at=self._probe.place()
            )
        if not self.training and self._evaluated != self._probe.step:
            self._evaluates(module, drew=drew)
        self.training = self._through_ddp = False
        self._probe.tell("forward", module)

    def _await_gradient(self, module: Module, given: Any, output: Any) -> None:
        """Keep what the record ``backward`` says of a forward, until a gradient reaches it."""
        samples, input_hash = _samples(next(tensors_in(given), None))
        root = id(self._root(module))
        row = [samples, input_hash, self._through(module), _mode(module), sorted(self._dtypes)]
        forward = _Forward(root, row)
        self._pending.append(forward)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(forward.see_gradient)

    def _evaluates(self, module: Module, *, drew: bool) -> None:
        """Record how a model evaluates, and with which running statistics."""
        self._evaluated = self._probe.step
        buffers = []
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")) and type(buffer) is Tensor:
                samples = take(buffer)[:_BUFFER_COORDINATES]
                buffers.append([_plain_name(name), samples.tolist()])
        layers = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
        self._probe.record(
            "eval",
            step=self._probe.step,
            buffers=buffers,
            batchnorm=sum(not isinstance(layer, SyncBatchNorm) for layer in layers),
            mode=_mode(module),
            dtypes=sorted(self._dtypes),
            drew=drew,
            at=self._probe.place(),
        )

    def models(self) -> Iterator[dict[str, Tensor]]:
        """Yield the parameters of each model that was called, by name."""
        for root in list(self._roots):
            yield {_plain_name(name): one for name, one in root.named_parameters()}

    def names(self) -> dict[int, str]:
        """Return the names of all parameters of the models that were called, by id."""
        return {id(one): name for model in self.models() for name, one in model.items()}

    def load(self, original: Any, module: Module, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Write the record ``load`` when a module has loaded a state dict."""
        result = original(module, given, *args, **kwargs)
        self._probe.record(
            "load",
            step=self._probe.step,
            matched=len(given) - len(result.unexpected_keys),
            missing=len(result.missing_keys),
            unexpected=len(result.unexpected_keys),
            names=[*result.missing_keys[:1], *result.unexpected_keys[:1]],
            at=self._probe.place(),
        )
        return result

    def _root(self, module: Module) -> Module:
        """Return the module that holds this one, at any depth; DDP itself is left out."""
        parent = self._parents.get(module, lambda: None)()
        if parent is None or isinstance(parent, DistributedDataParallel):
            return module
        return self._root(parent)

    def _through(self, module: Module) -> str:
        """Return "ddp" if a forward went through DDP, "bypass" if past it, "module" without DDP."""
        parts = list(module.modules())
        # DDP among the parts: torch.compile(DDP(model)), whose inner calls cannot be seen
        if self._through_ddp or any(isinstance(part, DistributedDataParallel) for part in parts):
            return "ddp"
        return "bypass" if any(part in self._wrapped for part in parts) else "module"

    # --- DDP ---

    def build_ddp(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        """See a DDP that has been built."""
        original(ddp, *args, **kwargs)
        self._probe.guard(self._ddp_built)(ddp)

    def _ddp_built(self, ddp: Any) -> None:
        """Write the record ``ddp``, and remember which parameters it averages."""
        trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        self._probe.record(
            "ddp",
            bytes=nbytes,
            numbers=sum(parameter.numel() for parameter in trained),
            ranks=list(torch.distributed.get_process_group_ranks(ddp.process_group)),
            at=self._probe.place(),
        )
        self._wrapped.update(dict.fromkeys(ddp.module.modules()))
        self._averaged[ddp] = nodes = WeakTensorKeyDictionary()
        for parameter in trained:
            nodes[parameter] = _accumulator(parameter)

    def convert(self, original: Any, module: Module, *args: Any, **kwargs: Any) -> Any:
        """Note the line that converts a module, which may give its parameters new nodes."""
        result = original(module, *args, **kwargs)
        self._converted = self._probe.place()
        return result

    def _see_missed(self) -> None:
        """Write the record ``missed`` if a backward gave other gradients than DDP averages."""
        ddp = self._called()
        if ddp not in self._averaged or not self._synced or not is_sampled(self._step):
            return
        gradients = self._probe.gradients
        missed: dict[str, list[str]] = {"unused": [], "late": [], "converted": []}
        for name, parameter in ddp.module.named_parameters():
            own = gradients.known.get(parameter)
            reached = own is not None and own.backward == gradients.backward
            how = _missed_how(parameter, self._averaged[ddp].get(parameter), reached=reached)
            if how is not None and name not in ddp.parameters_to_ignore:
                missed[how].append(name)
        if missed != self._missed:
            self._missed = missed
            at = self._converted if missed["converted"] else None
            self._probe.record("missed", step=self._step, **missed, at=at)

    def hook_ddp(self, original: Any, ddp: Any, state: Any, hook: Any) -> None:
        """Write the record ``hook`` before a communication hook is registered."""
        name = getattr(hook, "__name__", None)
        self._probe.record("hook", name=name, at=self._probe.place())
        original(ddp, state, hook)

    def call_ddp(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
        """Note that DDP runs the model, and whether it is to average the gradients."""
        self._through_ddp = True
        self._called = weakref.ref(ddp)
        self._synced = getattr(ddp, "require_backward_grad_sync", None)
        self._probe.tell("ddp_forward")
        return original(ddp, *args, **kwargs)

    # --- backward ---

    def backward(self, alone: bool, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call torch.autograd.backward, or torch.autograd.grad (alone), as one backward pass.

        Neither counts within another pass, nor ``grad`` if it asks for no parameter's gradient.
        A pass that fails writes no record.
        """
        if self._probe.in_backward:
            return original(*args, **kwargs)
        gradients = self._probe.gradients
        if alone:
            inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
            if all(tensor not in gradients.known for tensor in tensors_in(inputs)):
                return original(*args, **kwargs)
        roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        self._probe.in_backward = True
        gradients.alone = alone
        try:
            loss = self._probe.guard(self._begin_backward)(list(tensors_in(roots)))
            begun = time.monotonic()
            result = original(*args, **kwargs)
            self._probe.guard(self._end_backward)(loss, begun)
        finally:
            self._probe.in_backward = False
            self._probe.tell("backward_end")
        return result

    def _begin_backward(self, roots: list[Tensor]) -> _Loss | None:
        """Count the pass, tell of it, and return its loss, which is watched from now on."""
        if self._probe.step == self._step:
            self._micro += 1
        else:
            self._step = self._probe.step
            self._micro = 0
        self._probe.tell("backward_begin", roots)
        node = find_loss(roots[0]) if len(roots) == 1 else None
        if node is None:
            return None
        loss = _watch_loss(node)
        if roots[0].numel() == 1:
            loss.value = roots[0].detach()
        return loss

    def _end_backward(self, loss: _Loss | None, begun: float) -> None:
        """Write the record of a pass that has succeeded."""
        ended = time.monotonic()
        latest = self._probe.gradients.last_seconds
        if loss is not None:
            loss.arriving = float(loss.arriving)
            for name in ("value", "counted"):
                tensor = getattr(loss, name)
                if tensor is not None:
                    setattr(loss, name, float(tensor))
        # Of each model the first forward counts: in reversed order it replaces the later ones.
        reached = [forward for forward in self._pending[::-1] if forward.reached]
        rows = {forward.root: forward.row for forward in reached}
        self._pending = []  # the script may run forwards with gradients that it never uses
        self._probe.record(
            "backward",
            step=self._step,
            micro=self._micro,
            forwards=list(rows.values())[::-1],
            synced=self._synced,
            loss=None if loss is None else vars(loss),
            seconds=ended - begun,
            exposed_seconds=ended - latest if latest > begun else None,
            optimizers=self._probe.gradients.reached(),
            at=self._probe.place(),
        )
        self._see_missed()


def _mode(module: Module) -> str:
    """Return the mode of a model: "train", "eval", or "both" if its parts differ; DDP has none."""
    parts = [part for part in module.modules() if not isinstance(part, DistributedDataParallel)]
    modes = {part.training for part in parts}
    if len(modes) > 1:
        return "both"
    if True in modes:
        return "train"
    return "eval"


def _missed_how(parameter: Tensor, node: Any, *, reached: bool) -> str | None:
    """Return the field of ``missed`` that names a parameter; None if DDP averages what it awaits.

    node : that DDP's hook lies on, or None.
    reached : backward gave it a gradient.
    """
    if node is None:
        return "late" if reached else None
    if not reached:
        return "unused"
    return None if node is _accumulator(parameter) else "converted"


def _accumulator(parameter: Tensor) -> Any:
    """Return the node that adds to the ``.grad`` of a parameter."""
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter)
    return view.grad_fn.next_functions[0][0]


def find_loss(root: Tensor) -> Any:
    """Return the node of the loss nearest to the root of a backward, else of a mean or a sum."""
    nodes: list[Any] = [] if root.grad_fn is None else [root.grad_fn]
    for node in nodes:  # breadth first: the list grows on the way
        if len(nodes) >= _MOST_NODES:
            break
        for following, _ in node.next_functions:
            if following is not None and following not in nodes:
                nodes.append(following)
    for names in (_LOSSES, tuple(_OTHERS)):  # any loss comes before any mean or sum
        for node in nodes:
            if node.name().startswith(names):
                return node
    return None


def _watch_loss(node: Any) -> _Loss:
    """Return what the record says of a loss, and see the gradient that will reach it."""
    name = node.name()
    target = None
    with contextlib.suppress(RuntimeError):  # an earlier backward has freed the target
        target = getattr(node, "_saved_target", None)
    samples, target_hash = _samples(target)
    if hasattr(node, "_saved_reduction"):
        reduction = _REDUCTIONS.get(node._saved_reduction)
    else:
        reduction = _OTHERS.get(name[:-1])  # without the number of the overload
    loss = _Loss(name, reduction, samples, target_hash)
    if reduction == "mean" and target is not None and getattr(node, "_saved_weight", 0) is None:
        # without the targets of ignore_index
        loss.counted = getattr(node, "_saved_total_weight", None)
    node.register_prehook(loss.see_gradient)
    return loss


def _samples(tensor: Tensor | None) -> tuple[int | None, int | None]:
    """Return the number of samples in the first dimension of a tensor, and a hash of it."""
    if tensor is None:
        return None, None
    count = tensor.shape[0] if tensor.dim() else 1
    return count, checksum([take(tensor)])


def _plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without DDP's prefix."""
    return name[len("module.") :] if name.startswith("module.") else name


def watch(probe: Probe) -> None:
    """Watch forward and backward passes, DDP and FSDP."""
    passes = probe.forwards = PassWatch(probe)
    patch(Module, load_state_dict=passes.load)
    hooks.register_module_module_registration_hook(probe.guard(passes.child_added))
    hooks.register_module_forward_pre_hook(probe.guard(passes.begin))
    register = hooks.register_module_forward_hook
    if "with_kwargs" in named(register, (), {}):  # torch 2.5 and newer
        register(probe.guard(passes.end), with_kwargs=True)
    else:
        register(probe.guard(passes.end))
    patch(
        torch.autograd,
        backward=functools.partial(passes.backward, False),
        grad=functools.partial(passes.backward, True),
    )
    if torch.distributed.is_available():
        patch(Module, _apply=passes.convert)
        patch(
            DistributedDataParallel,
            __init__=passes.build_ddp,
            forward=passes.call_ddp,
            register_comm_hook=passes.hook_ddp,
        )
        sharded = functools.partial(probe.note, "fsdp")
        for name in ("fsdp", "_composable.fsdp"):  # the second one before torch 2.6
            with contextlib.suppress(ImportError):
                patch(importlib.import_module(f"torch.distributed.{name}"), fully_shard=sharded)
        patch(torch.distributed.fsdp.FullyShardedDataParallel, __init__=sharded)
