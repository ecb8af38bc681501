"""The environment variables that the project reads, and what ``environment.json`` records.

``read_settings`` and ``read_torchrun`` read variables through a schema: a dataclass whose fields
are their names in lower case. ``environment`` describes the machine.
Imports torch only inside functions. Reads /proc on Linux and asks the standard library elsewhere.
"""

import os
import platform
import re
import resource
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from common.errors import UserError
from common.utils.paths import IN_CHECKOUT, REPOSITORY
from common.utils.system import lines_of, usable_cores
from common.utils.typed_json import shown

T = TypeVar("T")
DEFAULT_MASTER_PORT = 29500
RUN_TOKEN = "LAB_RUN_TOKEN"
"""The variable with the run's token: a secret that every rank of a run has."""
_PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "matplotlib", "pillow")
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")

# The description follows "it must be" in the message for a wrong value.
_FromZero = Annotated[int, Meta(ge=0, le=65_535, description="a whole number from 0 to 65535")]
_FromOne = Annotated[int, Meta(ge=1, le=65_535, description="a whole number from 1 to 65535")]
_Flag = Annotated[Literal["True", "False"], Meta(description="True or False")]
_Host = Annotated[
    str, Meta(pattern=r"^[\w.:%-]{1,253}\Z", description="a host name or an IP address")
]
_Nodes = Annotated[
    str,
    Meta(
        pattern=r"^([0-9]{1,5}:)?[0-9]{1,5}\Z",
        description="a number of nodes, e.g. 4, or a range, e.g. 2:4",
    ),
]
_Interfaces = Annotated[
    str,
    Meta(
        pattern=r"^[^\s/,]{1,15}(,[^\s/,]{1,15})*\Z",
        description="a network interface, e.g. eth0, or several, e.g. eth0,eth1",
    ),
]
_NCCLInterfaces = Annotated[
    str,
    Meta(
        pattern=r"^\^?=?[^\s/,]+(,[^\s/,]+)*\Z",
        max_length=1000,
        description="prefixes of network interfaces, e.g. eth or ^docker,lo",
    ),
]
_DebugLevel = Annotated[
    str, Meta(pattern=r"^(?i:off|info|detail)\Z", description="OFF, INFO or DETAIL")
]


@dataclass(frozen=True)
class UserVariables:
    """Variables that the user may have set for any program; 0 and "": not set.

    columns, lines : size of the terminal, read by rich and argparse.
    omp_num_threads : threads of a process, read by torch.
    gloo_socket_ifname, nccl_socket_ifname : the interfaces that Gloo and NCCL use.
    torch_distributed_debug : read by torch when it is imported.
    """

    columns: _FromOne = 0
    lines: _FromOne = 0
    omp_num_threads: _FromOne = 0
    gloo_socket_ifname: _Interfaces = ""
    nccl_socket_ifname: _NCCLInterfaces = ""
    torch_distributed_debug: _DebugLevel = ""


@dataclass(frozen=True)
class TorchrunVariables:
    """What torchrun tells a rank; 0 and "": not set. Other launchers set the first four, or more.

    pet_nnodes : number of nodes, or the smallest and largest number; set for torchrun itself.
    """

    rank: _FromZero = 0
    world_size: _FromOne = 0
    master_addr: _Host = ""
    master_port: _FromOne = 0
    local_rank: _FromZero = 0
    local_world_size: _FromOne = 0
    torchelastic_max_restarts: _FromZero = 0
    torchelastic_use_agent_store: _Flag = "False"
    pet_nnodes: _Nodes = ""


def read_settings(environment: Mapping[str, str] = os.environ) -> UserVariables:
    """Return the user's settings. A variable that is empty counts as not set.

    Raises UserError that says: variable, value, what is allowed, what to do.
    """
    # torch refuses an empty debug level.
    given = {k: text for k, text in environment.items() if text or k == "TORCH_DISTRIBUTED_DEBUG"}
    return _read(UserVariables, given, advice="set it to that, or unset it")


def read_torchrun(environment: Mapping[str, str], *, advice: str) -> TorchrunVariables:
    """Return what torchrun's variables say.

    Raises UserError as ``read_settings`` does; it ends with the ``advice``.
    """
    return _read(TorchrunVariables, environment, advice=advice)


def _read(schema: type[T], environment: Mapping[str, str], *, advice: str) -> T:
    values: dict[str, Any] = {}
    for field in fields(schema):  # type: ignore[arg-type]  # a dataclass
        name = field.name.upper()
        if (text := environment.get(name)) is None:
            continue
        whole = isinstance(field.default, int) and _WHOLE_NUMBER.fullmatch(text)
        kind: Any = field.type
        try:
            values[field.name] = msgspec.convert(int(text) if whole else text, kind)
        except msgspec.ValidationError as error:
            raise UserError(
                f"the environment has {name}={shown(text)}, but it must be "
                f"{kind.__metadata__[0].description}: {advice}"
            ) from error
    return schema(**values)


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
