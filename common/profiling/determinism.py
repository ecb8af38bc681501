"""Runs that repeat bit for bit on a GPU (torch's documentation: Reproducibility).

Call ``choose_algorithms`` before the first CUDA call; ``cost`` measures how much slower
deterministic algorithms are. A CPU run repeats without them, given the same number of threads.
"""

import copy
import os
import statistics
import time

import torch
from torch import Tensor, nn

_REPEATS = 8


def choose_algorithms(device: torch.device, *, deterministic: bool) -> None:
    """Let cuDNN search for the fastest algorithms, or make torch use deterministic ones."""
    if device.type != "cuda":
        return
    if deterministic:
        # Before the first CUDA call, since cuBLAS reads it only once.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def cost(
    model: nn.Module, images: Tensor, labels: Tensor, *, amp_dtype: torch.dtype | None
) -> float:
    """Return the ratio of forward and backward time with deterministic algorithms to without.

    The ratio is one of medians, measured in turns on a copy of the model, so that training is
    unaffected. GPU only. Leaves deterministic algorithms switched on.
    """
    trial = copy.deepcopy(model).train()
    state = torch.get_rng_state()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(_REPEATS + 2):
        for deterministic in (False, True):
            choose_algorithms(images.device, deterministic=deterministic)
            torch.cuda.synchronize()
            began = time.perf_counter()
            enabled = amp_dtype is not None
            with torch.autocast(images.device.type, dtype=amp_dtype, enabled=enabled):
                loss = nn.functional.cross_entropy(trial(images), labels)
            loss.backward()
            torch.cuda.synchronize()
            if repeat >= 2:
                seconds[deterministic].append(time.perf_counter() - began)
    torch.set_rng_state(state)
    return statistics.median(seconds[True]) / statistics.median(seconds[False])
