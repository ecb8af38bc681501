"""Checks of this node's side of the network: the route to the master, the host's name, the port.

node_exchange.py has the checks that need the other nodes.
"""

import contextlib
import itertools
import socket
from collections.abc import Callable

import psutil

from common.utils.environment import setting
from common.utils.network import interface_of, is_loopback, is_own, route_to
from lab.doctor.check_result import FAILURE, OK, WARNING, CheckRequest, CheckResult, reason

_PROBE_SECONDS = 5.0
_OWN_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def _own_addresses() -> list[str]:
    """Return this node's IPv4 addresses, those of loopback last."""
    entries = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    own = (entry.address for entry in entries if entry.family == socket.AF_INET)
    return sorted(own, key=is_loopback)


def check_interface(request: CheckRequest) -> CheckResult | None:
    """Check the interface that routes to the master: the parts choose that one."""
    if not request.master_ip:
        return None
    try:
        own = route_to(request.master_ip)
    except socket.gaierror:
        return CheckResult(
            "interface",
            FAILURE,
            f"--master-ip {request.master_ip} is not an address and no known host name",
            "give the IP address of rank 0's node",
        )
    except OSError as error:
        return CheckResult(
            "interface",
            FAILURE,
            f"no route to {request.master_ip} ({reason(error)})",
            "give an address of rank 0's node in a network that this node is in, too",
        )
    name = interface_of(own)
    if request.num_nodes and request.rank == 0 and not is_own(request.master_ip):
        return CheckResult(
            "interface",
            FAILURE,
            f"rank 0 is this node, but {request.master_ip} is none of its addresses",
            "give the one that the other nodes reach: "
            f"{', '.join(_own_addresses()) or 'none found'}",
        )
    for variable in _OWN_VARIABLES:
        chosen = setting(variable)
        if chosen and chosen not in psutil.net_if_addrs():
            return CheckResult(
                "interface",
                FAILURE,
                f"{variable}={chosen}, which this node does not have",
                f"unset {variable}",
            )
        if chosen and name is not None and chosen != name:
            return CheckResult(
                "interface",
                WARNING,
                f"{variable}={chosen}, but {name} ({own}) routes to {request.master_ip}",
                f"unset {variable}: the parts choose {name}",
            )
    return CheckResult(
        "interface",
        OK,
        f"{name or own} ({own}) routes to {request.master_ip}; the parts tell Gloo and NCCL "
        "to take it",
    )


def check_host_name(
    request: CheckRequest, *, resolve: Callable[..., list] = socket.getaddrinfo
) -> CheckResult:
    """Check what the host's name resolves to, since Gloo would choose that interface."""
    host = socket.gethostname()
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        addresses += dict.fromkeys(entry[4][0] for entry in resolve(host, None))
    text = f"{host} resolves to {', '.join(addresses)}" if addresses else f"{host} has no address"
    if addresses and not is_loopback(addresses[0]):
        return CheckResult("host name", OK, text)
    master = "" if request.num_nodes == 1 else request.master_ip
    try:
        own = route_to(master or "127.0.0.1")
    except OSError:
        return CheckResult(
            "host name",
            WARNING,
            f"{text}, which Gloo would give to the other nodes",
            "see the line on the interface",
        )
    if is_loopback(own):
        return CheckResult("host name", OK, f"{text}: right on one machine")
    return CheckResult(
        "host name",
        WARNING,
        f"{text}, which Gloo would give to the other nodes; the parts choose the right interface",
        f"nothing for the parts; for other programs: export GLOO_SOCKET_IFNAME={interface_of(own)}",
    )


def check_port(request: CheckRequest) -> CheckResult | None:
    """Check on rank 0's node that the port is free; if not, name the process that holds it."""
    if request.rank != 0 or (request.master_ip and not is_own(request.master_ip)):
        return None
    port = request.master_port
    try:
        socket.create_server(("", port)).close()  # with SO_REUSEADDR, as torch's store does
    except PermissionError:
        return CheckResult(
            "port", FAILURE, f"{port} is for root alone", "give a --master-port from 1024 on"
        )
    except OSError as error:
        return CheckResult(
            "port",
            FAILURE,
            f"{port} is taken by {_holder(port)} ({reason(error)})",
            "end that process, or give another --master-port on every node",
        )
    return CheckResult("port", OK, f"{port} is free")


def _holder(port: int) -> str:
    """Return the name and id of the process that listens on a port, if this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr  # () where a socket has no address
                and connection.laddr.port == port
                and connection.pid is not None
            ):
                process = psutil.Process(connection.pid)
                return (
                    f"{process.name()}, process {process.pid}: {' '.join(process.cmdline())[:100]}"
                )
    return f"a process of another user (sudo ss -ltnp 'sport = :{port}' names it)"


def check_master(request: CheckRequest) -> CheckResult | None:
    """Check that the master's node answers, if there are no other ranks to connect to."""
    if not request.master_ip or request.num_nodes or is_own(request.master_ip):
        return None
    address = f"{request.master_ip}:{request.master_port}"
    try:
        with socket.create_connection(
            (request.master_ip, request.master_port),
            timeout=min(_PROBE_SECONDS, request.timeout_seconds),
        ):
            return CheckResult("master", OK, f"{address} answers, and something listens there")
    except ConnectionRefusedError:
        return CheckResult(
            "master",
            OK,
            f"{request.master_ip} answers; nothing listens on {request.master_port} yet",
        )
    except OSError as error:
        return CheckResult(
            "master",
            FAILURE,
            f"{address} cannot be reached ({reason(error)})",
            f"check the address, and open port {request.master_port} on that node",
        )
