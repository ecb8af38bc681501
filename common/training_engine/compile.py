"""Compile an engine's model with ``torch.compile``, and forget the compiled code at the end."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from common.errors import UserError, first_line
from common.training_engine.amp import autocast
from common.training_engine.batches import MicroBatch, count_samples, to_device
from common.training_engine.evaluation_loop import unwrap

if TYPE_CHECKING:
    from common.training_engine.engine import TrainingEngine


def compile_for(engine: "TrainingEngine", loader: Iterable[MicroBatch]) -> None:
    """Compile forward and backward for the loader's first batch, if asked for and not yet done.

    Changes nothing else. Later batches of another shape, and evaluations, run without the compiled
    code. Raises UserError if torch cannot compile the model.
    """
    if not engine.compiles:
        return
    from torch._dynamo.utils import counters  # slow to import

    engine.set_training_mode()
    with torch.random.fork_rng():  # a loader may draw
        batch = to_device(next(iter(loader)), engine.device)
    if not count_samples(batch):
        return
    graphs = counters["stats"]["unique_graphs"]
    engine.compiles = False
    began = time.perf_counter()
    model = unwrap(engine.model)
    model.compile(dynamic=False)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [engine.device] if engine.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), engine.sync.no_sync():
            with autocast(engine.device, engine.amp_dtype):
                loss = engine.forward(engine.model, batch).loss
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


def forget_compiled(engine: "TrainingEngine") -> None:
    """Forget the compiled code: the next evaluation would compile again."""
    if engine.compile_seconds:
        torch.compiler.set_stance("default")
        unwrap(engine.model)._compiled_call_impl = None
