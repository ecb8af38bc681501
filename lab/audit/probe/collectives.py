"""What the ranks tell each other: the records ``group``, ``mesh``, ``call``, ``done``, ``stands``.

The functions of torch.distributed are replaced by others of the same names, which write a record
before and after each call. A call inside another one, such as the all_gather in all_gather_object,
is not recorded. What C++ sends by itself, such as DistributedDataParallel, is not seen here; but a
rank that waits in it is, since a thread looks twice a second where the other threads stand.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .sampling import tensors_in
from .state import Probe, named, patch, put, storage_of, wrapped

# Of the names of the functions that communicate.
_BEGINNINGS = (
    *("all_", "barrier", "broadcast", "gather", "init_process_group", "irecv", "isend"),
    *("monitored_barrier", "new_group", "recv", "reduce", "scatter", "send"),
)
# The arguments that may hold what a rank gives, or what it receives if it gives nothing.
_MESSAGES = (
    *("input_tensor", "input", "input_list", "input_tensor_list", "tensor", "tensors", "inputs"),
    *("output", "output_tensor"),
)
_PACKAGE = "torch.distributed"
# The files whose Python frame is the innermost one while C++ communicates.
_WAITING_IN = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/", __file__)
_LOOKING, _TICK_SECONDS, _STANDS_TICKS = "lab audit looks", 0.5, 6
_IDLE_SHARE = 0.1  # of a core: a process that uses less waits for something


class CallRecorder:
    """Records the calls of this process, numbered from 0, and where it waits."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._works: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Any, Any]] = {}  # number and name of the call of each thread
        # The functions are replaced wherever torch.distributed holds them.
        calls = {
            function: wrapped(function, self.call)
            for name, function in vars(sys.modules[f"{_PACKAGE}.distributed_c10d"]).items()
            if name.startswith(_BEGINNINGS) and type(function) is FunctionType
        }
        for module in [one for name, one in sys.modules.items() if name.startswith(_PACKAGE)]:
            for name, function in list(vars(module).items()):
                if type(function) is FunctionType and function in calls:
                    put(module, name, calls[function])
        patch(dist.Work, "wait", self.wait)
        if hasattr(dist, "DeviceMesh"):
            # What is built on it communicates through functions that are not seen here.
            patch(dist.DeviceMesh, "__init__", functools.partial(probe.note, "mesh"))

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function between a record ``call`` and a record ``done``."""
        if threading.get_ident() in self._open:
            return original(*args, **kwargs)
        name, number = original.__name__, next(self._numbers)
        if name == "init_process_group" and all(
            one.name != _LOOKING
            for one in threading.enumerate()  # a forked process has no such
        ):
            threading.Thread(target=self._look, name=_LOOKING, daemon=True).start()
        fields = self._probe.guard(self._describe)(original, args, kwargs) or {}
        at = self._probe.place()
        self._probe.record("call", c=number, name=name, step=self._probe.step, **fields, at=at)
        result = self._timed(number, "seconds", original, args, kwargs)
        if isinstance(result, dist.Work):
            self._works[result] = number
        if name == "init_process_group":
            self._probe.record("group", rank=dist.get_rank(), world=dist.get_world_size(), at=at)
        return result

    def wait(self, original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        """See Work.wait, of an asynchronous call."""
        if work not in self._works:
            return original(work, *args, **kwargs)
        return self._timed(self._works[work], "wait_seconds", original, (work, *args), kwargs)

    def _timed(
        self, number: int, field: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return what the function returns, and record how long that took."""
        began, error, thread = time.monotonic(), None, threading.current_thread()
        # autograd's threads are unknown to Python
        own = thread is not threading.main_thread() and type(thread) is not threading._DummyThread
        self._open[threading.get_ident()] = number, function.__name__
        try:
            return function(*args, **kwargs)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:300]
            raise
        finally:
            self._open.pop(threading.get_ident(), None)
            seconds = {"seconds": 0.0, field: time.monotonic() - began}
            self._probe.record("done", c=number, **seconds, own_thread=own, error=error)

    def _describe(self, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the fields of a record ``call`` from its arguments by their names."""
        given = named(function, args, kwargs)
        every = list(tensors_in(list(given.values())))
        self._probe.tell("communicate", every)
        tensors = list(tensors_in(next((given[key] for key in _MESSAGES if key in given), None)))
        world = int(given.get("world_size") or -1)  # torch takes the variable's if it is -1
        whole: Any = dist.group.WORLD  # None before init_process_group
        group, members = given.get("group") or whole, None
        if group is not whole:  # this rank may be no member of it
            members = list(dist.get_process_group_ranks(group)) if dist.get_rank(group) >= 0 else []
        training = "forward" if self._probe.forwards.training else None
        return {
            "world": world if world > 0 else int(os.environ.get("WORLD_SIZE", 0)) or None,
            "op": getattr(given.get("op"), "name", None),
            "size": group and max(dist.get_world_size(group), 0),
            "group": None if members is None else [getattr(group, "group_name", None), members],
            "bytes": sum(one.numel() * one.element_size() for one in tensors),
            "dtype": str(tensors[0].dtype).split(".")[-1] if tensors else None,
            "shape": list(tensors[0].shape) if tensors else None,
            "peer": _peer(function.__name__, given, group),
            "async": bool(given.get("async_op")) or function.__name__ in ("isend", "irecv"),
            "content": self._content(every),
            "within": "backward" if self._probe.in_backward else training,
        }

    def _content(self, tensors: list[torch.Tensor]) -> str:
        """Return "gradient", "weights" or "other": which share their memory with the tensors."""
        sought = {storage_of(one) for one in tensors} - {None}
        known = list(self._probe.gradients.known.keys()) if sought else []
        if any(one.grad is not None and storage_of(one.grad) in sought for one in known):
            return "gradient"
        return "weights" if any(storage_of(one) in sought for one in known) else "other"

    def _look(self) -> None:
        """Write ``stands`` once for each time that this process waits for others, and ``stack``."""
        used, written, ticks, asked = time.process_time(), 0, 0, False
        while True:
            time.sleep(_TICK_SECONDS)
            if not asked and (self._probe.folder / "dump").exists():
                asked, main = True, threading.main_thread().ident or 0
                frames = traceback.walk_stack(sys._current_frames().get(main))
                self._probe.record("stack", at=self._probe.place(frames))
            before, used = used, time.process_time()
            idle = used - before < _IDLE_SHARE * _TICK_SECONDS and written == self._probe.written
            at = self._waiting_at() if idle else None  # frames keep alive what the script frees
            ticks = 0 if at is None else ticks + 1
            if ticks == _STANDS_TICKS:
                number, name = [(None, None), *self._open.values()][-1]
                self._probe.record("stands", c=number, name=name, at=at)
            written = self._probe.written

    def _waiting_at(self) -> list[Any] | None:
        """Return the script's line where a thread is within a function that communicates."""
        for thread, frame in sys._current_frames().items():
            name = frame.f_code.co_filename
            if thread != threading.get_ident() and any(part in name for part in _WAITING_IN):
                return self._probe.place(traceback.walk_stack(frame))
        return None


def _peer(name: str, given: dict[str, Any], group: Any) -> int | None:
    """Return the rank, among all ranks, that the arguments name as source or destination."""
    for one in ("src", "dst", "group_src", "group_dst"):
        if given.get(one) is not None:
            return int(
                dist.get_global_rank(group, given[one]) if one.startswith("group") else given[one]
            )
    rooted = name.split("_")[0] in ("broadcast", "gather", "reduce", "scatter")
    return 0 if rooted and not name.startswith("reduce_scatter") else None


def watch(probe: Probe) -> None:
    """Replace the functions; do nothing where torch was built without torch.distributed."""
    if dist.is_available():
        CallRecorder(probe)
