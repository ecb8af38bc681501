"""A GPU that is not there: CUDA tensors without memory, and a record of what makes the host wait.

``with fake_gpu() as gpu:`` lets the project's own code run with ``device="cuda"`` on any machine.
A CUDA tensor has a shape, a type and strides, but no values: what the host reads from it is zeros.
CPU tensors are real. ``gpu.faults`` lists each operation that waits for the GPU or mixes devices,
with the lines of the project that led to it.

Two things it cannot show: whether kernels compute the right numbers, and whether the backward pass
waits, since autograd does not run on these tensors.
"""

import contextlib
import traceback
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.paths import ROOT

COPY_TO_GPU = "copies from the host to the GPU"
READ_FROM_GPU = "reads from the GPU, which the host waits for"
SIZE_FROM_GPU = "returns as many values as the GPU finds, which the host waits for"
MIXES_DEVICES = "mixes tensors of the CPU and of the GPU"

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_LINES_SHOWN = 4


class Fault(NamedTuple):
    """An operation that waits for the GPU or mixes devices; place : the project's lines."""

    operation: str
    reason: str
    place: str

    def __str__(self):
        return f"{self.operation} {self.reason}\n{self.place}"


class FakeGPU(TorchDispatchMode):
    """Runs operations on CUDA tensors for their shapes only, and records those at fault.

    Every copy from the host is recorded: no memory is pinned where there is no GPU, and such a copy
    waits.
    """

    def __init__(self):
        super().__init__()
        self.faults: list[Fault] = []

    def record(self, operation, reason):
        """Add a fault of the code that is running."""
        self.faults.append(Fault(operation, reason, _lines_of_the_project()))

    def check(self):
        """Raise AssertionError that lists the faults, each once, if there are any."""
        assert not self.faults, "\n".join(dict.fromkeys(map(str, self.faults)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if torch.is_inference_mode_enabled():  # operations come whole: check their parts
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {"cuda" if isinstance(tensor, FakeTensor) else "cpu" for tensor in tensors}
        asked = kwargs.get("device")
        targets = devices | ({torch.device(asked).type} if asked else set())
        if "cuda" not in targets:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        reason = _fault(func, args, devices=devices, targets=targets)
        if reason:
            is_item = func is _aten._local_scalar_dense.default
            self.record("Tensor.item" if is_item else str(func), reason)
        if reason == READ_FROM_GPU:
            return _zeros_read(func, args, kwargs)
        if not func._schema.returns:  # only changes values, which there are none of
            return None
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if not reason:
                raise
            raise AssertionError(str(self.faults[-1])) from error


def _fault(func, args, *, devices, targets):
    """Return why the operation waits or mixes devices; "" if it does not.

    devices : of its tensors. targets : these, and the one that it is asked for.
    """
    if func in _COPIES and len(targets) > 1:
        source = args[1] if func is _aten.copy_.default else args[0]
        return READ_FROM_GPU if isinstance(source, FakeTensor) else COPY_TO_GPU
    # ``x[1:] = 0`` fills with a CPU tensor of no dimension, whose value the host knows.
    if len(devices) > 1 and func is not _aten.fill_.Tensor:
        return MIXES_DEVICES
    if func in _INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
        return SIZE_FROM_GPU if masks else ""
    if torch.Tag.dynamic_output_shape in func.tags:
        return SIZE_FROM_GPU
    return READ_FROM_GPU if torch.Tag.data_dependent_output in func.tags else ""


def _zeros_read(func, args, kwargs):
    """Return zeros on the host in place of what the operation reads."""
    with unset_fake_temporarily():
        if func is _aten.copy_.default:
            return args[0].zero_()
        if func is _aten._to_copy.default:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return torch.zeros((), dtype=args[0].dtype).item()


def _lines_of_the_project():
    """Return the lines that lead to the current operation, the innermost first."""
    folders = tuple(f"{ROOT / name}/" for name in ("common", "lab", "tests"))
    lines = [
        f"  {frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno} {frame.name}: {frame.line}"
        for frame in traceback.extract_stack()
        if frame.filename.startswith(folders) and frame.filename != __file__
    ]
    return "\n".join(lines[: -_LINES_SHOWN - 1 : -1])


def _fill_gradients(loss):
    """Give every parameter that ``loss`` depends on a gradient, in place of ``Tensor.backward``."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            parameter.grad = torch.empty_like(parameter)
            for hook in (parameter._backward_hooks or {}).values():
                hook(parameter.grad)


@contextlib.contextmanager
def fake_gpu():
    """Let ``device="cuda"`` mean a fake GPU in the block, even where there is a real one."""
    gpu = FakeGPU()
    # A CUDA event, stream or graph needs a driver. Every moment is the same; a graph is recorded by
    # running its operations, and its replay does nothing.
    of_the_driver = mock.Mock(elapsed_time=lambda _end: 0.0)
    of_the_driver.synchronize = lambda *_: gpu.record("synchronize", READ_FROM_GPU)
    stubs = {
        "torch.cuda.is_available": lambda: False,
        "torch.cuda.is_bf16_supported": lambda **_: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.cuda.synchronize": of_the_driver.synchronize,
        "torch.cuda.stream": lambda *_, **_options: contextlib.nullcontext(),
        "torch.cuda.graph": lambda *_, **_options: contextlib.nullcontext(),
        "torch.Tensor.backward": _fill_gradients,
        # FakeTensorMode keeps weak references to tensors, and Module.to() refuses such tensors.
        "torch.utils.weakref.getweakrefs": lambda _: [],
    }
    for name in ("Event", "Stream", "CUDAGraph", "current_stream"):
        stubs[f"torch.cuda.{name}"] = lambda *_, **_options: of_the_driver
    with contextlib.ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch(name, stub))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu)
        yield gpu
