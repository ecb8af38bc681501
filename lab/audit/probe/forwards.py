"""Forward passes of whole models: their samples, and whether they go through DDP.

Only the outermost module of a call counts, and only if a gradient reaches its output later:
``losses`` asks for those when a backward has ended.
"""

import functools
import importlib
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as hooks
from torch.utils.weak import WeakIdKeyDictionary

from .sampling import join, take
from .state import Probe

_OUTPUTS = 8


class Forward:
    """One outermost forward pass. ``reached`` becomes True when a gradient reaches its output."""

    def __init__(self, module: Module, through: str) -> None:
        self.module, self.through = weakref.ref(module), through
        self.kind = type(getattr(module, "module", module)).__name__
        self.reached = False
        self.samples: int | None = None
        self.inputs: Tensor | None = None
        self.shape: list[int] = []

    def note(self, arguments: tuple[Any, ...], output: Any) -> None:
        """Keep samples of the input, and await a gradient of the output."""
        for tensor in _tensors(arguments):
            self.shape = list(tensor.shape)
            self.samples = self.shape[0] if self.shape else 1
            self.inputs = take(tensor) if tensor.numel() else None
            break

        def arrives(_gradients: Any) -> None:
            self.reached = True

        for tensor, _ in zip(_tensors(output), range(_OUTPUTS), strict=False):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(arrives)

    def row(self) -> list[Any]:
        """Return the entry of the record ``backward``."""
        digest = None
        if self.inputs is not None:
            content = join([self.inputs]).tobytes() + repr(self.shape).encode()
            digest = zlib.crc32(content)
        return [self.samples, digest, self.through, self.kind]


class ForwardWatch:
    """The forward passes since the last backward that reached one.

    ``training`` is whether a forward pass that trains is under way; ``synced``, whether DDP was to
    average the gradients of its latest forward (None without DDP).
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._wrapped: Any = WeakIdKeyDictionary()  # modules within some DDP
        self._parents: Any = WeakIdKeyDictionary()
        self._roots: Any = WeakIdKeyDictionary()
        self._sharded: dict[tuple[int, str], Any] = {}
        self._outermost: Any = None
        self.training = False
        self.synced: bool | None = None
        self._in_ddp, self._went_through_ddp = 0, False
        self._pending: list[Forward] = []
        probe.parameter_names = self.names

    def child_added(self, parent: Module, _name: str, child: Module | None) -> None:
        """Note which module holds which."""
        if child is not None and not torch.compiler.is_compiling():
            self._parents[child] = weakref.ref(parent)

    def begin(self, module: Module, _arguments: Any) -> None:
        """Note the beginning of a call, before the module's own hooks."""
        if torch.compiler.is_compiling() or self._probe.in_backward:
            return  # in backward, checkpoints compute parts of the forward again
        running = None if self._outermost is None else self._outermost()
        if running is not None and running is not module:
            return
        if not self._in_ddp and next(module.parameters(), None) is None:
            return  # a loss, an activation
        self._outermost, self._went_through_ddp = weakref.ref(module), self._in_ddp > 0
        self.training = torch.is_grad_enabled() and module.training
        self._roots[self._root(module)] = True
        self._find_sharded(module)
        self._probe.tell("forward_begin", module)

    def end(self, module: Module, arguments: Any, *rest: Any) -> None:
        """Note the end of a call; ``rest`` is [the named arguments] and the output."""
        named, output = rest if len(rest) == 2 else ({}, rest[0])
        if torch.compiler.is_compiling() or self._outermost is None:
            return
        self._watch_gathered(module)
        if self._outermost() is not module:
            return
        self._outermost, self.training = None, False
        given = (*arguments, *named.values())
        if torch.is_grad_enabled():
            forward = Forward(module, self._through(module))
            self._probe.guard(forward.note)(given, output)
            self._pending.append(forward)
        self._probe.tell("forward", module, given, output)

    def take_reached(self) -> list[list[Any]]:
        """Return the rows of the forwards that the last backward reached, and forget them all."""
        reached = [one for one in self._pending if one.reached]
        if reached:
            self._pending.clear()
        del self._pending[:-64]  # the script may run forwards with gradients that it never uses
        rows, roots = [], set()
        for one in reached:
            module = one.module()
            root = module if module is None else self._root(module)
            if root is not module and id(root) in roots:
                continue  # model.forward() calls the model's layers one by one
            if root is not module and root is not None:
                roots.add(id(root))
                one.kind = type(getattr(root, "module", root)).__name__
            rows.append(one.row())
        return rows

    def names(self) -> dict[int, str]:
        """Return the names of all parameters of the models that were called, by id."""
        found: dict[int, str] = {}
        for root in list(self._roots):
            for name, parameter in root.named_parameters():
                found.setdefault(id(parameter), name.removeprefix("module."))
        return found

    def _root(self, module: Module) -> Module:
        """Return the module that holds this one, at any depth; DDP itself is left out."""
        for _ in range(100):
            reference = self._parents.get(module)
            parent = None if reference is None else reference()
            if parent is None or isinstance(parent, _ddp()):
                break
            module = parent
        return module

    def _through(self, module: Module) -> str:
        if self._went_through_ddp:
            return "ddp"
        parts = list(module.modules())
        if any(isinstance(part, _ddp()) for part in parts):
            return "ddp"  # torch.compile(DDP(model)), whose inner calls cannot be seen
        return "bypass" if any(part in self._wrapped for part in parts) else "module"

    def _find_sharded(self, module: Module) -> None:
        """Note where the parameters that FSDP2 shards live, while they are sharded."""
        if self._probe.gradients.any_sharded:
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if hasattr(parameter, "_local_tensor"):
                        self._sharded[(id(part), name)] = parameter

    def _watch_gathered(self, module: Module) -> None:
        if self._sharded:
            for name, leaf in module._parameters.items():
                sharded = self._sharded.get((id(module), name))
                if sharded is not None and leaf is not None and leaf is not sharded:
                    self._probe.gradients.watch_gathered(leaf, sharded)

    def watch_ddp(self) -> None:
        """Write the record ``ddp`` when one is built, and notice its forward."""
        cls, watch = _ddp(), self
        build, forward = cls.__init__, cls.forward

        @functools.wraps(build)
        def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            watch._probe.guard(watch.ddp_built)(self)

        @functools.wraps(forward)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(self, *args, **kwargs)
            watch._in_ddp += 1
            watch._went_through_ddp = True
            watch.synced = getattr(self, "require_backward_grad_sync", None)
            try:
                return forward(self, *args, **kwargs)
            finally:
                watch._in_ddp -= 1

        cls.__init__, cls.forward = initialise, wrapped

    def ddp_built(self, ddp: Any) -> None:
        """Write the record ``ddp``."""
        parameters = [one for one in ddp.module.parameters() if one.requires_grad]
        for part in ddp.module.modules():
            self._wrapped[part] = True
        self._probe.record(
            "ddp",
            parameters=sum(one.numel() for one in parameters),
            bytes=sum(one.numel() * one.element_size() for one in parameters),
            at=self._probe.place(),
        )


