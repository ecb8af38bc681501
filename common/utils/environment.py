"""The environment variables that the project reads, and what ``environment.json`` records.

``read_settings`` and ``read_torchrun`` check variables by the tables of rules below;
``environment`` describes the machine. Imports torch only inside functions. Reads /proc on Linux and
asks the standard library elsewhere.
"""

import os
import platform
import re
import resource
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any

from common.errors import UserError
from common.utils.paths import IN_CHECKOUT, REPOSITORY
from common.utils.system import lines_of, usable_cores
from common.utils.typed_json import shown

DEFAULT_MASTER_PORT = 29500
RUN_TOKEN = "LAB_RUN_TOKEN"
"""The variable with the run's token: a secret that every rank of a run has."""
_PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "matplotlib", "pillow")
# A variable's rule: the numbers, or the pattern of the texts, that are allowed; what it must be.
_FROM_0 = (range(65_536), "a whole number from 0 to 65535")
_FROM_1 = (range(1, 65_536), "a whole number from 1 to 65535")
_USER_RULES: dict[str, tuple[range | str, str]] = {
    # size of the terminal, read by rich and argparse; threads of a process, read by torch
    "COLUMNS": _FROM_1,
    "LINES": _FROM_1,
    "OMP_NUM_THREADS": _FROM_1,
    # the interfaces that Gloo and NCCL use
    "GLOO_SOCKET_IFNAME": (
        r"[\w.:@+-]{1,15}(,[\w.:@+-]{1,15})*",
        "a network interface, e.g. eth0, or several, e.g. eth0,eth1",
    ),
    "NCCL_SOCKET_IFNAME": (
        r"(?=.{1,1000}\Z)\^?=?[^\s/,]+(,[^\s/,]+)*",
        "prefixes of network interfaces, e.g. eth or ^docker,lo",
    ),
    "TORCH_DISTRIBUTED_DEBUG": (r"(?i:off|info|detail)", "OFF, INFO or DETAIL"),
}
_TORCHRUN_RULES: dict[str, tuple[range | str, str]] = {
    "RANK": _FROM_0,
    "WORLD_SIZE": _FROM_1,
    "MASTER_ADDR": (r"[\w.:%-]{1,253}", "a host name or an IP address"),
    "MASTER_PORT": _FROM_1,
    # other launchers may leave out these
    "LOCAL_RANK": _FROM_0,
    "LOCAL_WORLD_SIZE": _FROM_1,
    "TORCHELASTIC_MAX_RESTARTS": _FROM_0,
    "TORCHELASTIC_USE_AGENT_STORE": (r"True|False", "True or False"),
    # for torchrun itself: the number of nodes, or the smallest and largest number
    "PET_NNODES": (
        r"([0-9]{1,5}:)?[0-9]{1,5}",
        "a number of nodes, e.g. 4, or a range, e.g. 2:4",
    ),
}


@dataclass(frozen=True)
class TorchrunVariables:
    """What torchrun tells a rank, by the variables' names in lower case; 0 and "": not set."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    local_rank: int
    local_world_size: int
    torchelastic_max_restarts: int
    torchelastic_use_agent_store: str
    pet_nnodes: str


def read_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the variables that the user may have set for any program; 0 and "": not set.

    A variable that is empty counts as not set. Raises UserError that says: variable, value, what is
    allowed, what to do.
    """
    # torch refuses an empty debug level.
    given = {
        name: text
        for name, text in environment.items()
        if text or name == "TORCH_DISTRIBUTED_DEBUG"
    }
    return _read(_USER_RULES, given, advice="set it to that, or unset it")


def read_torchrun(environment: Mapping[str, str], *, advice: str) -> TorchrunVariables:
    """Return what torchrun tells a rank.

    Raises UserError as ``read_settings`` does; it ends with the ``advice``.
    """
    found = _read(_TORCHRUN_RULES, environment, advice=advice)
    return TorchrunVariables(**{name.lower(): value for name, value in found.items()})


def _read(
    rules: Mapping[str, tuple[range | str, str]], environment: Mapping[str, str], *, advice: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (allowed, described) in rules.items():
        text = environment.get(name)
        if text is not None and not _fits(text, allowed):
            raise UserError(
                f"the environment has {name}={shown(text)}, but it must be {described}: {advice}"
            )
        found[name] = int(text or 0) if isinstance(allowed, range) else text or ""
    return found


def _fits(text: str, allowed: range | str) -> bool:
    if isinstance(allowed, range):
        return re.fullmatch("[0-9]{1,18}", text) is not None and int(text) in allowed
    return re.fullmatch(allowed, text) is not None


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
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def load_per_core() -> float:
    """Return how many programs wanted a core of this machine in the last minute, for each core."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _cpu_name() -> str:
    for line in lines_of("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    for found in distributions(name=package):
        return found.version
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
