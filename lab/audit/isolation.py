"""Where a script's ranks run: loopback, a network with the names it needs, or emulated nodes.

Real scripts need an interface (``eth1``), an address or a host name of the cluster that they
were written for. ``isolated`` gives all ranks one network namespace that has them.
"""

import contextlib
import ipaddress
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.utils.processes import descendants, kill_on_parent_exit
from lab.audit.runner import RunNetwork
from lab.cluster import Cluster, tools
from lab.cluster.network import namespace

DEFAULT_INTERFACE = "eth1"
_ADDRESS = "10.9.1.1"
_INTERFACE = re.compile(r"(eth|en|eno|ens|enp|enx|em|ib|wlan|wlp|bond|br|hsn|lan)\d[\w.-]{0,12}")
_HOST = re.compile(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
_HOSTS = Path("/etc/hosts")
_READY = "ready"


@dataclass(frozen=True)
class Insisted:
    """The interfaces, addresses and host names that a script needs."""

    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]
    hosts: tuple[str, ...]

    @property
    def master(self) -> str:
        """The address of rank 0."""
        return self.addresses[0]

    def commands(self, hosts_file: Path) -> str:
        """Return the shell commands that make it, inside new namespaces."""
        first, own = self.interfaces[0], [f"10.9.{n + 1}.1" for n in range(len(self.interfaces))]
        lines = ["ip link set lo up"]
        for number, name in enumerate(self.interfaces):
            peer = f"peer{number}"
            pair = f"ip link add {name} type veth peer name {peer} && ip link set {peer} up"
            lines += [
                f"ip link add {name} type dummy 2>&- || {{ {pair}; }}",
                f"ip address add {own[number]}/24 dev {name}",
                f"ip link set {name} up",
            ]
        lines += [
            f"ip address add {address}/32 dev {first}"
            for address in self.addresses
            if address not in own
        ]
        lines.append(f"mount --bind {shlex.quote(str(hosts_file))} {_HOSTS}")
        lines += [f"hostname {host}" for host in self.hosts[:1]]
        return "\n".join(["set -e", *lines, f"echo {_READY}", "exec cat"])

    def host_lines(self) -> str:
        """Return the lines for ``/etc/hosts``."""
        return "".join(f"{self.master} {host}\n" for host in self.hosts)


def sort_names(names: Sequence[str]) -> Insisted:
    """Return what ``--isolate`` asks for. Raises UserError for what is no name or address."""
    interfaces, addresses, hosts = [], [], []
    for name in names:
        with contextlib.suppress(ValueError):
            addresses.append(str(ipaddress.IPv4Address(name)))
            continue
        if _INTERFACE.fullmatch(name):
            interfaces.append(name)
        elif _HOST.fullmatch(name) and not re.fullmatch(r"[\d.]+", name):
            hosts.append(name)
        else:
            raise UserError(
                f"--isolate: got {name!r}; give an interface (eth1), an IPv4 address or a host name"
            )
    return Insisted(
        tuple(interfaces or [DEFAULT_INTERFACE]), tuple(addresses or [_ADDRESS]), tuple(hosts)
    )


@contextlib.contextmanager
def isolated(names: Sequence[str], folder: Path, cwd: Path) -> Iterator[RunNetwork]:
    """Give all ranks of a run one network namespace with these interfaces, addresses and hosts.

    ``folder`` gets the file of their hosts. The namespace and everything in it ends with the
    ``with``, or with this process.
    Raises UserError if this machine allows no namespaces.
    """
    insisted = sort_names(names)
    if refused := tools.namespaces_refused():
        raise UserError(f"--isolate: this machine allows no network namespaces: {refused}")
    hosts = folder / "hosts"
    hosts.write_text(insisted.host_lines() + _HOSTS.read_text())
    with subprocess.Popen(
        [*(tools.unshare_command() or ()), "--uts", "sh", "-c", insisted.commands(hosts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=kill_on_parent_exit(),
        env=os.environ | {"PATH": tools.search_path()},
    ) as holder:
        try:
            assert holder.stdout is not None
            said = holder.stdout.readline().strip()
            if said != _READY:
                raise UserError(
                    f"--isolate {' '.join(names)}: could not set up the network: {said}"
                )
            inside = [*descendants(holder.pid), holder.pid][0]
            prefix = _enter(inside, cwd, network="--net")
            yield RunNetwork(insisted.master, insisted.interfaces[0], lambda rank: prefix)
        finally:
            holder.kill()  # unshare's child, the first process of the namespace, ends with it


@contextlib.contextmanager
def emulated(nodes: int, rate: str, cwd: Path) -> Iterator[RunNetwork]:
    """Give each rank a node of an emulated cluster with links of this rate, see ``Cluster``."""
    with Cluster(nodes, rate=rate, fresh=True) as cluster:
        inside = cluster.host_pid

        def prefix(rank: int) -> list[str]:
            file = f"/proc/{inside}/root/run/netns/{namespace(rank)}"
            return _enter(inside, cwd, network=f"--net={file}")

        yield RunNetwork(cluster.address(0), "eth0", prefix)


def _enter(pid: int, cwd: Path, *, network: str) -> list[str]:
    """Return the words that start a command in the namespaces of a process, in the folder cwd."""
    nsenter = shutil.which("nsenter", path=tools.search_path())
    if nsenter is None:
        raise UserError("nsenter is not installed: install the package util-linux")
    own_users = Path(f"/proc/{pid}/ns/user").samefile("/proc/self/ns/user")
    users = [] if own_users else ["--user", "--preserve-credentials"]
    kinds = ["--mount", "--uts", "--pid", network]
    change_folder = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
    return [nsenter, f"--target={pid}", *users, *kinds, "--", *change_folder]
