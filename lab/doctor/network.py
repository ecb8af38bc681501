"""Checks of this node's side of the network: the route to the master, the host's name, the port. The rest: node_exchange.py."""

import contextlib
import os
import socket
from collections.abc import Callable

import psutil

from lab.doctor.check_result import CheckRequest, CheckResult, failure, ok, reason, warning

_PROBE_SECONDS = 5.0
_OWN_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def route_to(host: str) -> str:
    """Return this node's address on the route to ``host`` (a datagram socket chooses the route and sends nothing). OSError
    where the name is unknown or there is no route."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def interface_of(address: str) -> str | None:
    """Return the interface that has this address."""
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(entry.address == address for entry in addresses)
        ),
        None,
    )


def own_addresses() -> list[str]:
    """Return this node's IPv4 addresses, those of loopback last."""
    found = [
        entry.address
        for addresses in psutil.net_if_addrs().values()
        for entry in addresses
        if entry.family == socket.AF_INET
    ]
    return sorted(found, key=_is_loopback)


def is_own(host: str) -> bool:
    """Whether a host's address is one of this node's."""
    own = {entry.address for addresses in psutil.net_if_addrs().values() for entry in addresses}
    with contextlib.suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
        return any(address in own or _is_loopback(address) for address in found)
    return False


def check_interface(request: CheckRequest) -> CheckResult | None:
    """The interface that routes to the master; it is what the parts choose."""
    if request.master_ip is None:
        return None
    try:
        own = route_to(request.master_ip)
    except socket.gaierror:
        return failure(
            "interface",
            f"--master-ip {request.master_ip} is not an address and no known host name",
            "give the IP address of rank 0's node",
        )
    except OSError as error:
        return failure(
            "interface",
            f"no route to {request.master_ip} ({reason(error)})",
            "give an address of rank 0's node in a network that this node is in, too",
        )
    name = interface_of(own)
    if request.rank == 0 and not is_own(request.master_ip):
        return failure(
            "interface",
            f"rank 0 is this node, but {request.master_ip} is none of its addresses",
            f"give the one that the other nodes reach: {', '.join(own_addresses()) or 'none found'}",
        )
    for variable in _OWN_VARIABLES:
        chosen = os.environ.get(variable)
        if chosen and chosen not in psutil.net_if_addrs():
            return failure(
                "interface",
                f"{variable}={chosen}, which this node does not have",
                f"unset {variable}",
            )
        if chosen and name is not None and chosen != name:
            return warning(
                "interface",
                f"{variable}={chosen}, but {name} ({own}) routes to {request.master_ip}",
                f"unset {variable}: the parts choose {name}",
            )
    return ok(
        "interface",
        f"{name or own} ({own}) routes to {request.master_ip}; the parts tell Gloo and NCCL to take it",
    )


def check_host_name(
    request: CheckRequest, *, resolve: Callable[..., list] = socket.getaddrinfo
) -> CheckResult:
    """What Gloo would take by itself: the interface that the host's name resolves to."""
    host = socket.gethostname()
    try:
        addresses = list(dict.fromkeys(entry[4][0] for entry in resolve(host, None)))
    except OSError:
        addresses = []
    text = f"{host} resolves to {', '.join(addresses)}" if addresses else f"{host} has no address"
    loopback = not addresses or _is_loopback(addresses[0])
    if not loopback:
        return ok("host name", text)
    if request.master_ip is None or _is_loopback(request.master_ip) or request.num_nodes == 1:
        return ok("host name", f"{text}: right on one machine")
    with contextlib.suppress(OSError):
        name = interface_of(route_to(request.master_ip))
        if name == "lo":
            return ok("host name", f"{text}: right on one machine")
        return warning(
            "host name",
            f"{text}, which Gloo would give to the other nodes; the parts choose the right interface",
            f"nothing for the parts; for other programs: export GLOO_SOCKET_IFNAME={name}",
        )
    return warning(
        "host name",
        f"{text}, which Gloo would give to the other nodes",
        "see the line on the interface",
    )


def check_port(request: CheckRequest) -> CheckResult | None:
    """On rank 0's node: the port is free, or who holds it."""
    if request.rank not in (0, None) or (
        request.master_ip is not None and not is_own(request.master_ip)
    ):
        return None
    port = request.master_port
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
            probe.bind(("", port))
            probe.listen()
    except PermissionError:
        return failure("port", f"{port} is for root alone", "give a --master-port from 1024 on")
    except OSError as error:
        return failure(
            "port",
            f"{port} is taken by {holder(port)} ({reason(error)})",
            "end that process, or give another --master-port on every node",
        )
    return ok("port", f"{port} is free")


def holder(port: int) -> str:
    """Return which process listens on a port, by name and id, where this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr  # () where a socket has no address
                and connection.laddr.port == port
                and connection.pid is not None
            ):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(connection.pid)
                    return f"{process.name()}, process {connection.pid}: {' '.join(process.cmdline())[:100]}"
                return f"process {connection.pid}"
    return f"a process of another user (sudo ss -ltnp 'sport = :{port}' names it)"


def check_master(request: CheckRequest) -> CheckResult | None:
    """Without other ranks to connect to: whether the master's node answers at all."""
    if request.master_ip is None or request.num_nodes is not None or is_own(request.master_ip):
        return None
    address = f"{request.master_ip}:{request.master_port}"
    try:
        with socket.create_connection(
            (request.master_ip, request.master_port),
            timeout=min(_PROBE_SECONDS, request.timeout_seconds),
        ):
            return ok("master", f"{address} answers, and something listens there")
    except ConnectionRefusedError:
        return ok(
            "master", f"{request.master_ip} answers; nothing listens on {request.master_port} yet"
        )
    except OSError as error:
        return failure(
            "master",
            f"{address} cannot be reached ({reason(error)})",
            f"check the address, and open port {request.master_port} on that node",
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")
