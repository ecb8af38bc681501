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
_MOST_RECORDS = 20_000  # files
_MOST_OF_MACHINE = 95.0  # percent of all memory: also of what no process maps
# Root grades as one of these users, chosen by its process: a limit of processes counts all that a
# user has, also in the sandbox of another part.
_FIRST_USER, _USERS = 61_000, 4_000

# How bubblewrap, and a shell, mount what {source} says at {at}, which exists.
_BUBBLEWRAP = {
    "folder": "--perms 0777 --dir {at}",
    "read-only": "--ro-bind {source} {at}",
    "memory": "--size {source} --perms 1777 --tmpfs {at}",
    "processes": "--proc {at}",
    "devices": "--dev {at} --size {source} --perms 1777 --tmpfs {at}/shm --remount-ro {at}",
    "closed": "--remount-ro {at}",
}
_MOUNT = {
    "folder": "mkdir -p -m 777 {at}",
    "read-only": "mount --bind {source} {at}\nmount -o remount,bind,ro,nosuid,nodev {at}",
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

    @property
    def links(self) -> dict[str, str]:
        """The rubric's folders: where each appears, with links to where it is mounted."""
        places = [os.path.normpath(self.cwd / at) for at in self.mounts]
        return {at: f"/mounted/{number}" for number, at in enumerate(places)}


def refused(task: Task) -> str | None:
    """Return why a task cannot run in a sandbox here, and what to do; None if it can."""
    try:
        with record_folder(None) as folder:
            # An empty submission: a student's torch.py must not refuse all others.
            (folder / "empty").mkdir()
            task = msgspec.structs.replace(task, submission=f"{folder}/empty", script="main.py")
            with sandbox(task, folder, []) as network:
                python, enter = task.words[0], network.prefixes[0]
                done, found = (
                    subprocess.run([*enter, *words], capture_output=True, text=True, timeout=120)
                    for words in (
                        (python, "-c", "import torch"),
                        ("find", *task.links.values(), "!", "-readable", "-print", "-quit"),
                    )
                )
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        return f"{error}: install the package bubblewrap, and allow user namespaces"
    if found.stdout.startswith("/mounted/"):
        return "not everybody may read the rubric's folders: chmod -R a+rX " + shlex.join(
            task.mounts.values()
        )
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
    root.mkdir()
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
            *(f"--data={task.memory_bytes}", f"--fsize={2 * task.disk_bytes}"),
            *("--as=unlimited", "--core=0", "--"),
            *("choom", "-n", "1000", "--", "env", "--chdir"),
        ]
        for at, source in {task.submission: "/submission", **task.links}.items():
            # Links to the data: scripts may write beside it.
            copy = ["cp", "-r", "-s" if at in task.links else "-P", f"{source}/.", at]
            subprocess.run([*enter, "/", *copy], stderr=subprocess.DEVNULL, timeout=120)
        # The records lie in memory, which stays as long as this is open.
        held = os.open(f"/proc/{first}/root{root}{records}", os.O_RDONLY | os.O_DIRECTORY)
        over, outside = threading.Event(), Path(f"/proc/self/fd/{held}")
        watch = threading.Thread(target=_watch, args=(task, first, outside, over, ended))
        watch.start()
        try:
            yield RunNetwork(prefixes=[[*enter, str(task.cwd)]], records=records, outside=outside)
        finally:
            over.set()
            watch.join()
            os.close(held)


def _mounting(task: Task, root: Path, records: Path) -> tuple[list[str], list[str]]:
    """Return the words that make the namespaces, and commands to run in them."""
    program = Path(shutil.which(task.words[0]) or sys.executable)
    system = [Path(one) for one in _SYSTEM if Path(one).exists()]
    # With the Python beside torchrun, but not what lies around other programs: ~ around ~/bin.
    own = [
        *(
            one.parents[1]
            for one in (program, program.resolve(), program.with_name("python").resolve())
            if (one.parents[1] / "pyvenv.cfg").exists() or [*one.parents[1].glob("lib*/python3*")]
        ),
        HOOK.parent,
    ]
    outside = [one for one in own if not {*system, Path("/")} & {one, *one.parents[:-1]}]
    readable = {
        **{str(one): str(one) for one in [*system, *outside]},
        **dict(zip(task.links.values(), task.mounts.values(), strict=True)),
        "/submission": task.submission,
    }
    apart = [at for at in task.links if not Path(at).is_relative_to(task.submission)]
    places = [*readable, *apart, task.submission, str(records)]
    folders = [str(one) for place in places for one in reversed(Path(place).parents[:-1])]
    mounts = [
        *(("folder", "", ""), ("memory", task.disk_bytes, "")),
        *(("folder", "", at) for at in ("/proc", "/dev", "/tmp")),
        *(("processes", "", "/proc"), ("devices", task.disk_bytes, "/dev")),
        ("memory", task.disk_bytes, "/tmp"),
        *(("folder", "", at) for at in dict.fromkeys([*folders, task.submission, str(records)])),
        ("memory", task.disk_bytes, task.submission),
        *(("folder", "", at) for at in dict.fromkeys([*folders, *readable, *apart])),
        *(("memory", task.disk_bytes, at) for at in [*apart, str(records)]),
        *(("read-only", source, at) for at, source in readable.items()),
        ("closed", "", ""),
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
    # The first process keeps all that an ordinary user's namespace allows: then those inside, who
    # have less, cannot trace it. It is outside of the chroot.
    words += [] if is_root else ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
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
    reason = ""
    while not (reason or over.is_set()):
        over.wait(_WATCH_SECONDS)  # and it looks once more at the end
        used, space = 0, os.statvfs(records)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                    # What forked loaders share with their rank counts once.
                    used += psutil.Process(pid).memory_full_info().pss
        reason = first_that_holds(
            {
                f"used more than {task.memory_bytes / 2**30:.3g} GB of memory": (
                    used > task.memory_bytes
                ),
                "left this machine without memory": (
                    psutil.virtual_memory().percent > _MOST_OF_MACHINE
                ),
                f"wrote more than {task.disk_bytes / 2**30:.3g} GB of records": (
                    # A probe that finds no room would fail unexplained.
                    space.f_bavail < space.f_blocks / 20
                    or space.f_files - space.f_ffree > _MOST_RECORDS
                ),
            }
        )
    if reason:
        ended.append(reason)
        with contextlib.suppress(psutil.Error):
            psutil.Process(first).kill()
