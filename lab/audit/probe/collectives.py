"""What the ranks tell each other: the records ``group``, ``mesh``, ``call`` and ``done``.

The functions of torch.distributed are replaced by others of the same names, which write a record
before and after each call. A call inside another one, such as the all_gather in all_gather_object,
is not recorded. What C++ sends by itself, such as DistributedDataParallel, is not seen here.
"""

import functools
import inspect
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from .hangs import HangWatcher
from .state import Probe
from .storages import ParameterStorages

_BEGINNINGS = (
    *("all_", "barrier", "broadcast", "gather", "init_process_group", "irecv", "isend"),
    *("monitored_barrier", "new_group", "recv", "reduce", "scatter", "send"),
)
"""Of the names of the functions that communicate."""
_MESSAGES = (
    *("input_tensor", "input", "input_list", "input_tensor_list", "tensor", "tensors", "inputs"),
    *("output", "output_tensor"),
)
"""The arguments that may hold what a rank gives, or what it receives if it gives nothing."""
_PACKAGE = "torch.distributed"
_MANY_CALLS, _FIRST_STEPS = 2000, 10


def watch(probe: Probe) -> None:
    """Replace the functions; do nothing where torch was built without torch.distributed."""
    if dist.is_available():
        recorder = CallRecorder(probe)
        for name, value in list(vars(sys.modules[f"{_PACKAGE}.distributed_c10d"]).items()):
            if name.startswith(_BEGINNINGS) and type(value) is FunctionType:
                recorder.replace(name, value)
        recorder.replace_wait()
        _watch_meshes(probe)


