"""The sandbox of one run: a stranger's ranks see a system that they cannot change.

``sandbox`` makes namespaces of its own: a network with loopback alone; process ids, whose first
process takes all others along; and a file system in which the system's folders, the script's
Python, the probe and the rubric's folders are read-only, and a copy of the submission lies in
memory. Processes run in a ``chroot``, so that they cannot make further namespaces, as an ordinary
user, under limits; ``_watch`` ends them when memory or records grow too large.

bubblewrap mounts all this; where it is not installed, ``mount`` in namespaces of ``unshare``.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from common.errors import UserError
from common.utils.processes import descendants
from lab.audit.isolation import RunNetwork, held_namespaces, record_folder
from lab.audit.runner import HOOK
from lab.cluster import tools
from lab.flags import first_that_holds
from lab.processes.first_failure import last_error_line

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
_NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--uts")
_WATCH_SECONDS = 0.25
# Root grades as one of these users, chosen by its process: a limit of processes counts all that a
# user has, also in the sandbox of another part.
_FIRST_USER, _USERS = 61_000, 4_000

# How bubblewrap, and a shell, mount what {source} says at {at}, which exists.
_BUBBLEWRAP = {
    "folder": "--perms 0777 --dir {at}",
    "read-only": "--ro-bind {source} {at}",
    "writable": "--bind {source} {at}",
    "memory": "--size {source} --perms 1777 --tmpfs {at}",
    "processes": "--proc {at}",
    "devices": "--dev {at} --size {source} --perms 1777 --tmpfs {at}/shm --remount-ro {at}",
    "closed": "--remount-ro {at}",
}
_MOUNT = {
    "folder": "mkdir -p -m 777 {at}",
    "read-only": "mount --bind {source} {at}\nmount -o remount,bind,ro,nosuid,nodev {at}",
    "writable": "mount --bind {source} {at}",
    "memory": "mount -t tmpfs -o mode=1777,nosuid,nodev,size={source} tmpfs {at}",
    "processes": "mount -t proc proc {at}",
    "devices": "mkdir -p {at}/shm\nmount -t tmpfs -o mode=1777,size={source} tmpfs {at}/shm\n"
    "for one in null zero full random urandom; do : > {at}/$one; "
    "mount --bind /dev/$one {at}/$one; done",
    "closed": "mount -o remount,bind,ro,nosuid,nodev {at}",
}


class Task(msgspec.Struct, kw_only=True):
    """A part to audit.

    Parameters
    ----------
    words : the command of a rank, see ``AuditCommand``.
    submission : the folder of the whole submission; it appears to the ranks at the same path.
    script : relative to it; the ranks start in its folder.
    facts : the file to write, with a page beside it.
    key : stays in the facts.
    mounts : the rubric's folders by where they appear.
    memory_bytes, disk_bytes, processes : limits of all its processes together.
    sandboxed : False runs the script with the rights of this process.
    """

    words: list[str]
    ranks: list[int]
    submission: str
    script: str
    facts: str
    key: str
    mounts: dict[str, str]
    memory_bytes: int
    disk_bytes: int
    processes: int
    limit_seconds: float
    sandboxed: bool

    @property
    def cwd(self) -> Path:
        """The folder in which the ranks start."""
        return (Path(self.submission) / self.script).parent


def refused(task: Task) -> str | None:
    """Return why a task cannot run in a sandbox here, and what to do; None if it can."""
    try:
        with record_folder(None) as folder, sandbox(task, folder, []) as network:
            python = task.words[0]
            words = [*network.prefixes[0], python, "-c", "import torch"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        return f"{error}: install the package bubblewrap, and allow user namespaces"
    if done.returncode == 0 or not Path(python).name.startswith("python"):
        return None
    return f"{python} cannot import torch in it ({last_error_line(done.stderr)})"


@contextlib.contextmanager
def sandbox(task: Task, folder: Path, ended: list[str]) -> Iterator[RunNetwork]:
    """Keep a sandbox for one run; yield where its ranks start.

    folder : of the run; the records are written below it.
    ended : gets the reason if the sandbox ends what runs in it.

    Raises UserError if the namespaces cannot be made.
    """
    root, records = folder / "root", folder / "records"
    for path in (root, records):
        path.mkdir()
    records.chmod(0o777)
    is_root, user = os.geteuid() == 0, str(_FIRST_USER + os.getpid() % _USERS)
    with held_namespaces(*_mounting(task, root, records)) as first:
        # Root becomes an ordinary user in the chroot. An ordinary user is root in namespaces that
        # hold nothing else, and gives up all that this allows.
        enter = [
            *("nsenter", f"--target={first}", *_NAMESPACES),
            *(() if is_root else ("--user", "--preserve-credentials")),
            *("--", "chroot", *((f"--userspec={user}:{user}", "--groups=") if is_root else ())),
            *(str(root), "setpriv", *(() if is_root else ("--bounding-set=-all",))),
            *("--no-new-privs", "prlimit", f"--nproc={task.processes}"),
            *(f"--data={task.memory_bytes}", "--as=unlimited", "--core=0", "--"),
            *("choom", "-n", "1000", "--", "env", "--chdir"),
        ]
        copy = [*enter, "/", "cp", "-r", "-P", "/submission/.", task.submission]
        subprocess.run(copy, stderr=subprocess.DEVNULL, timeout=120)
        over = threading.Event()
        watch = threading.Thread(target=_watch, args=(task, first, records, over, ended))
        watch.start()
        try:
            yield RunNetwork(prefixes=[[*enter, str(task.cwd)]], records=records)
        finally:
            over.set()
            watch.join()


def _mounting(task: Task, root: Path, records: Path) -> tuple[list[str], list[str]]:
    """Return the words that make the namespaces, and commands to run in them."""
    program = Path(shutil.which(task.words[0]) or sys.executable)
    system = [Path(one) for one in _SYSTEM if Path(one).exists()]
    own = [program.parents[1], program.resolve().parents[1], HOOK.parent]
    outside = [one for one in own if not {*system, Path("/")} & {one, *one.parents[:-1]}]
    readable = {
        **{str(one): str(one) for one in [*system, *outside]},
        **{os.path.normpath(task.cwd / at): path for at, path in task.mounts.items()},
        "/submission": task.submission,
    }
    places = [*readable, task.submission, str(records)]
    folders = [str(one) for place in places for one in reversed(Path(place).parents[:-1])]
    mounts = [
        *(("folder", "", ""), ("memory", task.disk_bytes, "")),
        *(("folder", "", at) for at in ("/proc", "/dev", "/tmp")),
        *(("processes", "", "/proc"), ("devices", task.disk_bytes, "/dev")),
        ("memory", task.disk_bytes, "/tmp"),
        *(("folder", "", at) for at in dict.fromkeys([*folders, task.submission, str(records)])),
        ("memory", task.disk_bytes, task.submission),
        *(("folder", "", at) for at in dict.fromkeys([*folders, *readable])),
        *(("read-only", source, at) for at, source in readable.items()),
        *(("writable", records, str(records)), ("closed", "", "")),
    ]
    bubblewrap = shutil.which("bwrap", path=tools.search_path())
    kinds = _BUBBLEWRAP if bubblewrap else _MOUNT
    lines = [
        kinds[kind].format(at=shlex.quote(f"{root}{at}"), source=shlex.quote(str(source)))
        for kind, source, at in mounts
    ]
    namespaces = [f"--{name.strip('-')}" for name in _NAMESPACES if name != "--mount"]
    is_root = os.geteuid() == 0
    if not bubblewrap:
        users = [] if is_root else ["--user", "--map-root-user"]
        more = ("--mount", "--fork", "--kill-child")
        return ["unshare", *users, *namespaces, *more], ["ip link set lo up", *lines]
    words = [bubblewrap, "--die-with-parent", "--as-pid-1", "--chdir", "/"]
    words += [name.replace("--", "--unshare-") for name in namespaces]
    words += [] if is_root else ["--unshare-user", "--uid", "0", "--gid", "0"]
    for one in system:  # for the first process, which stays outside of the chroot
        words += ["--ro-bind", str(one), str(one)]
    return [
        *words,
        *(word for line in lines for word in shlex.split(line)),
        "--remount-ro",
        "/",
    ], []


def _watch(task: Task, first: int, records: Path, over: threading.Event, ended: list[str]) -> None:
    """End the namespaces, and say why, when their processes use too much."""
    inside = os.readlink(f"/proc/{first}/ns/pid")
    while not over.wait(_WATCH_SECONDS):
        used = written = 0
        for pid in descendants(os.getpid()):
            with contextlib.suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == inside:
                    # What forked loaders share with their rank counts once.
                    used += psutil.Process(pid).memory_full_info().pss
        with contextlib.suppress(OSError):
            written = sum(one.stat(follow_symlinks=False).st_size for one in os.scandir(records))
        reason = first_that_holds(
            {
                f"used more than {task.memory_bytes / 2**30:.3g} GB of memory": (
                    used > task.memory_bytes
                ),
                f"wrote more than {task.disk_bytes / 2**30:.3g} GB of records": (
                    written > task.disk_bytes
                ),
            }
        )
        if reason:
            ended.append(reason)
            with contextlib.suppress(psutil.Error):
                psutil.Process(first).kill()
            return
