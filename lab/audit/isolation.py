"""Where a script's ranks run, and that nothing of them is left, whatever the script does.

``record_folder`` is around the whole audit, ``run_network`` around each run, and ``end_processes``
ends a run. The ranks of a run share a process id namespace, which the kernel ends with everything
in it, and which ends if the audit is killed. Where a machine allows no namespaces, a process stays
that has left its parent and emptied its environment; and if the audit is killed, all that the ranks
themselves have started.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import psutil

from common.errors import UserError
from common.say import bytes_text
from common.utils.processes import descendants, start_child
from lab.cluster import Cluster, tools
from lab.cluster.network import namespace_file
from lab.fleet.namespaces import enter_words

# Waits for the end of the audit, however it comes; what is just being killed may still write.
_REMOVE = 'trap "" INT TERM HUP; cat; rm -rf "$0" || { sleep 2; rm -rf "$0"; }'
_POLL_SECONDS = 0.05
_ROOM_BYTES = 20_000_000
_KILL_SECONDS = 5.0
_NAMES = re.compile(
    r"(?P<interface>(?:eth|en|eno|ens|enp|enx|em|ib|wlan|wlp|bond|br|hsn|lan)\d[\w.-]{0,12})|"
    r"(?P<address>\d{1,3}(?:\.\d{1,3}){3})|"
    r"(?P<host>(?![\d.]+$)[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?)"
)
HOSTS = Path("/etc/hosts")
_INTERFACE = """\
ip link add {name} type veth peer name peer{number}
ip link set peer{number} up
ip address add 10.9.{number}.1/24 dev {name}
ip link set {name} up
"""
_OWN_PROCESSES = (
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
    *("--propagation", "slave"),  # file systems that are mounted later appear in it as well
)


@dataclass(frozen=True)
class RunNetwork:
    """Where the ranks run.

    master : the address of rank 0.
    interface : for Gloo.
    prefixes : the words before a command that bring it into its namespaces: by rank, or for all.
    records : the folder that the probe writes to; None: the run's own, where the output goes.
    outside : the same folder as this process finds it; None: at the same path.
    """

    master: str = "127.0.0.1"
    interface: str = "lo"
    prefixes: Sequence[Sequence[str]] = ((),)
    records: Path | None = None
    outside: Path | None = None


LOOPBACK = RunNetwork()


# --- around the whole audit ---


@contextlib.contextmanager
def record_folder(keep: Path | None) -> Iterator[Path]:
    """Make a folder for the records; at the end, or if this process is killed, remove it.

    SIGTERM and SIGHUP end this process as Ctrl-C does.

    keep : the folder to use instead, which stays.
    """
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(number, signal.default_int_handler)
            stack.callback(signal.signal, number, before)
        if keep is None:
            _check_room(Path(tempfile.gettempdir()))
            folder = Path(tempfile.mkdtemp(prefix="lab-audit-"))
            # Its stdin is closed when this process ends in any way: then it removes the folder.
            remove = ["sh", "-c", _REMOVE, str(folder)]
            stack.enter_context(
                subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True)
            )
        else:
            folder = keep
            folder.mkdir(parents=True, exist_ok=True)
            _check_room(folder)
        yield folder.absolute()


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _ROOM_BYTES:
        raise UserError(
            f"{folder} has {bytes_text(free)} free, and the ranks' output and records take up to "
            f"{bytes_text(_ROOM_BYTES)}: make room, or choose another folder (TMPDIR, --keep)"
        )


# --- the processes of a run ---


def running(pids: Iterable[int], folder: Path) -> list[psutil.Process]:
    """Return the processes of a run that still run.

    These are those with the given ids, their descendants, and all whose environment holds the
    probe's settings with the folder of the run.
    """
    named = json.dumps(str(folder))[1:-1]  # LAB_AUDIT is JSON, which escapes ü
    wanted: set[int] = set()
    for pid in pids:
        wanted |= {pid, *descendants(pid)}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # somebody else's, or it has ended
            ours = process.pid in wanted or named in process.environ().get("LAB_AUDIT", "")
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_processes(pids: Iterable[int], folder: Path, *, grace_seconds: float) -> None:
    """Send SIGTERM to all processes of a run, and SIGKILL to those left after a while.

    Returns after some seconds even if the kernel cannot end one that waits for a dead file system.
    """
    left = running(pids, folder)
    for number, wait_seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        for process in left:
            with contextlib.suppress(psutil.Error):  # it has ended; psutil knows a reused id
                process.send_signal(number)
        until = time.monotonic() + wait_seconds
        while left and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            left = running([process.pid for process in left], folder)


# --- the namespaces of a run ---


@contextlib.contextmanager
def run_network(
    nodes: int, folder: Path, cwd: Path, *, isolate: Sequence[str] | None, rate: str | None
) -> Iterator[RunNetwork]:
    """Make the namespaces in which the ranks of a run start; all that is in them ends with it.

    Without ``rate`` and ``isolate`` the ranks use this machine's loopback, and get process ids of
    their own, or nothing at all where the machine allows no namespaces.

    isolate : give all ranks one network with these interfaces, addresses and host names.
    rate : give each rank a node of an emulated cluster with links of this rate, see ``Cluster``.
    folder : of the run; gets the file of the isolated hosts.

    Raises UserError if this machine allows no namespaces for ``isolate`` or ``rate``.
    """
    if rate is not None:
        with Cluster(nodes, rate=rate, fresh=True) as cluster:
            prefixes = []
            for node in range(nodes):
                file = f"/proc/{cluster.host_pid}/root{namespace_file(node)}"
                prefixes.append(_enter(cluster.host_pid, cwd, "--uts", f"--net={file}"))
            yield RunNetwork(cluster.address(0), "eth0", prefixes)
    elif isolate is not None:
        interfaces, addresses, hosts = sort_names(isolate)
        if refused := tools.namespaces_refused():
            raise UserError(f"--isolate: this machine allows no network namespaces: {refused}")
        unshare = tools.unshare_command()
        assert unshare is not None  # since namespaces are not refused
        hosts_file = write_hosts(folder, addresses[0], hosts)
        commands = ["ip link set lo up", *interface_commands(interfaces, addresses)]
        commands.append(f"mount --bind {shlex.quote(str(hosts_file))} {HOSTS}")
        if hosts:
            commands.append(f"hostname {hosts[0]}")
        with held_namespaces([*unshare, "--uts"], commands) as pid:
            yield RunNetwork(addresses[0], interfaces[0], [_enter(pid, cwd, "--uts", "--net")])
    elif own_processes := tools.unshare_command(_OWN_PROCESSES, "--map-current-user"):
        with held_namespaces(own_processes, []) as pid:
            yield RunNetwork(prefixes=[_enter(pid, cwd)])
    else:
        yield LOOPBACK


def write_hosts(folder: Path, address: str, hosts: Sequence[str]) -> Path:
    """Write a file of hosts in which these names, too, have an address; return its path."""
    file = folder / "hosts"
    lines = [f"{address} {host}\n" for host in hosts]
    file.write_bytes("".join(lines).encode() + HOSTS.read_bytes())
    return file


def interface_commands(interfaces: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Return the commands that make these interfaces; the first one gets the addresses."""
    commands = []
    for number, name in enumerate(interfaces, start=1):
        commands.append(_INTERFACE.format(name=name, number=number))
    commands += [f"ip address replace {address}/32 dev {interfaces[0]}" for address in addresses]
    return commands