class CallRecorder:
    """Records the calls of this process, numbered from 0."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._hangs = HangWatcher(probe)
        self._contents = ParameterStorages(probe)
        self._works: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._thread = threading.local()
        self._calls, self._step, self._calls_in_step = itertools.count(), 0, 0
        self._full = False

    def replace(self, name: str, original: Callable[..., Any]) -> None:
        """Put a recording function in the place of torch.distributed's of this name."""
        signature, thread = inspect.signature(original), self._thread

        @functools.wraps(original)
        def recorded(*arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(thread, "inside", False):
                return original(*arguments, **named)
            thread.inside = True
            try:
                return self._call(name, signature, original, arguments, named)
            finally:
                thread.inside = False

        for one in [value for key, value in sys.modules.items() if key.startswith(_PACKAGE)]:
            if vars(one).get(name) is original:
                setattr(one, name, recorded)

    def replace_wait(self) -> None:
        """Time ``Work.wait``, if its class lets itself be changed."""
        original = dist.Work.wait

        @functools.wraps(original)
        def wait(work: Any, *arguments: Any, **named: Any) -> Any:
            number = self._works.get(work)
            if number is None:
                return original(work, *arguments, **named)
            return self._timed(number, "wait_seconds", original, (work, *arguments), named)

        try:
            setattr(dist.Work, "wait", wait)  # noqa: B010 - mypy refuses an assignment
        except (AttributeError, TypeError):  # it is a class of C++
            return

    def _call(
        self,
        name: str,
        signature: inspect.Signature,
        original: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Call the original between a record ``call`` and a record ``done``."""
        if name == "init_process_group":
            self._hangs.start()
        elif not any(part in name for part in ("barrier", "object", "new_group")):
            self._probe.tell("communicate", name)
        if self._too_many():
            return original(*arguments, **named)
        try:
            given = signature.bind(*arguments, **named)
            given.apply_defaults()
            fields = self._describe(name, given.arguments)
        except Exception:  # a call that torch refuses as well, or that cannot be described
            fields = {}
        number = next(self._calls)  # also from several threads
        at = self._probe.place()
        self._probe.record("call", c=number, name=name, step=self._probe.step, **fields, at=at)
        result = self._timed(number, "seconds", original, arguments, named)
        if isinstance(result, dist.Work):
            self._works[result] = number
        if name == "init_process_group":
            self._record_group(at)
        return result

    def _timed(
        self,
        number: int,
        field: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Return what the function returns. If it fails, let all ranks write their stacks first."""
        began, error = time.monotonic(), None
        self._hangs.waits[number] = began
        try:
            return function(*arguments, **named)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:300]
            if isinstance(failure, RuntimeError) and not self._probe.cutting:
                self._hangs.ask_all()
                self._hangs.write("a collective failed")
                time.sleep(1)  # the others look twice a second, and end once this rank has gone
            raise
        finally:
            self._hangs.waits.pop(number, None)
            fields: dict[str, Any] = {"seconds": 0.0, field: time.monotonic() - began}
            if _in_own_thread():
                fields["own_thread"] = True
            self._probe.record("done", c=number, **fields, error=error)

    def _too_many(self) -> bool:
        """Return whether calls are no longer recorded: many a step, and enough steps were seen."""
        if self._probe.step != self._step:
            self._step, self._calls_in_step = self._probe.step, 0
        self._calls_in_step += 1
        if self._calls_in_step > _MANY_CALLS and self._step >= _FIRST_STEPS:
            self._full = True
        return self._full

    def _describe(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a record ``call`` from its arguments by their names."""
        every = [tensor for value in given.values() for tensor in _tensors(value)]
        self._probe.tell("message", every)
        message = next((given[key] for key in _MESSAGES if key in given), None)
        tensors = list(_tensors(message))
        first = tensors[0] if tensors else None
        group = None if name in ("new_group", "init_process_group") else given.get("group")
        members, group_name = _members(group)
        found = {} if name != "init_process_group" else {"world": _asked_world(given)}
        return found | {
            "op": getattr(given.get("op"), "name", None),
            "size": _world() if members is None else len(members),
            "group": None if members is None else [group_name, members],
            "bytes": sum(one.numel() * one.element_size() for one in tensors),
            "dtype": None if first is None else str(first.dtype).removeprefix("torch."),
            "shape": None if first is None else list(first.shape),
            "tensors": len(tensors),
            "peer": _peer(name, given, group),
            "async": bool(given.get("async_op")) or name in ("isend", "irecv"),
            "content": self._contents.content_of(every),
            "within": self._within(),
        }

    def _within(self) -> str | None:
        if self._probe.in_backward:
            return "backward"
        return "forward" if self._probe.forwards.training else None

    def _record_group(self, at: list[Any] | None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._probe.record("group", rank=rank, world=world, backend=dist.get_backend(), at=at)


def _in_own_thread() -> bool:
    """Return whether this is a thread that the script started: not the main one, nor autograd's."""
    thread = threading.current_thread()
    of_torch = isinstance(thread, threading._DummyThread)
    return thread is not threading.main_thread() and not of_torch


def _watch_meshes(probe: Probe) -> None:
    """Record DeviceMesh: what is built on it communicates through functions that are not seen."""
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    if mesh is None or not inspect.isfunction(mesh.__init__):
        return
    original = mesh.__init__

    @functools.wraps(original)
    def recorded(self: Any, *arguments: Any, **named: Any) -> None:
        probe.record("mesh", at=probe.place())
        original(self, *arguments, **named)

    mesh.__init__ = recorded


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument: itself, or those of a list of (lists of) tensors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _asked_world(given: dict[str, Any]) -> int | None:
    """Return of how many ranks init_process_group is to make a group; None if nothing tells."""
    if given.get("world_size", -1) > 0:
        return int(given["world_size"])
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def _world() -> int | None:
    return dist.get_world_size() if dist.is_initialized() else None


def _members(group: Any) -> tuple[list[int] | None, str | None]:
    """Return a group's ranks and name; None for that of all ranks, none for one of others only."""
    if group is None or group is dist.group.WORLD:
        return None, None
    if dist.get_rank(group) < 0:
        return [], None
    return list(dist.get_process_group_ranks(group)), getattr(group, "group_name", None)


def _default_group() -> Any:
    return dist.group.WORLD


def _peer(name: str, given: dict[str, Any], group: Any) -> int | None:
    """Return the rank, among all ranks, that the arguments name as source or destination."""
    for one in ("src", "dst"):
        if given.get(one) is not None:
            return int(given[one])
        if given.get(f"group_{one}") is not None:
            return int(dist.get_global_rank(group or _default_group(), given[f"group_{one}"]))
    rooted = ("broadcast", "gather", "reduce", "scatter")
    return 0 if name.removesuffix("_list").removesuffix("_object") in rooted else None
