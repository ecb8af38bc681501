"""The sandbox of one run: a stranger's ranks see a system that they cannot change.

``sandbox`` makes namespaces of its own with bubblewrap: a network with loopback alone; process
ids, whose first process takes all others along; and a file system in which the system's folders,
the script's Python, the probe and the rubric's folders are read-only, and a copy of the submission
lies in memory. Processes run in a ``chroot``, so that they cannot make further namespaces, as an
ordinary user, under limits; limits.py ends them when memory or records grow too large.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec

from common.errors import UserError
from lab.audit.isolation import (
    HOSTS,
    RunNetwork,
    held_namespaces,
    interface_commands,
    record_folder,
    sort_names,
    write_hosts,
)
from lab.audit.runner import HOOK
from lab.cluster import tools
from lab.explain.diagnosis import failure_in
from lab.fleet.namespaces import enter_words
from lab.grade.driven import RUNNER
from lab.grade.findings import OwnFinding
from lab.grade.limits import Watched, watch

_PROGRAM = "bwrap"  # bubblewrap's
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
_MOUNTED = "/mounted"  # has the rubric's folders
_NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--uts")
# Root grades as one of these users, chosen by its process: a limit of processes counts all that a
# user has, also in the sandbox of another part.
_FIRST_USER = 61_000
_USERS = 4_000


class Task(msgspec.Struct, kw_only=True):
    """A part to audit.

    Parameters
    ----------
    words : the command of a rank, see ``AuditCommand``.
    submission : the folder of the whole submission; it appears to the ranks at the same path.
    script : relative to it.
    start : the folder in which the ranks start, relative to it.
    environment : variables of the ranks.
    names : interfaces, addresses and host names of the sandbox's network, besides loopback.
    folders : made before the ranks start; absolute.
    changes : in what this differs from the demanded command, as sentences.
    driver : the file of the program that checks it; "" without one. driven_part : its name there.
    findings : what the driver may name.
    may_change : whether another command may be tried if the script refuses this one.
    facts : the file to write, with a page beside it.
    key : stays in the facts.
    mounts : the rubric's folders by where they appear.
    memory_bytes, processes : limits of all its processes together. The files that it writes lie in
        memory, and count; see limits.py.
    disk_bytes : the limit of each of its folders.
    sandboxed : False runs the script with the rights of this process, or of an ordinary user.
    as_user : whether this process is root, and runs it as an ordinary user.
    """

    words: list[str]
    ranks: list[int]
    submission: str
    script: str
    start: str = "."
    environment: dict[str, str] = {}
    names: list[str] = []
    folders: list[str] = []
    changes: list[str] = []
    driver: str = ""
    driven_part: str = ""
    findings: dict[str, OwnFinding] = {}
    may_change: bool = True
    facts: str
    key: str
    mounts: dict[str, str]
    memory_bytes: int
    disk_bytes: int
    processes: int
    limit_seconds: float
    sandboxed: bool
    as_user: bool = False

    @property
    def is_driven(self) -> bool:
        """Whether a driver checks it."""
        return bool(self.driver)

    @property
    def cwd(self) -> Path:
        """The folder in which the ranks start."""
        return Path(self.submission) / self.start

    @property
    def program(self) -> str:
        """The program that a rank starts, such as Python."""
        if self.words[0] != "env":
            return self.words[0]
        return next(word for word in self.words[1:] if "=" not in word)

    @property
    def links(self) -> dict[str, str]:
        """The rubric's folders: where each appears, with links to where it is mounted."""
        places = [os.path.normpath(self.cwd / at) for at in self.mounts]
        return {at: f"{_MOUNTED}/{number}" for number, at in enumerate(places)}


def refused(task: Task) -> str | None:
    """Return why a task cannot run in a sandbox here, and what to do; None if it can."""
    if shutil.which(_PROGRAM, path=tools.search_path()) is None:
        return (
            "bubblewrap is not installed: install the package bubblewrap on a Linux machine, for "
            "example by sudo apt-get install bubblewrap"
        )
    try:
        with record_folder(None) as folder:
            # An empty submission: a student's torch.py must not refuse all others.
            (folder / "empty").mkdir()
            trial = msgspec.structs.replace(task, submission=f"{folder}/empty", start=".")
            with sandbox(trial, folder, []) as network:
                enter = network.prefixes[0]
                imported = _run_inside(enter, task.program, "-c", "import torch")
                mounted = [*trial.links.values(), *filter(None, [task.driver])]
                unreadable = ("!", "-readable", "-print", "-quit")
                found = _run_inside(enter, "find", *mounted, *unreadable)
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        return f"{error}: allow user namespaces"
    if mounted and found.stdout:
        files = shlex.join([*task.mounts.values(), *filter(None, [task.driver])])
        return f"not everybody may read what the rubric names: chmod -R a+rX {files}"
    program = task.program
    if imported.returncode != 0 and Path(program).name.startswith("python"):
        return f"{program} cannot import torch in it ({failure_in(imported.stderr).said})"
    return None


