"""The TCP store on rank 0's node, at which ranks that were started by hand meet.

Rank 0 opens it with ``serve``, which checks that the address given leads to it; every other rank
calls ``connect``, which tries again until rank 0 is there. rendezvous.py says what the ranks write.
"""

import errno
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import psutil
import torch.distributed as dist

from common.distributed.launch_env import LaunchSpec
from common.errors import GroupError, UserError, first_line, print_to_stderr
from common.utils.network import is_own, listen, listening_address, own_addresses
from common.utils.processes import in_thread
from common.utils.system import allow_most_descriptors, free_port

_POLL_SECONDS = 0.05
_PROBE_SECONDS = 3.0
_FEW_STRANGERS = 10


@dataclass
class Wait:
    """How long this rank waits, and for whom; ``whom`` changes as the rendezvous proceeds."""

    seconds: float
    deadline: float
    whom: Callable[[], str]

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def serve(launch: LaunchSpec, wait: Wait) -> dist.TCPStore:
    """Rank 0: open the store that the others connect to.

    It listens at the address given alone, unless other machines may know this one by another.
    """
    assert launch.master_ip is not None  # a process without a group has no rendezvous
    address, reason = listening_address(launch.master_ip)
    try:
        listener = listen(address, launch.master_port)
    except OSError as error:
        raise _cannot_listen(launch, address, error) from error
    # torch's store keeps every connection, also of strangers, and refuses all without a descriptor.
    allow_most_descriptors()
    # torch closes the descriptor with the store, and does not if the store cannot be opened.
    store = _store(
        replace(launch, master_ip=address or "127.0.0.1"), wait.seconds, listener=listener.detach()
    )
    if not is_own(launch.master_ip):
        _check_reached(store, launch)
    if reason:
        print_to_stderr(
            f"rank 0: {reason}, so port {launch.master_port} is open on all addresses of this "
            "machine: let a firewall close it to all but the nodes"
        )
    return store


def _cannot_listen(launch: LaunchSpec, address: str, error: OSError) -> UserError:
    free = free_port(max(1024, launch.master_port + 1), address=address)
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"port {launch.master_port} is taken on this machine, by another run or by another "
            f"rank 0 of this one: end that one, or add --master-port {free} on every node"
        )
    return UserError(
        f"rank 0 cannot listen at {address_of(launch)} ({error.strerror}): add --master-port "
        f"{free} on every node"
    )


def _check_reached(store: dist.TCPStore, launch: LaunchSpec) -> None:
    """Rank 0: raise UserError unless the address given leads to this process's store.

    The address may belong to a router that forwards connections to this machine (NAT).
    """
    token = secrets.token_hex(8)
    store.set(token, "")

    def probe() -> bool:
        # A plain socket first: torch's client would try again until its timeout.
        address = (launch.master_ip, launch.master_port)
        socket.create_connection(address, timeout=_PROBE_SECONDS).close()
        return _store(replace(launch, rank=1), _PROBE_SECONDS).check([token])

    try:
        # In a thread: torch's client waits without limit for a server that is no store.
        reached = in_thread(probe).result(_PROBE_SECONDS)
    except socket.gaierror as error:
        raise _unknown_host(launch, error) from error
    except (OSError, dist.DistStoreError, dist.DistNetworkError):
        reached = False
    if not reached:
        raise UserError(
            f"{launch.master_ip} is not an address of this machine (it has "
            f"{', '.join(own_addresses()) or 'no address but loopback'}). Rank 0 must run on the "
            "machine that owns --master-ip."
        )


def strangers(launch: LaunchSpec) -> str:
    """Rank 0: return how many connections the port has; "" if hardly more than one of each rank."""
    try:
        connections = psutil.Process().net_connections(kind="tcp")
    except psutil.Error:  # macOS tells root alone
        return ""
    by_address = Counter(
        one.raddr.ip.removeprefix("::ffff:")
        for one in connections
        if one.status == psutil.CONN_ESTABLISHED and one.laddr.port == launch.master_port
    )
    if by_address.total() - launch.size < _FEW_STRANGERS:
        return ""
    [(address, most)] = by_address.most_common(1)
    return (
        f"port {launch.master_port} has {by_address.total()} connections for {launch.size} ranks, "
        f"{most} of them from {address}: let a firewall close the port to all but the nodes"
    )


def _store(
    launch: LaunchSpec, timeout_seconds: float, *, listener: int | None = None
) -> dist.TCPStore:
    assert launch.master_ip is not None  # a process without a group has no rendezvous
    return dist.TCPStore(
        launch.master_ip,
        launch.master_port,
        is_master=launch.rank == 0,
        wait_for_workers=False,  # torch would not say which ones are missing
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener,
    )


def connect(launch: LaunchSpec, wait: Wait) -> dist.TCPStore:
    """Any other rank: connect to rank 0's store."""
    reason = "no answer"
    wait.whom = lambda: f"rank 0 at {address_of(launch)}, {reason}"
    while (left := wait.left) > 0:
        try:
            # A plain socket first: its errors come at once and name the cause.
            address = (launch.master_ip, launch.master_port)
            socket.create_connection(address, timeout=min(left, 5.0)).close()
            return _store(launch, max(left, 1.0))
        except socket.gaierror as error:
            raise _unknown_host(launch, error) from error
        except OSError as error:
            # Rank 0 may start later than this rank: try again until the timeout.
            no_answer = isinstance(error, TimeoutError)
            reason = "no answer" if no_answer else (error.strerror or str(error)).lower()
            time.sleep(_POLL_SECONDS)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise _not_a_store(launch, first_line(error)) from error
    raise GroupError(
        f"rank {launch.rank} could not reach rank 0 at {address_of(launch)} within "
        f"{wait.seconds:g} s ({reason}): start rank 0, check that --master-ip is its node's "
        "address, that --master-port is the same on every node, and that no firewall closes it"
    )


def _not_a_store(launch: LaunchSpec, reason: str) -> GroupError:
    """Return why a connection led to no store: rank 0 has ended, or another program listens."""
    try:
        socket.create_connection((launch.master_ip, launch.master_port), _PROBE_SECONDS).close()
    except OSError:
        return lost_rank0(launch, reason)
    return GroupError(
        f"something other than rank 0 answers at {address_of(launch)} ({reason}): give another "
        "--master-port on every node"
    )


def lost_rank0(launch: LaunchSpec, reason: str) -> GroupError:
    """Return the error of a rank whose connection to rank 0 broke."""
    return GroupError(
        f"lost rank 0 at {address_of(launch)} while the ranks were meeting; its own output says "
        f"why ({reason})"
    )


def _unknown_host(launch: LaunchSpec, error: socket.gaierror) -> GroupError:
    return GroupError(
        f"--master-ip {launch.master_ip} is not an address and no known host name ({error}): give "
        "the IP address of rank 0's node"
    )


def address_of(launch: LaunchSpec) -> str:
    return f"{launch.master_ip}:{launch.master_port}"
