"""What a run's ``environment.json`` records, and constants of the environment.

Imports torch only inside functions. Reads /proc on Linux and asks the standard library elsewhere.
"""

import os
import platform
import resource
import secrets
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from common.utils.paths import IN_CHECKOUT, REPOSITORY
from common.utils.system import lines_of, usable_cores

DEFAULT_MASTER_PORT = 29500
RUN_TOKEN = "LAB_RUN_TOKEN"
"""The variable with the run's token: a secret that every rank of a run has."""
_PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "matplotlib", "pillow")


def setting(name: str) -> str | None:
    """Return an environment variable that the user may have set."""
    return os.environ.get(name)


def run_token() -> str:
    """Return the run's token; "" if the environment has none."""
    return os.environ.get(RUN_TOKEN, "")


def with_run_token(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with a token: the one that they have, else a new one."""
    return {**variables, RUN_TOKEN: variables.get(RUN_TOKEN) or secrets.token_hex(16)}


def environment() -> dict[str, Any]:
    """Return what the numbers depend on: versions, CPU, GPUs, threads, git commit."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
        **{name: package_version(name) for name in _PACKAGES},
        "git_commit": git("rev-parse", "HEAD"),
        "git_changes": bool(git("status", "--porcelain")),
    }


def peak_memory_bytes() -> int:
    """Return the largest resident set of this process so far."""
    # On Linux ru_maxrss would count what the parent held when it started this process.
    status = dict(line.split(":", 1) for line in lines_of("/proc/self/status"))
    if "VmHWM" in status:
        return int(status["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cpu_name() -> str:
    lines = [line for line in lines_of("/proc/cpuinfo") if line.startswith("model name")]
    named = lines[0].split(":", 1)[1].strip() if lines else platform.processor()
    return named or platform.machine()


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """Return what git prints about this checkout; None without git or a checkout."""
    if not IN_CHECKOUT:  # an installed package may lie inside somebody else's repository
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
