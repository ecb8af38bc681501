"""This machine's addresses and interfaces, and its route to another machine. No torch here."""

import contextlib
import socket
from itertools import chain

import psutil

from common.errors import reason_of


def resolve(host: str) -> set[str]:
    """Return the addresses of a host name or address; none if the name is unknown."""
    with contextlib.suppress(OSError, UnicodeError):  # a part of more than 63 characters
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return set()


def route_to(host: str) -> str:
    """Return this machine's address on the route to ``host``.

    Raises OSError if the name is unknown or there is no route.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket chooses a route and sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface that has the address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def own_addresses() -> list[str]:
    """Return this machine's IP addresses, without loopback and link-local ones."""
    addresses = []
    for entry in chain.from_iterable(psutil.net_if_addrs().values()):
        is_ip = entry.family in (socket.AF_INET, socket.AF_INET6)
        is_link_local = "%" in entry.address  # fe80::1%eth0
        if is_ip and not is_link_local and not is_loopback(entry.address):
            addresses.append(entry.address)
    return addresses


def is_own(host: str) -> bool:
    """Return whether one of the addresses of ``host`` is one of this machine's."""
    own = {entry.address for entry in chain.from_iterable(psutil.net_if_addrs().values())}
    return any(address in own or is_loopback(address) for address in resolve(host))


def listening_address(host: str) -> tuple[str, str]:
    """Return the address at which to listen so that others reach ``host``, this machine.

    "" stands for all addresses of this machine; then the second text says why they are needed.
    """
    addresses = resolve(host)
    if not is_own(host):
        return "", f"{host} is not an address of this machine"
    if is_loopback(host):
        return min(addresses), ""  # 127.0.0.1 of localhost, which may be ::1, too
    if len(addresses) > 1 or is_loopback(*addresses):
        return "", f"other machines may know {host} by another address"
    return addresses.pop(), ""


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine, or at all of them ("").

    Raises OSError, with EADDRINUSE if the port is taken.
    """
    if address:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place, family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def why_unreached(error: Exception) -> str:
    """Return why a connection failed, in a few words."""
    return "no answer" if isinstance(error, TimeoutError) else reason_of(error).lower()


def is_loopback(address: str) -> bool:
    """Return whether the address reaches no other machine."""
    return address.startswith("127.") or address in ("::1", "localhost")
