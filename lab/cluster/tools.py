"""What an emulated cluster needs: programs, permission for namespaces, kernel modules.

``namespaces_refused`` says what to change; ``unshare_command`` is the prefix that makes namespaces.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from common.utils.environment import setting

_PROBE_SECONDS = 10.0
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_MOST_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
# By file: the value that refuses user namespaces, and the setting that allows them.
_SWITCHES = {
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}


def search_path() -> str:
    """Return PATH with the folders of ``ip`` and ``tc``, which not every user's PATH has."""
    return f"{setting('PATH') or os.defpath}:/usr/sbin:/sbin"


def missing() -> dict[str, str]:
    """Return the programs that this machine lacks, each with the package that contains it."""
    return {
        tool: package
        for tool, package in _PACKAGES.items()
        if shutil.which(tool, path=search_path()) is None
    }


@cache
def unshare_command(
    namespaces: tuple[str, ...] = _NAMESPACES, users: str = "--map-root-user"
) -> tuple[str, ...] | None:
    """Return the command that gives a process its own namespaces; None if the user may make none.

    As root directly if that works, else in a user namespace; ``users`` says who the user is there.
    """
    if sys.platform != "linux" or (unshare := shutil.which("unshare", path=search_path())) is None:
        return None
    as_root = [(unshare, *namespaces)] if os.geteuid() == 0 else []
    commands = [*as_root, (unshare, "--user", users, *namespaces)]
    return next((command for command in commands if _runs([*command, "true"])), None)


def namespaces_refused() -> str | None:
    """Return why this user may not make namespaces and what to change; None if they may."""
    if sys.platform != "linux":
        return (
            f"network namespaces exist only on Linux, and this is {sys.platform}: "
            "use a Linux machine"
        )
    if lacking := missing():
        return "; ".join(
            f"{tool} is not installed: install the package {package}"
            for tool, package in lacking.items()
        )
    if unshare_command() is not None:
        return None
    for path, (closed, switch) in _SWITCHES.items():
        if Path(path).exists() and Path(path).read_text().strip() == closed:
            return (
                "this kernel allows user namespaces only to root: "
                f"`sudo sysctl -w {switch}`, or run the command with sudo"
            )
    if _MOST_NAMESPACES.exists() and int(_MOST_NAMESPACES.read_text()) == 0:
        return (
            f"{_MOST_NAMESPACES} is 0: "
            "`sudo sysctl -w user.max_user_namespaces=10000`, or run the command with sudo"
        )
    return (
        "`unshare --user --map-root-user --net` is not permitted, which is usual in a container: "
        "start the container with --privileged (or --cap-add SYS_ADMIN "
        "--security-opt seccomp=unconfined), or run the command outside"
    )


@cache
def has_netem() -> bool:
    """Whether the kernel can delay packets (sch_netem); False if that cannot be tried."""
    return _has_qdisc("netem delay 1ms")


@cache
def has_tbf() -> bool:
    """Whether the kernel can limit a link's rate (sch_tbf); False if that cannot be tried."""
    return _has_qdisc("tbf rate 100mbit burst 128kb limit 2mb")


def _has_qdisc(discipline: str) -> bool:
    """Return whether a queueing discipline can be added in a namespace of this user."""
    unshare = unshare_command()
    return (
        unshare is not None
        and not missing()
        and _runs([*unshare, *f"tc qdisc add dev lo root {discipline}".split()])
    )


def _runs(command: list[str]) -> bool:
    """Whether the command ends with status 0."""
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
