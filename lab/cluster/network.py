"""The network inside: a bridge, and for each node a namespace with one link to it, shaped at both ends.

Order: the process that owns the namespaces (node_supervisor.py) calls ``build`` once, then ``shape``, ``cut``, ``join`` and
``traffic``. Uses the system's ``ip`` and ``tc``.
"""

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.9.0"
MOST_NODES = 250
_BRIDGE = "lab0"
_COMMAND_SECONDS = 30.0
_NAMES = Path("/etc/hosts")
_NAMES_HERE = Path("/run/hosts")


@dataclass(frozen=True)
class Link:
    """Of every node: bits a second and seconds from one node to another; None is without a limit, without a delay."""

    rate_bits: float | None = None
    latency_seconds: float | None = None


def address(node: int) -> str:
    """Return a node's address."""
    return f"{SUBNET}.{node + 1}"


def namespace(node: int) -> str:
    """Return the name of a node's network namespace, and where ``ip netns`` keeps it."""
    return f"node{node}"


def namespace_file(node: int) -> Path:
    """Return the file that stands for a node's network namespace, inside the cluster."""
    return Path("/run/netns", namespace(node))


def build(nodes: int, link: Link) -> None:
    """Make bridge, namespaces and links, and give each node its name (``node0``, ...) beside its address.

    Needs a network and a mount namespace of its own. The kernel takes all of it away with the last process inside.
    """
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    _ip(
        [
            f"link add {_BRIDGE} type bridge",
            f"link set {_BRIDGE} addrgenmode none",
            f"link set {_BRIDGE} up",
            "link set lo up",
        ]
    )
    for node in range(nodes):
        _run("ip", "netns", "add", namespace(node))
    _ip(
        line
        for node in range(nodes)
        for line in (
            f"link add {_end(node)} type veth peer name eth0 netns {namespace(node)}",
            f"link set {_end(node)} addrgenmode none",
            f"link set {_end(node)} master {_BRIDGE} up",
        )
    )
    for node in range(nodes):
        _ip(
            [
                "link set lo up",
                "link set eth0 addrgenmode none",
                f"address add {address(node)}/24 dev eth0",
                "link set eth0 up",
            ],
            node=node,
        )
        shape(node, link)
    _NAMES_HERE.write_text(
        _NAMES.read_text()
        + "".join(f"{address(node)} {namespace(node)}\n" for node in range(nodes))
    )
    _run("mount", "--bind", str(_NAMES_HERE), str(_NAMES))


def shape(node: int, link: Link) -> None:
    """Limit a node's link both ways: what it sends at its own end, what it receives at the bridge's. The delay is added where it
    sends, so once on each way."""
    ends = (
        (["tc", "-netns", namespace(node), "qdisc"], "eth0", link.latency_seconds),
        (["tc", "qdisc"], _end(node), None),
    )
    for tc, device, latency in ends:
        _run(*tc, "delete", "dev", device, "root", may_fail=True)
        parent = ["root"]
        if link.rate_bits is not None:
            limit = f"tbf rate {link.rate_bits:.0f}bit burst {_burst(link.rate_bits)} limit 2mb"
            _run(*tc, "add", "dev", device, *parent, "handle", "1:", *limit.split())
            parent = ["parent", "1:"]
        if latency is not None:
            delay = f"netem delay {latency * 1e6:.0f}us limit 100000"
            _run(*tc, "add", "dev", device, *parent, "handle", "2:", *delay.split())


def _burst(rate_bits: float) -> str:
    """More than one packet of 64 KB as the kernel hands it over; less costs a third of the rate (measured)."""
    return "256kb" if rate_bits >= 500e6 else "128kb"


def cut(node: int) -> None:
    """Take a node's link down at the bridge: no process is notified, packets are lost."""
    _ip([f"link set {_end(node)} down"])


def join(node: int) -> None:
    """Bring a node's link up again."""
    _ip([f"link set {_end(node)} up"])


def traffic(nodes: int) -> list[list[int]]:
    """Return for each node the bytes and packets that it sent, then those that it received, headers of Ethernet included.

    Packets as the kernel hands them over, up to 64 KB each: what a network card would cut into frames.
    """
    links = {
        link["ifname"]: link["stats64"]
        for link in json.loads(_run("ip", "-json", "-statistics", "link", "show"))
    }
    return [
        [links[_end(node)][way][what] for way in ("rx", "tx") for what in ("bytes", "packets")]
        for node in range(nodes)
    ]


def _end(node: int) -> str:
    """The bridge's end of a node's link."""
    return f"veth{node}"


def _ip(lines: Iterable[str], *, node: int | None = None) -> None:
    inside = [] if node is None else ["-netns", namespace(node)]
    _run("ip", *inside, "-batch", "-", words="\n".join(lines))


def _run(*command: str, words: str = "", may_fail: bool = False) -> str:
    done = subprocess.run(
        command, input=words, capture_output=True, text=True, timeout=_COMMAND_SECONDS
    )
    if done.returncode and not may_fail:
        raise RuntimeError(f"`{_shown(command)}` says: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _shown(command: Sequence[str]) -> str:
    return " ".join(command)
