"""Checks of this node's side of the network: the route to the master, the host's name, the port.

node_exchange.py has the checks that need the other nodes.
"""

import contextlib
import itertools
import socket
from collections.abc import Callable

import psutil

from common.utils.environment import setting
from common.utils.network import (
    interface_of,
    is_loopback,
    is_own,
    listen,
    listening_address,
    route_to,
)
from lab.doctor.check_result import FAILURE, OK, WARNING, CheckRequest, CheckResult, reason

_PROBE_SECONDS = 5.0
_OWN_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def _own_addresses() -> list[str]:
    """Return this node's IPv4 addresses, those of loopback last."""
    entries = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    own = (entry.address for entry in entries if entry.family == socket.AF_INET)
    return sorted(own, key=is_loopback)


def check_interface(request: CheckRequest) -> CheckResult | None:
    """Check the interface that routes to the master: a run uses that one."""
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
            "give an address of rank 0's node that this node can reach",
        )
    name = interface_of(own)
    if request.num_nodes and request.rank == 0 and not is_own(request.master_ip):
        return CheckResult(
            "interface",
            FAILURE,
            f"this node is rank 0, but {request.master_ip} is not one of its addresses",
            "run rank 0 on the machine with that address, or give the address at which the other "
            f"nodes reach this one: {', '.join(_own_addresses()) or 'none found'}",
        )
    for variable in _OWN_VARIABLES:
        chosen = setting(variable)
        if chosen and chosen not in psutil.net_if_addrs():
            return CheckResult(
                "interface",
                FAILURE,
                f"{variable}={chosen}, but this node has no interface {chosen}",
                f"unset {variable}",
            )
        if chosen and name is not None and chosen != name:
            return CheckResult(
                "interface",
                WARNING,
                f"{variable}={chosen}, but {name} ({own}) routes to {request.master_ip}",
                f"unset {variable}: a run then chooses {name}",
            )
    return CheckResult(
        "interface",
        OK,
        f"{name or own} ({own}) routes to {request.master_ip}; a run tells Gloo and NCCL to use it",
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
            f"{text}; Gloo would send this address to the other nodes",
            "see the line about the interface",
        )
    if is_loopback(own):
        return CheckResult("host name", OK, f"{text}: fine on one machine")
    return CheckResult(
        "host name",
        WARNING,
        f"{text}; Gloo would send this address to the other nodes, but a run of this project "
        "chooses the right interface",
        f"nothing here; for other programs: export GLOO_SOCKET_IFNAME={interface_of(own)}",
    )


def check_port(request: CheckRequest) -> CheckResult | None:
    """Check on rank 0's node that the port is free; if not, name the process that holds it."""
    if request.rank != 0 or (request.master_ip and not is_own(request.master_ip)):
        return None
    port = request.master_port
    try:
        listen(listening_address(request.master_ip)[0] if request.master_ip else "", port).close()
    except PermissionError:
        return CheckResult(
            "port", FAILURE, f"only root may use {port}", "give a --master-port of 1024 or more"
        )
    except OSError as error:
        return CheckResult(
            "port",
            FAILURE,
            f"{port} is in use by {_holder(port)} ({reason(error)})",
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
    return f"a process of another user (sudo ss -ltnp 'sport = :{port}' shows it)"


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
