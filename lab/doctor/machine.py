"""Checks of this machine alone: packages, GPUs, cores, memory, disks, ``lab cluster``'s needs.

Each check takes the command's flags and returns its result; None if it does not apply. Only the
checks that need torch import it.
"""

import contextlib
import hashlib
import os
import platform
import resource
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from pkgutil import resolve_name

import psutil

from common.data import DATASETS
from common.errors import UserError, first_line
from common.say import bytes_text
from common.utils.environment import git, package_version, read_settings, setting
from common.utils.source_hash import code_digest
from common.utils.system import missing_features, usable_cores
from lab.cluster import tools
from lab.doctor.check_result import CheckResult, failure, ok, warning

_LEAST_MEMORY = 1_500_000_000
_LEAST_SHARED_MEMORY = 256_000_000
_FILES_BESIDE = 256  # that a rank may open besides its sockets
_FILES_A_NODE = 4  # sockets for each node
# A checkpoint of VGG-11 with SGD's momentum: two times 9,231,114 parameters of 4 bytes.
_CHECKPOINT_BYTES = 74_000_000
_ROOM_FOR = 20  # checkpoints; with less there is a warning


def check_python(_flags: Namespace) -> CheckResult:
    """Report which Python runs this."""
    return ok(f"Python {platform.python_version()}, {sys.executable}")


def check_system(_flags: Namespace) -> CheckResult | None:
    """Report what this system lacks; None if nothing, as on Linux."""
    missing = " ".join(missing_features())
    if not missing:
        return None
    return warning(missing, "for measurements and lab cluster, use Linux or WSL2")


def check_torch(_flags: Namespace) -> CheckResult:
    """Check that torch and torchvision can be imported together, which takes seconds."""
    try:
        import torchvision  # noqa: F401 - imports torch, and fails where the pair does not match
    except Exception as error:  # a broken installation raises anything
        return failure(
            f"{versions()}: no pair that can be imported ({type(error).__name__}: "
            f"{first_line(error)})",
            "install both in one command: pip install --upgrade torch torchvision, or make clean "
            "setup",
        )
    return ok(f"{versions()}: both can be imported")


def versions() -> str:
    """Return the versions of the packages that must be the same on all nodes."""
    names = ("torch", "torchvision")
    return ", ".join(f"{name} {package_version(name) or 'missing'}" for name in names)


def check_gpu(_flags: Namespace) -> CheckResult:
    """Report on which devices torch can compute."""
    import torch

    from common.training_engine.amp import cpu_has_fast_bf16

    if count := torch.cuda.device_count():
        gpus = f"{count} x {torch.cuda.get_device_name(0)}"
        if not torch.distributed.is_nccl_available():
            return warning(
                f"{gpus}, but this torch has no NCCL: ranks would use Gloo, on CPUs",
                "install a torch with NCCL: pip install --upgrade torch torchvision",
            )
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return ok(f"{gpus}, CUDA {torch.version.cuda}, NCCL {nccl}: one rank per GPU")
    if shutil.which("nvidia-smi") is None:
        bf16 = "fast bf16" if cpu_has_fast_bf16() else "no fast bf16: AMP stays off"
        return ok(f"none: ranks train on CPUs, with Gloo ({bf16})")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    return warning(
        f"nvidia-smi is installed, but torch (built for {build}) sees no GPU; "
        f"CUDA_VISIBLE_DEVICES: {setting('CUDA_VISIBLE_DEVICES') or 'not set'}",
        "unset CUDA_VISIBLE_DEVICES; run nvidia-smi: if it lists a GPU, install a torch for the "
        "CUDA version that it shows",
    )


def check_cores(_flags: Namespace) -> CheckResult:
    """Check that the environment does not ask for more threads than this process has cores."""
    cores = usable_cores()
    threads = read_settings()["OMP_NUM_THREADS"]
    text = f"{cores} of {os.cpu_count()} cores usable"
    if threads > cores:
        return warning(
            f"{text}; OMP_NUM_THREADS={threads} asks for more threads than cores",
            f"unset OMP_NUM_THREADS, or give --threads {cores} or fewer",
        )
    return ok(text)