def _ddp() -> Any:
    return torch.nn.parallel.DistributedDataParallel


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors within lists, tuples, dicts and objects such as ModelOutput."""
    if isinstance(value, Tensor):
        yield value
    elif depth < 4 and isinstance(value, dict):
        yield from _tensors(list(value.values()), depth + 1)
    elif depth < 4 and isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one, depth + 1)
    elif depth < 4 and hasattr(value, "__dataclass_fields__"):
        yield from _tensors(list(vars(value).values()), depth + 1)


def watch(probe: Probe) -> None:
    """Watch the outermost forward passes, DDP and FSDP."""
    forwards = ForwardWatch(probe)
    probe.forwards = forwards
    hooks.register_module_module_registration_hook(probe.guard(forwards.child_added))
    hooks.register_module_forward_pre_hook(probe.guard(forwards.begin))
    end = probe.guard(forwards.end)
    try:
        hooks.register_module_forward_hook(end, with_kwargs=True)
    except TypeError:  # torch before 2.5 does not give named arguments
        hooks.register_module_forward_hook(end)
    if torch.distributed.is_available():
        forwards.watch_ddp()
        probe.guard(_watch_fsdp)(probe)


def _watch_fsdp(probe: Probe) -> None:
    """Write the record ``fsdp`` when a model is sharded."""
    package = importlib.import_module("torch.distributed.fsdp")
    _record_calls(package.FullyShardedDataParallel, "__init__", 1, probe)
    for place in (package, importlib.import_module("torch.distributed._composable.fsdp")):
        if hasattr(place, "fully_shard"):
            _record_calls(place, "fully_shard", 2, probe)


def _record_calls(owner: Any, name: str, version: int, probe: Probe) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        probe.record("fsdp", version=version, at=probe.place())
        return original(*args, **kwargs)

    setattr(owner, name, recorded)