def sort_names(names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the interfaces, addresses and host names that ``--isolate`` asks for.

    There is at least one interface and one address. Raises UserError for what is none of them.
    """
    found: dict[str | None, list[str]] = defaultdict(list)
    for name in names:
        match = _NAMES.fullmatch(name)
        if match is None:
            raise UserError(
                f"--isolate: got {name!r}; give an interface (eth1), an IPv4 address or a host name"
            )
        found[match.lastgroup].append(name)
    interfaces = found["interface"] or ["eth1"]
    return interfaces, found["address"] or ["10.9.1.1"], found["host"]


@contextlib.contextmanager
def held_namespaces(unshare: Sequence[str], commands: Sequence[str]) -> Iterator[int]:
    """Keep namespaces that ``commands`` have set up; yield the id of their first process.

    Raises UserError if a command fails.
    """
    script = "\n".join(["set -e", *commands, "echo ready", "exec cat"])
    with start_child(
        [*unshare, "sh", "-c", script],
        stdin=subprocess.PIPE,  # once it is closed, cat ends, and the kernel ends all the others
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PATH": tools.search_path()},
    ) as holder:
        said = cast(IO[str], holder.stdout).readline().strip()
        if said != "ready":
            raise UserError(f"could not set up the namespaces of the ranks: {said}")
        try:
            inner = descendants(holder.pid)  # with --fork the shell is a child of unshare
            yield inner[0] if inner else holder.pid
        finally:
            cast(IO[str], holder.stdin).close()
            # The kernel waits for every process in there. One whose new parent, outside, does not
            # collect it would be waited for without end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                holder.wait(timeout=10)
            holder.kill()


def _enter(pid: int, cwd: Path, *kinds: str) -> list[str]:
    """Return the words that start a command in the namespaces of a process, in the folder cwd."""
    change_folder = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
    return [*enter_words(pid, "--mount", "--pid", *kinds), *change_folder]
