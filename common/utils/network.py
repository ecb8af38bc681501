"""This machine's addresses and interfaces, and the route to another host. Imports no torch."""

import contextlib
import socket

import psutil


def route_to(host: str) -> str:
    """Return this machine's address on the route to ``host``.

    A datagram socket chooses the route and sends nothing. Raises OSError if the name is unknown
    or there is no route.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the interface that has this address; None if no interface has it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def is_own_address(host: str) -> bool:
    """Return whether one of the host's addresses is this machine's; False for an unknown name."""
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    with contextlib.suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
        return any(address in own or is_loopback(address) for address in found)
    return False


def is_loopback(address: str) -> bool:
    """Return whether the address reaches this machine only."""
    return address.startswith("127.") or address in ("::1", "localhost")
