"""Where a script's ranks run, and that nothing of them is left, whatever the script does.

``record_folder`` is around the whole audit, ``run_network`` around each run, and ``end_processes``
ends a run. The ranks of a run share a process id namespace, which the kernel ends with everything
in it, and which ends if the audit is killed. Where a machine allows no namespaces, a process can
outlive the audit if it has left its parent and session, and emptied its environment as well.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import psutil

from common.errors import UserError
from common.utils.paths import REPOSITORY
from common.utils.processes import descendants, kill_on_parent_exit
from lab.cluster import Cluster, tools
from lab.cluster.network import namespace

TEMPORARY = "lab-audit-"
"""Begins the name of a folder that is removed at the end."""
_GUARD_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lab.audit.isolation import guard; guard(sys.argv[2])"
)
_POLL_SECONDS, _KILL_SECONDS = 0.05, 5.0
_NAMES = (
    re.compile(r"(eth|en|eno|ens|enp|enx|em|ib|wlan|wlp|bond|br|hsn|lan)\d[\w.-]{0,12}"),
    re.compile(r"\d{1,3}(\.\d{1,3}){3}"),
    re.compile(r"(?![\d.]+$)[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"),
)
"""Names of interfaces, addresses, and names of hosts: the first that fits counts."""
_HOSTS = Path("/etc/hosts")
_READY = "ready"
_OWN_PROCESSES = (
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
    *("--propagation", "slave"),  # file systems that are mounted later appear in it as well
)


@dataclass(frozen=True)
class RunNetwork:
    """Where the ranks run.

    master : the address of rank 0.
    interface : for Gloo.
    prefix : returns the words before a rank's command that bring it into its namespaces.
    """

    master: str = "127.0.0.1"
    interface: str = "lo"
    prefix: Callable[[int], Sequence[str]] = lambda rank: ()


# --- around the whole audit ---


@contextlib.contextmanager
def record_folder(keep: Path | None) -> Iterator[Path]:
    """Make a folder for the records; at the end, or if this process is killed, leave nothing.

    SIGTERM and SIGHUP end this process as Ctrl-C does, and a guard process waits for its end.
    keep : a folder that stays.
    """
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY)) if keep is None else keep.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    guarding = subprocess.Popen(
        [sys.executable, "-P", "-c", _GUARD_CODE, str(REPOSITORY), str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield folder
    finally:
        guarding.communicate()  # closes its stdin
        for number, handler in before.items():
            signal.signal(number, handler)


def guard(folder: str) -> None:
    """Wait until stdin is closed, then kill what a run has left; called in a process of its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    end_processes(Path(folder), [], grace_seconds=0.0)
    if os.path.basename(folder).startswith(TEMPORARY):
        shutil.rmtree(folder, ignore_errors=True)


# --- the processes of a run ---


def processes_of(folder: Path, pids: Iterable[int]) -> dict[int, psutil.Process]:
    """Return what runs of a run: ``pids``, their descendants, and whoever inherited its settings.

    The settings name ``folder``. They show also processes that have left their parent and session.
    """
    wanted = set(pids)
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():  # parents before children, but for ids that begin anew
        with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):
            if process.pid not in wanted and process.ppid() not in found:
                settings = json.loads(process.environ()["LAB_AUDIT"])
                if not Path(settings["folder"]).is_relative_to(folder):
                    continue
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
    return found


def work_done(processes: Iterable[psutil.Process]) -> float:
    """Return the seconds that processes have computed, and 0.1 s for each MB written to files."""
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error, AttributeError):  # macOS does not count bytes
            times = process.cpu_times()
            seconds += times.user + times.system
            seconds += process.io_counters().write_chars / 1e7
    return seconds


def end_processes(folder: Path, pids: Iterable[int], *, grace_seconds: float) -> None:
    """Send SIGTERM to all processes of a run, and SIGKILL to those left after ``grace_seconds``."""
    pids, asked = list(pids), set[int]()
    polite_until = time.monotonic() + grace_seconds
    while left := processes_of(folder, pids):
        now = time.monotonic()
        if now > polite_until + _KILL_SECONDS:
            return  # the kernel itself cannot end what waits for a dead file system
        number = signal.SIGTERM if now < polite_until else signal.SIGKILL
        for process in left.values():
            if number == signal.SIGKILL or process.pid not in asked:
                with contextlib.suppress(psutil.Error):  # it has ended; psutil knows a reused id
                    process.send_signal(number)
        asked |= left.keys()
        time.sleep(_POLL_SECONDS)


# --- the namespaces of a run ---


