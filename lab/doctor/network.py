"""Checks of this node's side of the network: the route to the master, the host's name, the port.

nodes.py has the checks that need the other nodes.
"""

import contextlib
import socket
from argparse import Namespace

import psutil

from common.utils.environment import setting
from common.utils.network import (
    interface_of,
    is_loopback,
    is_own,
    listen,
    listening_address,
    own_addresses,
    port_holder,
    resolve,
    route_to,
    what_is_no_store,
    why_unreached,
)
from lab.doctor.check_result import CheckResult, failure, ok, warning

_PROBE_SECONDS = 5.0


def check_host_name(flags: Namespace) -> CheckResult:
    """Check what the host's name resolves to, since Gloo would choose that interface."""
    text = f"{socket.gethostname()} has no address"
    with contextlib.suppress(OSError):
        address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
        text = f"{socket.gethostname()} resolves to {address}"
        if not is_loopback(str(address)):
            return ok(text)
    alone = flags.num_nodes == 1 or not flags.master_ip
    if alone or all(map(is_loopback, resolve(flags.master_ip))):
        return ok(f"{text}: fine on one machine")
    return warning(
        f"{text}; Gloo would send this address to the other nodes, but a run of this project "
        "chooses the right interface",
        "nothing here; for other programs: export GLOO_SOCKET_IFNAME=NAME, with the name below",
    )


def check_interface(flags: Namespace) -> CheckResult | None:
    """Check the interface that routes to the master: a run uses that one."""
    master = flags.master_ip
    if not master:
        return None
    try:
        own = route_to(master)
    except OSError as error:
        return failure(
            f"no route to {master} ({why_unreached(error)})",
            "give the IP address of rank 0's node, one that this node can reach",
        )
    if flags.rank == 0 and not is_own(master):
        return failure(
            f"this node is rank 0, but {master} is not one of its addresses",
            "run rank 0 on the machine with that address, or give the address at which the other "
            f"nodes reach this one: {', '.join(own_addresses()) or 'none found'}",
        )
    name = interface_of(own) or own
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = setting(variable) or name
        if chosen not in (name, *psutil.net_if_addrs()):
            return failure(
                f"{variable}={chosen}, but this node has no interface {chosen}",
                f"unset {variable}",
            )
        if chosen != name:
            return warning(
                f"{variable}={chosen}, but {name} ({own}) routes to {master}",
                f"unset {variable}: a run then chooses {name}",
            )
    return ok(f"{name} ({own}) routes to {master}; a run tells Gloo and NCCL to use it")


def check_port(flags: Namespace) -> CheckResult | None:
    """Check on rank 0's node that the port is free; if not, name the process that holds it."""
    master, port = flags.master_ip, flags.master_port
    if flags.rank or (master and not is_own(master)):
        return None
    try:
        listen(listening_address(master)[0] if master else "", port).close()
    except PermissionError:
        return failure(f"only root may use {port}", "give a --master-port of 1024 or more")
    except OSError:
        return failure(
            f"{port} is in use by {port_holder(port)}",
            "end that process, or give another --master-port on every rank",
        )
    return ok(f"{port} is free")


def check_master(flags: Namespace) -> CheckResult | None:
    """Check that the master's node answers, if there are no other ranks to connect to."""
    if not flags.master_ip or flags.num_nodes or is_own(flags.master_ip):
        return None
    seconds = min(_PROBE_SECONDS, flags.timeout)
    try:
        stranger = what_is_no_store(flags.master_ip, flags.master_port, seconds)
    except ConnectionRefusedError:
        return ok(f"{flags.master_ip} answers; nothing listens on {flags.master_port} yet")
    except OSError as error:
        return failure(
            f"{flags.master_ip}:{flags.master_port} cannot be reached ({why_unreached(error)})",
            f"check the address, and open port {flags.master_port} on that node",
        )
    if stranger:
        return failure(
            f"something answers at {flags.master_ip}:{flags.master_port}, but it is not this "
            f"program ({stranger})",
            "end it, or give another --master-port on every rank",
        )
    return ok(f"{flags.master_ip}:{flags.master_port} answers, and a run waits there")
