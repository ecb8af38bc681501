"""The sandbox of one run: a stranger's ranks see a system that they cannot change.

``sandbox`` makes namespaces of its own: a network with loopback alone; process ids, whose first
process takes all others along; and a file system in which the system's folders, the script's
Python, the probe and the rubric's folders are read-only, and a copy of the submission lies in
memory. Processes run in a ``chroot``, so that they cannot make further namespaces, as an ordinary
user, under limits; ``_watch`` ends them when memory or records grow too large.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from common.errors import UserError
from common.utils.processes import descendants
from lab.audit.isolation import RunNetwork, held_namespaces
from lab.audit.runner import HOOK
from lab.cluster import tools

_ROOT = "/jail"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
_NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--uts")
_PROGRAMS = {"bwrap": "bubblewrap", "nsenter": "util-linux", "setpriv": "util-linux"}
_WATCH_SECONDS = 0.25
_FIRST_USER = 61_000
"""Root grades as one of the users from here on, each job as its own."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a part may use, all its processes together."""

    memory_bytes: int
    disk_bytes: int
    processes: int


def refused() -> str | None:
    """Return why there can be no sandbox here, and what to do; None if there can."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program, path=tools.search_path()) is None:
            return f"{program} is not installed: install the package {package}"
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            _namespaces(
                Path(sys.executable), Path(folder), Path(folder) / "records", {}, 2**20, 0
            ) as (enter, _),
        ):
            done = subprocess.run([*enter, "/", "true"], capture_output=True, text=True, timeout=20)
            return done.stderr.strip() or None
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"


@contextlib.contextmanager
def sandbox(
    folder: Path,
    *,
    program: str,
    submission: Path,
    cwd: Path,
    mounts: Mapping[str, Path],
    limits: Limits,
    slot: int,
    ended: list[str],
) -> Iterator[RunNetwork]:
    """Keep a sandbox for one run; yield where its ranks start.

    Parameters
    ----------
    folder : of the run; the records are written below it.
    program : the command's first word, whose environment is readable.
    submission : its unpacked folder, which appears at the same path, as a copy in memory.
    cwd : the script's folder in it.
    mounts : the rubric's folders by where they appear.
    slot : the number of the job.
    ended : gets the reason if the sandbox ends what runs in it.

    Raises UserError if the namespaces cannot be made.
    """
    records = folder / "records"
    appear = {os.path.normpath(cwd / at): path for at, path in mounts.items()}
    python = Path(shutil.which(program) or sys.executable)
    kept = _namespaces(python, submission, records, appear, limits.disk_bytes, slot)
    with kept as (enter, first):
        copy = ["/", "cp", "-r", "-P", "/submission/.", str(submission)]
        subprocess.run([*enter, *copy], stderr=subprocess.DEVNULL, timeout=120)
        allowed = [
            *("prlimit", f"--nproc={limits.processes}", f"--data={limits.memory_bytes}"),
            *("--as=unlimited", "--core=0", "--", "choom", "-n", "1000", "--"),
        ]
        over = threading.Event()
        watch = threading.Thread(target=_watch, args=(first, records, limits, over, ended))
        watch.start()
        try:
            yield RunNetwork(prefixes=[[*enter, str(cwd), *allowed]], records=records)
        finally:
            over.set()
            watch.join()


@contextlib.contextmanager
def _namespaces(
    program: Path,
    submission: Path,
    records: Path,
    mounts: Mapping[str, Path],
    disk_bytes: int,
    slot: int,
) -> Iterator[tuple[list[str], int]]:
    """Keep the namespaces; yield the words before a folder and a command, and the first process."""
    records.mkdir()
    records.chmod(0o777)
    system = [Path(one) for one in _SYSTEM if Path(one).exists()]
    wanted = [*(place.parents[1] for place in (program, program.resolve())), HOOK.parent]
    own = [one for one in wanted if not any(one == top or top in one.parents for top in system)]
    readable = {
        **{str(one): one for one in [*system, *own] if one != Path("/")},
        **mounts,
        "/submission": submission,
    }
    in_memory = ["--size", str(disk_bytes), "--perms", "1777", "--tmpfs"]
    words = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    words += ["--die-with-parent", "--as-pid-1", "--chdir", "/"]
    root = os.geteuid() == 0
    if not root:
        words += ["--unshare-user", "--uid", "0", "--gid", "0"]
    for system_folder in _SYSTEM[:6]:  # for the first process, which stays outside of the jail
        words += ["--ro-bind-try", system_folder, system_folder]
    words += ["--dir", _ROOT, "--proc", f"{_ROOT}/proc", "--dev", f"{_ROOT}/dev"]
    words += [*in_memory, f"{_ROOT}/dev/shm", "--remount-ro", f"{_ROOT}/dev"]
    words += [*in_memory, f"{_ROOT}/tmp"]
    for place in (*readable, submission, records):
        for folder in [*reversed(Path(place).parents[:-1]), place]:
            words += ["--dir", f"{_ROOT}{folder}"]
    words += [*in_memory, f"{_ROOT}{submission}"]
    for at, path in readable.items():
        words += ["--ro-bind", str(path), f"{_ROOT}{at}"]
    words += ["--bind", str(records), f"{_ROOT}{records}", "--remount-ro", "/"]
    user = str(_FIRST_USER + slot)
    with held_namespaces(words, []) as first:
        # Root becomes an ordinary user in the jail. An ordinary user is root of namespaces that
        # hold nothing else, and gives up all that this allows.
        jail = [
            *("nsenter", f"--target={first}", *_NAMESPACES),
            *(() if root else ("--user", "--preserve-credentials")),
            *("--", "chroot", *((f"--userspec={user}:{user}", "--groups=") if root else ()), _ROOT),
            *("setpriv", *(() if root else ("--bounding-set=-all",)), "--no-new-privs", "--"),
            *("env", "--chdir"),
        ]
        yield jail, first


def _watch(
    first: int, records: Path, limits: Limits, over: threading.Event, ended: list[str]
) -> None:
    """End the namespaces, and say why, when their processes use too much."""
    while not over.wait(_WATCH_SECONDS):
        used = written = 0
        for pid in descendants(os.getpid()):
            with contextlib.suppress(psutil.Error):
                memory = psutil.Process(pid).memory_info()
                used += memory.rss - memory.shared
        with contextlib.suppress(OSError):
            written = sum(one.stat(follow_symlinks=False).st_size for one in os.scandir(records))
        reasons = {
            f"used more than {limits.memory_bytes / 2**30:.3g} GB of memory": used
            > limits.memory_bytes,
            f"wrote more than {limits.disk_bytes / 2**30:.3g} GB into the records": written
            > limits.disk_bytes,
        }
        if reason := next((text for text, holds in reasons.items() if holds), None):
            ended.append(reason)
            with contextlib.suppress(psutil.Error):
                psutil.Process(first).kill()
            return
