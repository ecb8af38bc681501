"""Faster steps: a step as one CUDA graph, recorded once and replayed with one call.

An eager step of a small network launches hundreds of kernels, and Python can take longer to launch
them than the GPU to run them. A graph replays them all, in the same memory. A replay runs no
Python: whatever changes from step to step (inputs, labels, learning rate) is written into tensors
that the recorded kernels read, and the outcome is copied from a tensor that they write. Each replay
reads the random generator's seed (torch's notes on CUDA graphs).

``obstacle`` says why a training cannot be captured; the engine calls ``CapturedStep`` where it can.
``compile_for``, a method of ``TrainingEngine``, compiles the model; both may be used together.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from common.errors import UserError, first_line
from common.sync.none import NoSync
from common.training_engine.amp import autocast
from common.training_engine.evaluation_loop import unwrap

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine

Body = Callable[[Tensor, Tensor], Tensor]
Record = Callable[[Callable[[], None]], Callable[[], None]]

_WARM_UP_STEPS = 3
"""Steps before the recording: libraries choose their algorithms and take their workspaces."""


def compile_for(engine: "TrainingEngine", inputs: Tensor, labels: Tensor) -> None:
    """Compile forward and backward of training for batches like this one; change nothing else.

    Later batches of another shape, and evaluations, run without the compiled code. Raises UserError
    if torch cannot compile the model.
    """
    from torch._dynamo.utils import counters  # slow to import

    devices = [engine.device] if engine.device.type == "cuda" else []
    graphs = counters["stats"]["unique_graphs"]
    engine.compiles, began = False, time.perf_counter()
    model = unwrap(engine.model)
    model.compile(dynamic=False)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices), engine.sync.no_sync():
            with autocast(engine.device, engine.amp_dtype):
                loss = engine.criterion(engine.model(inputs), labels)
            engine.scaler.scale(loss).backward()
        loss.item()  # waits for the GPU
    except Exception as error:  # of Dynamo, Inductor, Triton or a C++ compiler
        raise UserError(
            f"torch could not compile the model ({type(error).__name__}: {first_line(error)}): "
            "leave out --compile (compile_model)"
        ) from error
    for buffer, before in buffers:
        buffer.copy_(before)
    engine.optimizer.zero_grad(set_to_none=True)
    torch.compiler.set_stance("eager_on_recompile")
    engine.compile_seconds = time.perf_counter() - began
    if counters["stats"]["unique_graphs"] == graphs:
        engine.notice(
            "torch.compile compiled nothing of this model: torch before 2.14 leaves out a bare "
            "nn.Sequential, so put it into a module of your own"
        )


def release(engine: "TrainingEngine") -> None:
    """Forget the recorded step and the compiled code: the next evaluation would compile again."""
    engine.captured = None
    if engine.compile_seconds:
        torch.compiler.set_stance("default")
        unwrap(engine.model)._compiled_call_impl = None


def obstacle(engine: "TrainingEngine") -> str:
    """Return why the engine's steps cannot be captured; "" if they can. Call ``prepare`` first."""
    if engine.device.type != "cuda":
        return "CUDA graphs need a GPU"
    if not isinstance(engine.sync, NoSync):
        return f"{type(engine.sync).__name__} exchanges gradients within the step"
    if engine.accumulation_steps > 1:
        return "a step has several micro-batches"
    if engine.timeline is not None or engine.emulation is not None:
        return "messages or emulated layers are timed"
    if not (isinstance(engine.optimizer, SGD) and engine.optimizer.defaults["fused"]):
        return "the optimiser is not SGD(fused=True)"
    return ""


def record_on_gpu(body: Callable[[], None]) -> Callable[[], None]:
    """Record what ``body`` launches, without running it; return the function that replays it."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, e.g. the one that writes checkpoints, may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph.replay


class CapturedStep:
    """Forward, backward and update of one micro-batch.

    The first three steps run eagerly, on a side stream, as torch requires before a recording. The
    next step is recorded and replayed.

    Parameters
    ----------
    body : called with inputs and labels; trains and returns a tensor of the step's numbers.
    optimizer : reads its learning rates from tensors while ``body`` runs.
    record : see ``record_on_gpu``.
    """

    def __init__(self, body: Body, optimizer: Optimizer, record: Record = record_on_gpu) -> None:
        self._body, self._optimizer, self._record = body, optimizer, record
        self._batch: tuple[Tensor, Tensor] | None = None
        self._warm_up_left = _WARM_UP_STEPS
        self._replay: Callable[[], None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def fits(self, inputs: Tensor, labels: Tensor) -> bool:
        """Whether the batch has the recorded shapes and types, and the optimiser its settings.

        Before the recording every batch fits; one of another shape begins the warm-up again.
        """
        same = self._batch is not None and self._is_like_the_last(inputs, labels)
        if not same and self._replay is None:
            self._batch = (torch.empty_like(inputs), torch.empty_like(labels))
            self._rates = [
                torch.zeros((), device=inputs.device) for _ in self._optimizer.param_groups
            ]
            self._settings, self._warm_up_left = self._current_settings(), _WARM_UP_STEPS
            return True
        return same

    def _is_like_the_last(self, inputs: Tensor, labels: Tensor) -> bool:
        assert self._batch is not None
        return self._settings == self._current_settings() and all(
            (one.shape, one.dtype, one.stride()) == (static.shape, static.dtype, static.stride())
            for one, static in zip((inputs, labels), self._batch, strict=True)
        )

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Train on a batch that ``fits``; return the step's numbers, a tensor of their own."""
        assert self._batch is not None  # ``fits`` has seen the batch
        for static, given in zip(self._batch, (inputs, labels), strict=True):
            static.copy_(given)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        if self._warm_up_left:
            self._warm_up_left -= 1
            with self._side_stream(inputs.device), self._rates_as_tensors():
                self._run_body()
        else:
            if self._replay is None:
                self._replay = self._recorded()
            self._replay()
        return self._numbers.clone()  # the next replay overwrites them

    def _recorded(self) -> Callable[[], None]:
        try:
            with self._rates_as_tensors():
                return self._record(self._run_body)
        except RuntimeError as error:
            raise UserError(
                f"the training step could not be recorded as a CUDA graph ({first_line(error)}): "
                "give --capture off (capture=False)"
            ) from error

    def _run_body(self) -> None:
        assert self._batch is not None
        self._numbers = self._body(*self._batch)

    @contextmanager
    def _rates_as_tensors(self) -> Iterator[None]:
        """Give the optimiser its learning rates as tensors: a graph would keep a number."""
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number

    def _current_settings(self) -> list[dict[str, Any]]:
        """Return the optimiser's settings that a graph keeps as they were: all but the rates."""
        changing = ("params", "lr", "initial_lr")
        return [
            {name: value for name, value in group.items() if name not in changing}
            for group in self._optimizer.param_groups
        ]

    @contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":  # in tests
            yield
            return
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)
