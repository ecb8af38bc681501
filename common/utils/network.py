"""This machine's addresses and interfaces, its route to another machine, and what answers there.

No torch here.
"""

import contextlib
import secrets
import socket
from itertools import chain

import psutil

from common.errors import reason_of
from common.utils.typed_json import calm

# What a client of torch's TCP store sends first: VALIDATE with its magic number, then PING with
# four bytes, which the store sends back (torch/csrc/distributed/c10d/TCPStore.cpp).
_VALIDATE = b"\x00" + (0x3C85F7CE).to_bytes(4, "little")
_PING = b"\x0d"
_PROMPT_SECONDS = 1.0  # for a program that waits for a line


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


def what_is_no_store(host: str, port: int, timeout_seconds: float) -> str:
    """Connect, and return what answers there instead of a TCP store of torch; "" if one does.

    torch's own client waits for a silent program without limit, and prints its stack after a wrong
    answer. Raises OSError if nothing accepts the connection within ``timeout_seconds``.
    """
    number = secrets.token_bytes(4)
    with socket.create_connection((host, port), timeout_seconds) as connection:
        try:
            answer = _answer(connection, _VALIDATE + _PING + number, nbytes=len(number))
        except OSError:
            return "it closes the connection"
    if answer == number:
        return ""
    if not answer:
        return f"it says nothing within {timeout_seconds:.2g} s, as a rank 0 that stands still"
    first_line = answer.partition(b"\r\n")[0][:60].decode("ascii", errors="backslashreplace")
    return f"it says '{calm(first_line)}'"


def _answer(connection: socket.socket, question: bytes, *, nbytes: int) -> bytes:
    """Return at least ``nbytes`` of the answer to a question; none if there is no answer in time.

    Raises ConnectionError if the connection ends before.
    """
    connection.sendall(question)
    answer = b""
    with contextlib.suppress(TimeoutError):
        while len(answer) < nbytes:
            answer += _receive(connection)
    if not answer:
        connection.settimeout(_PROMPT_SECONDS)
        connection.sendall(b"\r\n\r\n")  # a web server answers an empty line
        with contextlib.suppress(TimeoutError):
            answer = _receive(connection)
    return answer


def _receive(connection: socket.socket) -> bytes:
    part = connection.recv(200)
    if not part:
        raise ConnectionError
    return part


def port_holder(port: int) -> str:
    """Return the id and command of the process that listens on a port, if this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            # laddr is () where a socket has no address
            here = connection.laddr and connection.laddr.port == port
            if here and connection.status == psutil.CONN_LISTEN and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid}: {command[:100]}"
    return f"a process of another user (sudo ss -ltnp 'sport = :{port}' shows it)"