def _run_inside(enter: Sequence[str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*enter, *words], capture_output=True, text=True, timeout=120)


@contextlib.contextmanager
def sandbox(task: Task, folder: Path, ended: list[str]) -> Iterator[RunNetwork]:
    """Keep a sandbox for one run; yield where its ranks start.

    folder : of the run; the records are written below it.
    ended : gets the reason if the sandbox ends what runs in it.

    Raises FileNotFoundError without bubblewrap, and UserError if the namespaces cannot be made.
    """
    root = folder / "root"
    records = folder / "records"
    root.mkdir()
    interfaces, addresses, hosts = sort_names(task.names)
    commands = interface_commands(interfaces, addresses) if task.names else []
    hosts_file = write_hosts(folder, addresses[0], hosts)
    namespaces = _bubblewrap(task, root, records, hosts_file)
    with held_namespaces(namespaces, commands) as first:
        enter = _enter(task, root, first)
        _copy_in(task, enter)
        # The records lie in memory, which stays as long as this is open.
        held = _open_folder(first, f"{root}{records}")
        outside = Path(f"/proc/self/fd/{held}")
        watched = Watched(
            first=first,
            folders=[_open_folder(first, at) for at in _memories_in(namespaces)],
            records=outside,
            memory_bytes=task.memory_bytes,
            disk_bytes=task.disk_bytes,
        )
        over = threading.Event()
        watcher = threading.Thread(target=watch, args=(watched, over, ended))
        watcher.start()
        network = RunNetwork(prefixes=[[*enter, str(task.cwd)]], records=records, outside=outside)
        if task.names:
            network = replace(network, master=addresses[0], interface=interfaces[0])
        try:
            yield network
        finally:
            over.set()
            watcher.join()
            os.close(held)


def _open_folder(first: int, path: str) -> int:
    """Open a folder as the first process in the namespaces finds it."""
    return os.open(f"/proc/{first}/root{path}", os.O_RDONLY | os.O_DIRECTORY)


def _enter(task: Task, root: Path, first: int) -> list[str]:
    """Return the words that start a command in the sandbox; the folder to start in comes next.

    Root becomes an ordinary user in the chroot. An ordinary user is root in namespaces that hold
    nothing else, and gives up all that this allows.

    first : the id of the first process in the namespaces.
    """
    is_root = os.geteuid() == 0
    words = [*enter_words(first, *_NAMESPACES), "chroot"]
    if is_root:
        user = ordinary_user()
        words += [f"--userspec={user}:{user}", "--groups="]
    words += [str(root), "setpriv"]
    if not is_root:
        words += ["--bounding-set=-all"]
    words += ["--no-new-privs", "prlimit", f"--nproc={task.processes}"]
    words += [f"--data={task.memory_bytes}", f"--fsize={2 * task.disk_bytes}"]
    words += ["--as=unlimited", "--core=0", "--"]
    words += ["choom", "-n", "1000", "--", "env", "--chdir"]
    return words


def ordinary_user() -> int:
    """Return the id of the user, and of the group, as which root runs this process's part."""
    return _FIRST_USER + os.getpid() % _USERS


def _copy_in(task: Task, enter: Sequence[str]) -> None:
    """Copy the submission to where the ranks find it, with links to the rubric's folders.

    The links lie in folders of the run's own: scripts may write beside the data.
    """
    in_root = [*enter, "/"]
    copies = [["-P", "/submission/.", task.submission]]
    copies += [["-s", f"{source}/.", at] for at, source in task.links.items()]
    commands = [["cp", "-r", *words] for words in copies]
    commands += [["mkdir", "-p", folder] for folder in task.folders]
    for words in commands:
        subprocess.run([*in_root, *words], stderr=subprocess.DEVNULL, timeout=120)


# --- what is mounted ---