def check_memory(_flags: Namespace) -> CheckResult:
    """Check that there is enough free memory, and shared memory: containers often have little."""
    free = psutil.virtual_memory().available
    text = f"{bytes_text(free)} free"
    if free < _LEAST_MEMORY:
        return warning(
            f"{text}; one rank of VGG-11 needs about 1 GB",
            "end other processes, or start fewer ranks here",
        )
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        text += f", {bytes_text(shared)} in /dev/shm"
        if shared < _LEAST_SHARED_MEMORY:
            return warning(
                f"{text}, through which NCCL passes data between GPUs",
                "start the container with --shm-size=1g",
            )
    return ok(text)


def check_open_files(flags: Namespace) -> CheckResult:
    """Check how many files a process may open: Gloo needs a few sockets for each other rank."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_BESIDE + _FILES_A_NODE * (flags.num_nodes or 1)
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    if limit < needed:
        return warning(
            f"limit {limit} per process, and a rank may need {needed}",
            f"ulimit -n {max(needed, 4096)}",
        )
    return ok(f"limit {limit} per process")


def check_code(_flags: Namespace) -> CheckResult:
    """Report which code this is."""
    return ok(f"commit {commit()}, source hash {code_digest()}")


def commit() -> str:
    """Return the checkout's commit, and whether files differ from it."""
    name = git("rev-parse", "--short", "HEAD") or "unknown"
    changes = " with uncommitted changes" if git("status", "--porcelain", "-uno") else ""
    return f"{name}{changes}"


def check_dataset(flags: Namespace) -> CheckResult:
    """Check that the dataset's files exist and are whole."""
    folder = flags.data_dir
    entry = DATASETS[flags.dataset]
    if entry.comes_with:
        return ok(f"{flags.dataset} comes with {entry.comes_with}")
    if flags.dataset == "folder":
        return _check_folder(folder)
    if not entry.file_check:
        return ok(f"{flags.dataset} is checked when a run loads it")
    problems = resolve_name(entry.file_check)(folder)
    if "damaged" in problems:
        return failure(
            f"{flags.dataset} in {folder} cannot be used ({problems})",
            "delete the damaged files (the next run downloads them again), or copy them from a "
            "node that has good ones",
        )
    if problems:
        return warning(
            f"{flags.dataset} is not in {folder} ({problems})",
            "with internet access, nothing: a run downloads it first; otherwise copy the folder "
            "from a node that has it",
        )
    return ok(f"{flags.dataset} in {folder}, complete (MD5 checked)")


def _check_folder(folder: Path) -> CheckResult:
    """Check a dataset of the user's own; its digest tells nodes with other files apart."""
    from common.data.folder import classes_of

    try:
        classes = [classes_of(folder / split) for split in ("train", "test")]
    except UserError as error:
        return failure(str(error), "give the folder that contains them as --data-dir")
    sizes = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.glob("t*/*/**/*"))  # of train and test
        if path.is_file()
    }
    digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
    return ok(
        f"{len(classes[0])} classes, {len(sizes)} files in {folder}; names and sizes: {digest}"
    )


def check_disk(flags: Namespace) -> CheckResult:
    """Check that the output folder can be written and has room for checkpoints."""
    folder = flags.output_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return failure(
            f"{folder} cannot be written: {there} is read-only or no folder",
            "give another --output-dir, or change the folder's permissions",
        )
    free = shutil.disk_usage(there).free
    text = (
        f"{bytes_text(free)} free in {there}; "
        f"a checkpoint of VGG-11 takes {bytes_text(_CHECKPOINT_BYTES)}"
    )
    if free < 2 * _CHECKPOINT_BYTES:  # an old one is deleted only after the new one is written
        return failure(text, "free some space, or give an --output-dir on another disk")
    if free < _ROOM_FOR * _CHECKPOINT_BYTES:
        most = max(1, free // _CHECKPOINT_BYTES - 1)  # beside one that is being written
        return warning(text, f"free some space, or give --keep-checkpoints {most}")
    return ok(text)


def check_cluster_tools(_flags: Namespace) -> CheckResult:
    """Check whether ``lab cluster`` can make nodes of namespaces on this machine."""
    if (refused := tools.namespaces_refused()) is not None:
        return warning("cannot emulate nodes on this machine (training does not need it)", refused)
    if not tools.has_tbf():
        return warning(
            "the kernel cannot limit a link's rate (sch_tbf)",
            "sudo modprobe sch_tbf, or run lab cluster without --rate",
        )
    netem = "" if tools.has_netem() else "; --latency has no effect: the kernel lacks netem"
    return ok(f"ip, tc and unshare are installed, namespaces are allowed{netem}")
