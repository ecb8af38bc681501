"""What the measuring programs share: the device, times, GEMM rates."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flag that every measuring program has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    return made


def choose_device(dry_run: bool) -> torch.device:
    """Return the GPU, or the CPU for a dry run."""
    return torch.device("cpu" if dry_run else "cuda:0")


def wait(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    action: Callable[[], Any], device: torch.device, *, calls: int = 10, rounds: int = 5
) -> float:
    """Return the median seconds of one call over ``rounds`` rounds of ``calls`` calls each."""
    if device.type == "cpu":
        calls = rounds = 1
    action()
    action()
    times = []
    for _ in range(rounds):
        wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            action()
        wait(device)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


def kernel_seconds_of(action: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of the kernels that ``action`` launches, without Python's time.

    On a GPU the action is recorded as a CUDA graph, whose replays are timed: launching a small
    layer from Python can take longer than its kernels do. It must leave its tensors where they are.
    """
    if device.type == "cpu":
        return seconds_of(action, device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries choose their algorithms and take their workspaces
            action()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return seconds_of(graph.replay, device)  # ``action`` is alive, so its tensors are, too


def gemm_rate(dtype: torch.dtype, device: torch.device, *, tf32: bool = False) -> float:
    """Return the operations per second of a square matrix product, 8192 x 8192 on a GPU."""
    size = 8192 if device.type == "cuda" else 64
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = seconds_of(lambda: left @ right, device)
    torch.set_float32_matmul_precision("highest")
    return 2 * size**3 / seconds