def _bubblewrap(task: Task, root: Path, records: Path, hosts_file: Path) -> list[str]:
    """Return the words that make the namespaces."""
    words = [_PROGRAM, "--die-with-parent", "--as-pid-1", "--chdir", "/"]
    for name in _NAMESPACES:
        if name != "--mount":
            words.append(name.replace("--", "--unshare-"))
    if os.geteuid() != 0:
        # The first process keeps all that an ordinary user's namespace allows: then those inside,
        # who have less, cannot trace it. It is outside of the chroot.
        words += ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    system = [Path(name) for name in _SYSTEM if Path(name).exists()]
    for folder in system:  # for the first process, which stays outside of the chroot
        words += ["--ro-bind", str(folder), str(folder)]
    words += _mounts(task, system, root, records)
    if task.names:
        words += ["--ro-bind", str(hosts_file), f"{root}{HOSTS}"]
    return [*words, "--remount-ro", str(root), "--remount-ro", "/"]


def _mounts(task: Task, system: Sequence[Path], root: Path, records: Path) -> list[str]:
    """Return bubblewrap's words for the file system of the ranks, in the order of their making.

    Everything is read-only at the end but the memories: /tmp, /dev/shm, the submission, the
    records, and the folders with links to the rubric's data.

    system : the folders of this machine that every program needs.
    """
    readable = {str(folder): str(folder) for folder in [*system, *_own_folders(task, system)]}
    readable |= zip(task.links.values(), task.mounts.values(), strict=True)
    readable["/submission"] = task.submission
    places = [*task.links, *_memories(task, [*readable, str(records)])]
    links = [at for at in places if not Path(at).is_relative_to(task.submission)]
    parents: list[str] = []
    drivers = [task.driver] if task.driver else []
    for place in [*readable, *links, *drivers, task.submission, str(records)]:
        above = Path(place).parents[:-1]  # without "/"
        parents += [str(parent) for parent in reversed(above)]

    words = _folders(root, [""])
    words += _memory(task, root, "")
    words += _folders(root, ["/proc", "/dev", "/tmp"])
    words += ["--proc", f"{root}/proc", "--dev", f"{root}/dev"]
    words += _memory(task, root, "/dev/shm")
    words += ["--remount-ro", f"{root}/dev"]
    words += _memory(task, root, "/tmp")
    words += _folders(root, [*parents, task.submission, str(records)])
    words += _memory(task, root, task.submission)
    # Once more: what lies in the submission is hidden by its memory.
    words += _folders(root, [*parents, *readable, *links])
    for at in [*links, str(records)]:
        words += _memory(task, root, at)
    for at, source in readable.items():
        words += ["--ro-bind", source, f"{root}{at}"]
    for file in drivers:
        if not _is_in(Path(file), [Path(at) for at in readable]):
            words += ["--ro-bind", file, f"{root}{file}"]
    return words


def _memories(task: Task, taken: Sequence[str]) -> Iterator[str]:
    """Yield the folders to make that lie where nothing else does, and no rank may write.

    taken : what is mounted besides.
    """
    closed = [task.submission, "/tmp", "/dev", "/proc", _MOUNTED, *_SYSTEM]
    for folder in task.folders:
        is_above = any(Path(place).is_relative_to(folder) for place in [*taken, *closed])
        if not is_above and not _is_in(Path(folder), list(map(Path, closed))):
            yield folder


def _memory(task: Task, root: Path, at: str) -> list[str]:
    size = min(task.disk_bytes, task.memory_bytes)
    return ["--size", str(size), "--perms", "1777", "--tmpfs", f"{root}{at}"]


def _memories_in(words: Sequence[str]) -> list[str]:
    """Return where bubblewrap mounts memory by these words."""
    return [at for option, at in pairwise(words) if option == "--tmpfs"]


def _folders(root: Path, places: Sequence[str]) -> list[str]:
    words: list[str] = []
    for at in dict.fromkeys(places):
        words += ["--perms", "0777", "--dir", f"{root}{at}"]
    return words


def _own_folders(task: Task, system: Sequence[Path]) -> list[Path]:
    """Return the folders that a script needs besides the system's: its Python, and the probe's."""
    program = Path(shutil.which(task.program) or sys.executable)
    folders: list[Path] = []
    # With the Python beside torchrun, but not what lies around other programs: ~ around ~/bin.
    for file in (program, program.resolve(), program.with_name("python").resolve()):
        folder = file.parents[1]
        if (folder / "pyvenv.cfg").exists() or any(folder.glob("lib*/python3*")):
            folders.append(folder)
    folders += [HOOK.parent, RUNNER]
    return [folder for folder in folders if not _is_in(folder, system)]


def _is_in(folder: Path, system: Sequence[Path]) -> bool:
    """Return whether a folder needs no mount of its own; nor may "/", which holds everything."""
    if folder == Path("/"):
        return True
    return any(folder.is_relative_to(place) for place in system)
