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
from torch.utils.weak import WeakIdKeyDictionary

from .sampling import dense, join, tensors_in
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
_LOOKING = "lab audit looks"  # the thread's name
_TICK_SECONDS = 0.5
_STANDS_TICKS = 6
_FEW = 16  # numbers of a metric
_IDLE_SHARE = 0.1  # of a core: a process that uses less waits for something


class CallRecorder:
    """Records the calls of this process, numbered from 0, and where it waits.

    _works : the number of the asynchronous call that returned each Work.
    _summed : a number for each tensor that is summed over the ranks.
    _open : by thread, the number and the name of the call that it is in.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._works: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._summed: Any = WeakIdKeyDictionary()
        self._summed_numbers = itertools.count()
        self._open: dict[int, tuple[Any, Any]] = {}
        # The functions are replaced wherever torch.distributed holds them.
        calls = {}  # by original
        for name, function in vars(sys.modules[f"{_PACKAGE}.distributed_c10d"]).items():
            if name.startswith(_BEGINNINGS) and type(function) is FunctionType:
                calls[function] = wrapped(function, self.call)
        for module_name, module in list(sys.modules.items()):
            if not module_name.startswith(_PACKAGE):
                continue
            for name, function in list(vars(module).items()):
                if type(function) is FunctionType and function in calls:
                    put(module, name, calls[function])
        patch(dist.Work, wait=self.wait)
        patch(dist, destroy_process_group=self.leave)
        if hasattr(dist, "DeviceMesh"):
            # What is built on it communicates through functions that are not seen here.
            patch(dist.DeviceMesh, __init__=functools.partial(probe.note, "mesh"))

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function between a record ``call`` and a record ``done``.

        A call within another one of the same thread is only passed on.
        """
        if threading.get_ident() in self._open:
            return original(*args, **kwargs)
        name = original.__name__
        number = next(self._numbers)
        if name == "init_process_group":
            looking = any(thread.name == _LOOKING for thread in threading.enumerate())
            if not looking:  # as in a forked process, whose parent has such a thread
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

    def leave(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Tell that the script is ending, before Python clears the model and the optimiser."""
        self._probe.tell("ending")
        return original(*args, **kwargs)

    def _timed(
        self, number: int, field: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return what the function returns, and write a record ``done``.

        field : which of its fields gets the time: "seconds" of a call, "wait_seconds" of a wait.
        """
        began = time.monotonic()
        error = None
        thread = threading.current_thread()
        # autograd's threads are unknown to Python
        own = thread is not threading.main_thread() and type(thread) is not threading._DummyThread
        self._open[threading.get_ident()] = (number, function.__name__)
        try:
            return function(*args, **kwargs)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:300]
            raise
        finally:
            self._open.pop(threading.get_ident(), None)
            # ``seconds`` is 0 in the record of a wait
            times = {"seconds": 0.0, field: time.monotonic() - began}
            self._probe.record("done", c=number, **times, own_thread=own, error=error)

    def _describe(self, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the fields of a record ``call`` from its arguments by their names."""
        name = function.__name__
        given = named(function, args, kwargs)
        every = list(tensors_in(list(given.values())))
        self._probe.tell("communicate", every)
        message = _message(given)
        group: Any = given.get("group") or dist.group.WORLD  # None before init_process_group
        # -1 if this rank is no member
        size = None if group is None else max(dist.get_world_size(group), 0)
        dtype = shape = None
        if message:
            dtype = str(message[0].dtype).split(".")[-1]
            shape = list(message[0].shape)
        content, parameter = self._content(every)
        return {
            "world": _world_size(given),
            "meets": _meeting_point(given) if name == "init_process_group" else None,
            "op": getattr(given.get("op"), "name", None),
            "size": size,
            "group": _new_members(given) if name == "new_group" else _subgroup(group),
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in message),
            "dtype": dtype,
            "shape": shape,
            "peer": _peer(name, given, group),
            "async": bool(given.get("async_op")) or name in ("isend", "irecv"),
            "content": content,
            "parameter": parameter,
            "within": self._pass_under_way(),
            **(self._summand(given, message) if content == "other" else {}),
        }

    def _summand(self, given: dict[str, Any], message: list[torch.Tensor]) -> dict[str, Any]:
        """Return which tensor is to be summed over all ranks, and its numbers if these are few."""
        is_sum = given.get("op") == dist.ReduceOp.SUM and "tensor" in given
        if not is_sum or given.get("group") not in (None, dist.group.WORLD):
            return {}
        tensor = message[0]
        if tensor.numel() > _FEW or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return {}
        number = self._summed.setdefault(tensor, next(self._summed_numbers))
        return {"tensor": number, "values": list(join([dense(tensor)]))}

    def _pass_under_way(self) -> str | None:
        """Return "backward", or "forward" of a model that trains, or None."""
        if self._probe.in_backward:
            return "backward"
        return "forward" if self._probe.forwards.training else None

    def _content(self, tensors: list[torch.Tensor]) -> tuple[str, int | None]:
        """Return whether the tensors share memory with a gradient or weights; "other" if not.

        With it the number of the first parameter of a gradient; None if it has none.
        """
        sought = {storage_of(tensor) for tensor in tensors} - {None}
        if not sought:
            return "other", None
        gradients = self._probe.gradients
        parameters = list(gradients.known.keys())
        for parameter in parameters:
            if parameter.grad is not None and storage_of(parameter.grad) in sought:
                return "gradient", gradients.serials.get(parameter)
        is_weight = any(storage_of(parameter) in sought for parameter in parameters)
        return "weights" if is_weight else "other", None

    def _look(self) -> None:
        """Run in a thread: see where the other threads stand, without end.

        Writes ``stands`` once each time that this process has waited for others for some ticks, and
        ``stack`` once the audit asks for it by the file "dump".
        """
        used = time.process_time()
        written = 0
        ticks = 0
        has_dumped = False
        while True:
            time.sleep(_TICK_SECONDS)
            if not has_dumped and (self._probe.folder / "dump").exists():
                has_dumped = True
                main = threading.main_thread().ident or 0
                frames = traceback.walk_stack(sys._current_frames().get(main))
                self._probe.record("stack", at=self._probe.place(frames))
            before = used
            used = time.process_time()
            idle = used - before < _IDLE_SHARE * _TICK_SECONDS and written == self._probe.written
            # Only where nothing happens: frames keep alive what the script frees.
            at = self._waiting_at() if idle else None
            ticks = 0 if at is None else ticks + 1
            if ticks == _STANDS_TICKS:
                calls = list(self._open.values())
                number, name = calls[-1] if calls else (None, None)
                self._probe.record("stands", c=number, name=name, at=at)
            written = self._probe.written

    def _waiting_at(self) -> list[Any] | None:
        """Return the script's line where a thread is within a function that communicates."""
        for thread, frame in sys._current_frames().items():
            name = frame.f_code.co_filename
            if thread != threading.get_ident() and any(part in name for part in _WAITING_IN):
                return self._probe.place(traceback.walk_stack(frame))
        return None


def _message(given: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call gives, or what it gets if it gives none."""
    for name in _MESSAGES:
        if name in given:
            return list(tensors_in(given[name]))
    return []


def _world_size(given: dict[str, Any]) -> int | None:
    """Return the number of ranks that a call or, as in torch, else the environment asks for."""
    size = int(given.get("world_size") or -1)
    if size > 0:
        return size
    return int(os.environ.get("WORLD_SIZE", 0)) or None


def _meeting_point(given: dict[str, Any]) -> str | None:
    """Return where init_process_group meets the other ranks; None for a store of the script."""
    if given.get("store") is not None:
        return None
    method = given.get("init_method") or "env://"
    if method != "env://":
        return str(method)
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _subgroup(group: Any) -> list[Any] | None:
    """Return the name and the ranks of a group; no ranks if this one is no member.

    None for the group of all ranks.
    """
    if group is dist.group.WORLD:
        return None
    is_member = dist.get_rank(group) >= 0
    members = list(dist.get_process_group_ranks(group)) if is_member else []
    return [getattr(group, "group_name", None), members]


def _new_members(given: dict[str, Any]) -> list[Any] | None:
    """Return no name and the ranks of a group that is about to be made; None if these are all."""
    ranks = given.get("ranks")
    return None if ranks is None else [None, sorted(map(int, ranks))]


def _peer(name: str, given: dict[str, Any], group: Any) -> int | None:
    """Return the rank, among all ranks, that the arguments name as source or destination.

    None if they name none, as in an all-reduce or a receive from any rank.
    """
    for argument in ("src", "dst"):
        if given.get(argument) is not None:
            return int(given[argument])
    for argument in ("group_src", "group_dst"):
        if given.get(argument) is not None:
            return int(dist.get_global_rank(group, given[argument]))
    # torch's default is rank 0; a reduce_scatter is no reduce
    kind = "reduce_scatter" if name.startswith("reduce_scatter") else name.split("_")[0]
    return 0 if kind in ("broadcast", "gather", "reduce", "scatter") else None


def watch(probe: Probe) -> None:
    """Replace the functions; do nothing where torch was built without torch.distributed."""
    if dist.is_available():
        CallRecorder(probe)
