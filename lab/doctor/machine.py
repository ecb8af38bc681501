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

from common.utils.environment import package_version, setting
from common.utils.system import missing_features, usable_cores
from lab.cluster import tools
from lab.doctor.check_result import FAILURE, OK, WARNING, CheckRequest, CheckResult

_LEAST_MEMORY = 1_500_000_000
_LEAST_SHARED_MEMORY = 256_000_000
_FILES_BESIDE, _FILES_A_NODE = 256, 4


@dataclass(frozen=True)
class TorchFacts:
    """What torch reports; only ``error`` is set if it cannot be imported."""

    error: str | None = None
    cuda_build: str | None = None
    gpus: tuple[str, ...] = ()
    gpu_ids: tuple[str, ...] = ()
    nccl: str | None = None
    fast_bf16: bool | None = None


@cache
def torch_facts() -> TorchFacts:
    """Import torch and torchvision, which takes seconds, and return what they report."""
    try:
        import torch
        import torchvision  # noqa: F401 - fails where the pair does not match

        from common.distributed.gpus import visible_gpus
        from common.training_engine.amp import cpu_has_fast_bf16
    except Exception as error:  # a broken installation raises anything
        first_line = str(error).strip().partition("\n")[0]
        return TorchFacts(error=f"{type(error).__name__}: {first_line}")
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    has_nccl = gpus and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    ids = tuple(visible_gpus())
    return TorchFacts(None, torch.version.cuda, gpus, ids, nccl, cpu_has_fast_bf16())


def check_python(_request: CheckRequest) -> CheckResult:
    """Report which Python runs this."""
    return CheckResult("python", OK, f"Python {platform.python_version()}, {sys.executable}")


def check_system(_request: CheckRequest) -> CheckResult | None:
    """Report what this system lacks; None if nothing, as on Linux."""
    missing = " ".join(missing_features())
    if not missing:
        return None
    return CheckResult(
        "system", WARNING, missing, "for measurements and lab cluster, use Linux or WSL2"
    )


def check_torch(_request: CheckRequest) -> CheckResult:
    """Check that torch and torchvision are installed and match."""
    versions = {name: package_version(name) for name in ("torch", "torchvision")}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    facts = torch_facts()
    if facts.error is None:
        return CheckResult("torch", OK, f"{text}: both can be imported")
    if None in versions.values():
        return CheckResult(
            "torch",
            FAILURE,
            text,
            "install both in one command: pip install torch torchvision, or make setup",
        )
    if re.search("torchvision|operator|undefined symbol|custom C", facts.error):
        return CheckResult(
            "torch",
            FAILURE,
            f"{text} do not match ({facts.error})",
            "install both in one command: pip install --upgrade torch torchvision",
        )
    return CheckResult(
        "torch",
        FAILURE,
        f"{text} cannot be imported ({facts.error})",
        "install them again: make clean setup",
    )


def check_gpus(_request: CheckRequest) -> CheckResult:
    """Report on which devices torch can compute."""
    facts = torch_facts()
    if facts.error is not None:
        return CheckResult(
            "gpu",
            WARNING,
            "not checked, because torch cannot be imported",
            "see the line about torch above",
        )
    if facts.gpus:
        gpus = f"{len(facts.gpus)} x {facts.gpus[0]}"
        if facts.nccl is not None:
            return CheckResult(
                "gpu", OK, f"{gpus}, CUDA {facts.cuda_build}, NCCL {facts.nccl}: one rank per GPU"
            )
        return CheckResult(
            "gpu",
            WARNING,
            f"{gpus}, but this torch has no NCCL: ranks would use Gloo, on CPUs",
            "install a torch with NCCL: pip install --upgrade torch torchvision",
        )
    if shutil.which("nvidia-smi") is None:
        return CheckResult("gpu", OK, "none: ranks train on CPUs, with Gloo")
    if (hidden := setting("CUDA_VISIBLE_DEVICES")) is not None:
        return CheckResult(
            "gpu",
            WARNING,
            f"torch sees none: CUDA_VISIBLE_DEVICES={hidden!r} hides them",
            "unset CUDA_VISIBLE_DEVICES",
        )
    build = f"built for CUDA {facts.cuda_build}" if facts.cuda_build else "built for CPUs"
    return CheckResult(
        "gpu",
        WARNING,
        f"nvidia-smi is installed, but torch ({build}) sees no GPU",
        "run nvidia-smi: if it lists a GPU, install a torch for the CUDA version that it shows",
    )


def check_cores(request: CheckRequest) -> CheckResult:
    """Check that the environment does not ask for more threads than this process has cores."""
    cores = usable_cores()
    of_all = f" of {os.cpu_count()}" if os.cpu_count() != cores else ""
    bf16 = {True: ", fast bf16", False: ", no fast bf16: AMP stays off on CPUs", None: ""}
    text = f"{cores} usable core{'s' * (cores != 1)}{of_all}{bf16[torch_facts().fast_bf16]}"
    threads = setting("OMP_NUM_THREADS") or ""
    if threads.isdecimal() and int(threads) > cores:
        return CheckResult(
            "cpu",
            WARNING,
            f"{text}; OMP_NUM_THREADS={threads} asks for more threads than cores",
            f"unset OMP_NUM_THREADS, or give --threads {cores} or fewer",
        )
    return CheckResult("cpu", OK, text)


def check_memory(_request: CheckRequest) -> CheckResult:
    """Check that there is enough free memory, and shared memory: containers often have little."""
    free = psutil.virtual_memory().available
    text = f"{free / 1e9:.1f} GB free"
    if free < _LEAST_MEMORY:
        return CheckResult(
            "memory",
            WARNING,
            f"{text}; one rank of VGG-11 needs about 1 GB",
            "end other processes, or start fewer ranks here",
        )
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        text += f", {shared / 1e9:.1f} GB in /dev/shm"
        if shared < _LEAST_SHARED_MEMORY:
            return CheckResult(
                "memory",
                WARNING,
                f"{text}, through which NCCL passes data between GPUs",
                "start the container with --shm-size=1g",
            )
    return CheckResult("memory", OK, text)


def check_open_files(request: CheckRequest) -> CheckResult:
    """Check how many files a process may open: Gloo needs a few sockets for each other rank."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_BESIDE + _FILES_A_NODE * (request.num_nodes or 1)
    if limit != resource.RLIM_INFINITY and limit < needed:
        return CheckResult(
            "open files",
            WARNING,
            f"limit {limit} per process, and a rank may need {needed}",
            f"ulimit -n {max(needed, 4096)}",
        )
    unlimited = limit == resource.RLIM_INFINITY
    return CheckResult("open files", OK, "no limit" if unlimited else f"limit {limit} per process")


def check_cluster_tools(_request: CheckRequest) -> CheckResult:
    """Check whether ``lab cluster`` can make nodes of namespaces on this machine."""
    if (refused := tools.namespaces_refused()) is not None:
        return CheckResult(
            "lab cluster",
            WARNING,
            "cannot emulate nodes on this machine (training does not need it)",
            refused,
        )
    if not tools.has_tbf():
        return CheckResult(
            "lab cluster",
            WARNING,
            "the kernel cannot limit a link's rate (sch_tbf)",
            "sudo modprobe sch_tbf, or run lab cluster without --rate",
        )
    netem = "" if tools.has_netem() else "; --latency has no effect: the kernel lacks netem"
    return CheckResult(
        "lab cluster", OK, f"ip, tc and unshare are installed, namespaces are allowed{netem}"
    )