@contextlib.contextmanager
def run_network(
    nodes: int, folder: Path, cwd: Path, *, isolate: Sequence[str] | None, rate: str | None
) -> Iterator[RunNetwork]:
    """Make the namespaces in which the ranks of a run start; all that is in them ends with it.

    isolate : give all ranks one network with these interfaces, addresses and host names.
    rate : give each rank a node of an emulated cluster with links of this rate, see ``Cluster``.
    folder : of the run; gets the file of the isolated hosts.

    Raises UserError if this machine allows no namespaces for ``isolate`` or ``rate``.
    """
    if rate is not None:
        with Cluster(nodes, rate=rate, fresh=True) as cluster:
            netns = f"/proc/{cluster.host_pid}/root/run/netns"
            prefixes = [
                _enter(cluster.host_pid, cwd, "--uts", f"--net={netns}/{namespace(node)}")
                for node in range(nodes)
            ]
            yield RunNetwork(cluster.address(0), "eth0", lambda rank: prefixes[rank])
    elif isolate is not None:
        interfaces, addresses, hosts = sort_names(isolate)
        if refused := tools.namespaces_refused():
            raise UserError(f"--isolate: this machine allows no network namespaces: {refused}")
        file = folder / "hosts"
        file.write_text("".join(f"{addresses[0]} {host}\n" for host in hosts) + _HOSTS.read_text())
        commands = _network_commands(interfaces, addresses, hosts, file)
        with _held([*(tools.unshare_command() or ()), "--uts"], commands) as pid:
            prefix = _enter(pid, cwd, "--uts", "--net")
            yield RunNetwork(addresses[0], interfaces[0], lambda rank: prefix)
    elif unshare := tools.unshare_command(_OWN_PROCESSES, "--map-current-user"):
        with _held(unshare, []) as pid:
            own = _enter(pid, cwd)
            yield RunNetwork(prefix=lambda rank: own)
    else:
        yield RunNetwork()


def sort_names(names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the interfaces, addresses and host names that ``--isolate`` asks for.

    There is at least one interface and one address. Raises UserError for what is none of them.
    """
    sorted_names: tuple[list[str], list[str], list[str]] = ([], [], [])
    for name in names:
        fitting = [kind for kind, pattern in enumerate(_NAMES) if pattern.fullmatch(name)]
        if not fitting:
            raise UserError(
                f"--isolate: got {name!r}; give an interface (eth1), an IPv4 address or a host name"
            )
        sorted_names[fitting[0]].append(name)
    interfaces, addresses, hosts = sorted_names
    return interfaces or ["eth1"], addresses or ["10.9.1.1"], hosts


def _network_commands(
    interfaces: Sequence[str], addresses: Sequence[str], hosts: Sequence[str], hosts_file: Path
) -> list[str]:
    """Return the shell commands that make the network, inside new namespaces."""
    lines = ["set -e", "ip link set lo up"]
    for number, name in enumerate(interfaces):
        peer = f"peer{number}"
        lines += [
            f"ip link add {name} type veth peer name {peer}",
            f"ip link set {peer} up",
            f"ip address add 10.9.{number + 1}.1/24 dev {name}",
            f"ip link set {name} up",
        ]
    for address in addresses:
        lines.append(f"ip address replace {address}/32 dev {interfaces[0]}")
    lines.append(f"mount --bind {shlex.quote(str(hosts_file))} {_HOSTS}")
    return [*lines, *(f"hostname {host}" for host in hosts[:1])]


@contextlib.contextmanager
def _held(unshare: Sequence[str], commands: Sequence[str]) -> Iterator[int]:
    """Keep namespaces that ``commands`` have set up; yield the id of their first process."""
    with subprocess.Popen(
        [*unshare, "sh", "-c", "\n".join([*commands, f"echo {_READY}", "exec cat"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=kill_on_parent_exit(),
        env=os.environ | {"PATH": tools.search_path()},
    ) as holder:
        try:
            said = cast(IO[str], holder.stdout).readline().strip()
            if said != _READY:
                raise UserError(f"could not set up the namespaces of the ranks: {said}")
            yield [*descendants(holder.pid), holder.pid][0]
        finally:
            holder.kill()  # unshare's child, the first process of the namespaces, ends with it


def _enter(pid: int, cwd: Path, *kinds: str) -> list[str]:
    """Return the words that start a command in the namespaces of a process, in the folder cwd."""
    nsenter = shutil.which("nsenter", path=tools.search_path())
    if nsenter is None:
        raise UserError("nsenter is not installed: install the package util-linux")
    own_users = Path(f"/proc/{pid}/ns/user").samefile("/proc/self/ns/user")
    users = [] if own_users else ["--user", "--preserve-credentials"]
    change_folder = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
    return [nsenter, f"--target={pid}", *users, "--mount", "--pid", *kinds, "--", *change_folder]
