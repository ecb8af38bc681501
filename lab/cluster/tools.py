"""What the emulated cluster needs of the machine: programs, permission to make namespaces, kernel modules.

``missing`` and ``namespaces_refused`` say what to change; ``unshare_command`` is the prefix that makes the namespaces.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PROBE_SECONDS = 10.0
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
_SBIN = "/usr/sbin:/sbin"  # not in every user's PATH
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_IN_USER_NAMESPACE = ("--user", "--map-root-user")
_MOST_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
_SWITCHES = {
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}


@dataclass(frozen=True)
class MissingTool:
    """A program that this machine lacks, and the package that contains it."""

    tool: str
    package: str


def search_path() -> str:
    """PATH, with the folders in which ``ip`` and ``tc`` lie."""
    return f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"


def missing() -> list[MissingTool]:
    """Return the programs of ``ip``, ``tc`` and ``unshare`` that this machine lacks."""
    return [
        MissingTool(tool, package)
        for tool, package in _PACKAGES.items()
        if shutil.which(tool, path=search_path()) is None
    ]


@cache
def unshare_command() -> tuple[str, ...] | None:
    """Return the ``unshare`` that gives a process its own namespaces: as root directly, else in a user namespace; None where
    neither is allowed."""
    unshare = shutil.which("unshare", path=search_path())
    if unshare is None or sys.platform != "linux":
        return None
    commands: list[tuple[str, ...]] = [(unshare, *_IN_USER_NAMESPACE, *_NAMESPACES)]
    if os.geteuid() == 0:
        commands.insert(0, (unshare, *_NAMESPACES))
    return next((command for command in commands if _runs([*command, "true"])), None)


def namespaces_refused() -> str | None:
    """Return why this user may not make namespaces and which setting changes that; None where it may."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}: use --loopback, or a Linux machine"
    if lacking := missing():
        return "; ".join(
            f"{tool.tool} is not installed: install the package {tool.package}" for tool in lacking
        )
    if unshare_command() is not None:
        return None
    for path, (closed, setting) in _SWITCHES.items():
        if Path(path).exists() and Path(path).read_text().strip() == closed:
            return f"this kernel allows user namespaces to root alone: `sudo sysctl -w {setting}`, or run it with sudo"
    if _MOST_NAMESPACES.exists() and int(_MOST_NAMESPACES.read_text()) == 0:
        return f"{_MOST_NAMESPACES} is 0: `sudo sysctl -w user.max_user_namespaces=10000`, or run it with sudo"
    return (
        "`unshare --user --map-root-user --net` is refused, as in a container without the right to make namespaces: start "
        "the container with --privileged (or --cap-add SYS_ADMIN --security-opt seccomp=unconfined), or run it outside"
    )


@cache
def has_netem() -> bool:
    """Whether the kernel can delay packets (sch_netem); False also where that cannot be tried."""
    return _has_qdisc("netem delay 1ms")


@cache
def has_tbf() -> bool:
    """Whether the kernel can limit a link's rate (sch_tbf); False also where that cannot be tried."""
    return _has_qdisc("tbf rate 100mbit burst 128kb limit 2mb")


def _has_qdisc(words: str) -> bool:
    unshare = unshare_command()
    return (
        unshare is not None
        and not missing()
        and _runs([*unshare, "tc", "qdisc", "add", "dev", "lo", "root", *words.split()])
    )


def _runs(command: list[str]) -> bool:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
            env=os.environ | {"PATH": search_path()},
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
