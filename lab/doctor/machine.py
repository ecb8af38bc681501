"""Checks of this machine alone: Python, torch, GPUs, cores, memory, open files, and what ``lab cluster`` needs.

Each check takes the CheckRequest and returns one CheckResult. torch is imported once, by ``torch_facts``.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from dataclasses import dataclass
from functools import cache

import psutil

from common.utils.system import missing_features, usable_cores
from lab.cluster import tools
from lab.doctor.check_result import CheckRequest, CheckResult, failure, ok, warning

_OLDEST_PYTHON = (3, 11)
_LEAST_MEMORY = 1_500_000_000
_LEAST_SHARED_MEMORY = 256_000_000
_FILES_BESIDE, _FILES_A_NODE = 256, 4


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself and the machine; ``error`` is set, and nothing else, where it cannot be imported."""

    error: str | None = None
    cuda_build: str | None = None
    gpus: tuple[str, ...] = ()
    nccl: str | None = None
    fast_bf16: bool = False


@cache
def torch_facts() -> TorchFacts:
    """Import torch and torchvision (seconds) and return what they say."""
    try:
        import torch
        import torchvision  # noqa: F401 - fails where the pair does not match

        from common.training_engine.amp import cpu_has_fast_bf16
    except Exception as error:  # a broken installation raises anything
        return TorchFacts(
            error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    nccl = (
        ".".join(map(str, torch.cuda.nccl.version()))
        if gpus and torch.distributed.is_nccl_available()
        else None
    )
    return TorchFacts(None, torch.version.cuda, gpus, nccl, cpu_has_fast_bf16())


def package_version(package: str) -> str | None:
    """Return the version of an installed package, None where it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(_request: CheckRequest) -> CheckResult:
    """Which Python runs this."""
    text = f"Python {platform.python_version()}, {sys.executable}"
    if sys.version_info < _OLDEST_PYTHON:
        return failure(
            "python",
            text,
            "install Python 3.11 or later, then e.g. make clean && make PYTHON=python3.12 setup",
        )
    return ok("python", text)


def check_system(_request: CheckRequest) -> CheckResult | None:
    """What this system lacks; nothing on Linux."""
    missing = missing_features()
    if not missing:
        return None
    return warning(
        "system", " ".join(missing), "for measurements and lab cluster, use Linux or WSL2"
    )


def check_torch(_request: CheckRequest) -> CheckResult:
    """torch and torchvision are there and belong together."""
    torch, vision, facts = package_version("torch"), package_version("torchvision"), torch_facts()
    text = f"torch {torch or 'missing'}, torchvision {vision or 'missing'}"
    if facts.error is None:
        return ok("torch", f"{text}: a pair that can be imported")
    if torch is None or vision is None:
        return failure(
            "torch",
            text,
            "install both in one command: pip install torch torchvision, or make setup",
        )
    if re.search("torchvision|operator|undefined symbol|custom C", facts.error):
        return failure(
            "torch",
            f"{text} do not match ({facts.error})",
            "install both in one command: pip install --upgrade torch torchvision",
        )
    return failure(
        "torch",
        f"{text} cannot be imported ({facts.error})",
        "install them again: make clean setup",
    )


def check_gpus(_request: CheckRequest) -> CheckResult:
    """What torch can compute on."""
    facts = torch_facts()
    if facts.error is not None:
        return warning(
            "gpu", "not looked at, since torch cannot be imported", "see the line on torch"
        )
    if facts.gpus:
        if facts.nccl is None:
            return warning(
                "gpu",
                f"{len(facts.gpus)} x {facts.gpus[0]}, but this torch has no NCCL: ranks "
                "would use Gloo, on CPUs",
                "install a torch with NCCL: pip install --upgrade torch torchvision",
            )
        return ok(
            "gpu",
            f"{len(facts.gpus)} x {facts.gpus[0]}, CUDA {facts.cuda_build}, NCCL {facts.nccl}: one rank a GPU",
        )
    if shutil.which("nvidia-smi") is None:
        return ok("gpu", "none: ranks train on CPUs, with Gloo")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return warning(
            "gpu",
            f"none can be seen with CUDA_VISIBLE_DEVICES={hidden!r}",
            "unset CUDA_VISIBLE_DEVICES",
        )
    build = f"CUDA {facts.cuda_build}" if facts.cuda_build else "for CPUs"
    return warning(
        "gpu",
        f"the driver is there, but torch ({build}) sees no GPU",
        "run nvidia-smi: where it shows a GPU, install a torch for the CUDA version that it names",
    )


def check_cores(request: CheckRequest) -> CheckResult:
    """Cores that this process may use, and whether the environment asks for more threads."""
    cores, facts = usable_cores(), torch_facts()
    of_all = f" of {os.cpu_count()}" if os.cpu_count() != cores else ""
    bf16 = (
        ""
        if facts.error is not None
        else (", fast bf16" if facts.fast_bf16 else ", no fast bf16: AMP stays off on CPUs")
    )
    text = f"{cores} usable cores{of_all}{bf16}"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        return warning(
            "cpu",
            f"{text}; OMP_NUM_THREADS={threads} asks for more threads than cores",
            f"unset OMP_NUM_THREADS, or give --threads {cores} at most",
        )
    return ok("cpu", text)


def check_memory(_request: CheckRequest) -> CheckResult:
    """Memory that is free, and shared memory, which containers keep small."""
    free = psutil.virtual_memory().available
    text = f"{free / 1e9:.1f} GB free"
    if free < _LEAST_MEMORY:
        return warning(
            "memory",
            f"{text}; a rank of VGG-11 takes about 1 GB",
            "end other processes, or start fewer ranks here",
        )
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        text += f", {shared / 1e9:.1f} GB in /dev/shm"
        if shared < _LEAST_SHARED_MEMORY:
            return warning(
                "memory",
                f"{text}, through which NCCL passes data between GPUs",
                "start the container with --shm-size=1g",
            )
    return ok("memory", text)


def check_open_files(request: CheckRequest) -> CheckResult:
    """Sockets and files that a process may hold: Gloo needs a few for each other rank."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_BESIDE + _FILES_A_NODE * (request.num_nodes or 1)
    if limit != resource.RLIM_INFINITY and limit < needed:
        return warning(
            "open files",
            f"{limit} a process, {needed} may be needed",
            f"ulimit -n {max(needed, 4096)}",
        )
    return ok("open files", f"{'no limit' if limit == resource.RLIM_INFINITY else limit} a process")


def check_cluster_tools(_request: CheckRequest) -> CheckResult:
    """Whether ``lab cluster`` can make nodes of namespaces on this machine."""
    refused = tools.namespaces_refused()
    if refused is not None:
        return warning(
            "lab cluster",
            "cannot make nodes with links of their own here (the parts don't need it)",
            refused,
        )
    if not tools.has_tbf():
        return warning(
            "lab cluster",
            "the kernel cannot limit a link's rate (sch_tbf)",
            "sudo modprobe sch_tbf, or leave --rate out",
        )
    netem = "" if tools.has_netem() else "; no --latency: the kernel lacks netem"
    return ok("lab cluster", f"ip, tc and unshare are there, namespaces are allowed{netem}")
