"""Checks of this machine alone: packages, GPUs, cores, memory, open files, ``lab cluster``'s needs.

Each check takes the CheckRequest and returns one CheckResult. ``torch_facts`` alone imports torch.
"""

import contextlib
import os
import platform
import re
import resource
import shutil
import sys
from dataclasses import dataclass
from functools import cache

import psutil

from common.utils.environment import package_version
from common.utils.system import missing_features, usable_cores
from lab.cluster import tools
from lab.doctor.check_result import CheckRequest, CheckResult, failure, ok, warning

_LEAST_MEMORY = 1_500_000_000
_LEAST_SHARED_MEMORY = 256_000_000
_FILES_BESIDE, _FILES_A_NODE = 256, 4


@dataclass(frozen=True)
class TorchFacts:
    """What torch reports; only ``error`` is set if it cannot be imported."""

    error: str | None = None
    cuda_build: str | None = None
    gpus: tuple[str, ...] = ()
    nccl: str | None = None
    fast_bf16: bool | None = None


@cache
def torch_facts() -> TorchFacts:
    """Import torch and torchvision, which takes seconds, and return what they report."""
    try:
        import torch
        import torchvision  # noqa: F401 - fails where the pair does not match

        from common.training_engine.amp import cpu_has_fast_bf16
    except Exception as error:  # a broken installation raises anything
        first_line = str(error).strip().partition("\n")[0]
        return TorchFacts(error=f"{type(error).__name__}: {first_line}")
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    has_nccl = gpus and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return TorchFacts(None, torch.version.cuda, gpus, nccl, cpu_has_fast_bf16())


def check_python(_request: CheckRequest) -> CheckResult:
    """Report which Python runs this."""
    return ok("python", f"Python {platform.python_version()}, {sys.executable}")


def check_system(_request: CheckRequest) -> CheckResult | None:
    """Report what this system lacks; None on Linux."""
    missing = " ".join(missing_features())
    remedy = "for measurements and lab cluster, use Linux or WSL2"
    return warning("system", missing, remedy) if missing else None


def check_torch(_request: CheckRequest) -> CheckResult:
    """Check that torch and torchvision are there and match."""
    versions = {name: package_version(name) for name in ("torch", "torchvision")}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    facts = torch_facts()
    if facts.error is None:
        return ok("torch", f"{text}: a pair that can be imported")
    if None in versions.values():
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
    """Report what torch can compute on."""
    facts = torch_facts()
    if facts.error is not None:
        return warning(
            "gpu", "not looked at, since torch cannot be imported", "see the line on torch"
        )
    if facts.gpus:
        gpus = f"{len(facts.gpus)} x {facts.gpus[0]}"
        if facts.nccl is not None:
            build = f"CUDA {facts.cuda_build}, NCCL {facts.nccl}"
            return ok("gpu", f"{gpus}, {build}: one rank a GPU")
        return warning(
            "gpu",
            f"{gpus}, but this torch has no NCCL: ranks would use Gloo, on CPUs",
            "install a torch with NCCL: pip install --upgrade torch torchvision",
        )
    if shutil.which("nvidia-smi") is None:
        return ok("gpu", "none: ranks train on CPUs, with Gloo")
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
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
    """Check that the environment does not ask for more threads than this process has cores."""
    cores = usable_cores()
    of_all = f" of {os.cpu_count()}" if os.cpu_count() != cores else ""
    bf16 = {True: ", fast bf16", False: ", no fast bf16: AMP stays off on CPUs", None: ""}
    text = f"{cores} usable cores{of_all}{bf16[torch_facts().fast_bf16]}"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        return warning(
            "cpu",
            f"{text}; OMP_NUM_THREADS={threads} asks for more threads than cores",
            f"unset OMP_NUM_THREADS, or give --threads {cores} at most",
        )
    return ok("cpu", text)


def check_memory(_request: CheckRequest) -> CheckResult:
    """Check that there is free memory, and shared memory, of which containers have little."""
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
    """Check how many files a process may hold: Gloo needs a few sockets for each other rank."""
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
    """Check whether ``lab cluster`` can make nodes of namespaces on this machine."""
    if (refused := tools.namespaces_refused()) is not None:
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
