"""How ranks that were started by hand meet: a TCP store on rank 0's node, and clear words for those who don't come.

``rendezvous`` is the one function. torch's own rendezvous would do the same, but says neither who is missing nor that a
rank was started twice. A rank asks the store a handful of times, however many ranks there are: it says that it has come, and
waits for its seat; rank 0 alone looks at all, and hands the seats out, or the reason why there are none.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist

from common.distributed.failures import first_line
from common.distributed.launch_env import LaunchSpec
from common.errors import GroupError, UserError
from common.utils.processes import in_thread
from common.utils.system import free_port

_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = 1.0
_LAST_ANSWER_SECONDS = 2.0
_COUNT, _ABORT = "count", "abort"


@dataclass(frozen=True)
class Peer:
    """What each rank tells of itself: host name, process id, and how many GPUs its node has."""

    host: str
    pid: int
    gpus: int


@dataclass(frozen=True)
class RankPlacement:
    """A rank's place on its machine: ``local_rank`` of ``local_size``; and whether every rank of the job has a GPU of its own."""

    local_rank: int
    local_size: int
    gpus_suffice: bool


def rendezvous(launch: LaunchSpec, timeout_seconds: float) -> tuple[dist.TCPStore, RankPlacement]:
    """Wait until all ranks are there; return the store they share and this rank's seat.

    Raises GroupError where the master cannot be reached or is lost, ranks are missing after ``timeout_seconds``, a rank was
    started twice or the ranks were given different numbers of nodes; UserError where the port is taken.
    """
    # The store's own operations wait for as long as TCP hopes, where rank 0's node pauses or its link is cut.
    joining = in_thread(lambda: _rendezvous(launch, timeout_seconds))
    wait([joining], timeout=timeout_seconds + _FAREWELL_SECONDS + _LAST_ANSWER_SECONDS)
    if not joining.done():
        raise _lost(launch)
    return joining.result()


def _rendezvous(launch: LaunchSpec, timeout_seconds: float) -> tuple[dist.TCPStore, RankPlacement]:
    deadline = time.monotonic() + timeout_seconds
    store = (
        _serve(launch, timeout_seconds)
        if launch.rank == 0
        else _connect(launch, deadline, timeout_seconds)
    )
    try:
        _join(store, launch)
        wait_for_placement = _hand_out_placements if launch.rank == 0 else _take_placement
        return store, wait_for_placement(store, launch, deadline, timeout_seconds)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise GroupError(
            f"lost rank 0 at {_place(launch)} while the ranks were meeting; its own output says why "
            f"({first_line(error)})"
        ) from error


def place_ranks(peers: Sequence[Peer]) -> list[RankPlacement]:
    """Return every rank's seat; ranks of one host sit there in the order of their numbers."""
    sizes = Counter(peer.host for peer in peers)
    gpus_suffice = all(peer.gpus >= sizes[peer.host] for peer in peers)
    taken: Counter[str] = Counter()
    found = []
    for peer in peers:
        found.append(RankPlacement(taken[peer.host], sizes[peer.host], gpus_suffice))
        taken[peer.host] += 1
    return found


def _serve(launch: LaunchSpec, timeout_seconds: float) -> dist.TCPStore:
    if launch.master_port != (free := free_port(launch.master_port)):
        raise UserError(
            f"port {launch.master_port} is taken on this machine, by another run or by another rank 0 of this one: "
            f"end that one, or add --master-port {free} on every node"
        )
    return dist.TCPStore(
        launch.master_ip,
        launch.master_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


def _connect(launch: LaunchSpec, deadline: float, timeout_seconds: float) -> dist.TCPStore:
    """Reach rank 0's store. A plain socket tries first: its errors are immediate and name the cause."""
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                (launch.master_ip, launch.master_port), timeout=min(left, 5.0)
            ):
                pass
            return dist.TCPStore(
                launch.master_ip,
                launch.master_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(left, 1.0)),
            )
        except socket.gaierror as error:
            raise GroupError(
                f"--master-ip {launch.master_ip} is not an address and no known host name ({error}): "
                "give the IP address of rank 0's node"
            ) from error
        except OSError as error:
            reason = (
                "no answer"
                if isinstance(error, TimeoutError)
                else (error.strerror or str(error)).lower()
            )
            time.sleep(_POLL_SECONDS)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise GroupError(
                f"something else than rank 0 answers at {_place(launch)} ({first_line(error)}): give "
                "another --master-port on every node"
            ) from error
    raise GroupError(
        f"rank {launch.rank} could not reach rank 0 at {_place(launch)} within {timeout_seconds:g} s ({reason}): start "
        "rank 0, check that --master-ip is its node's address, that --master-port is the same on every node, and that "
        "no firewall closes it"
    )


def _join(store: dist.TCPStore, launch: LaunchSpec) -> None:
    me = Peer(socket.gethostname(), os.getpid(), torch.cuda.device_count())
    size = int(store.compare_set("size", "", str(launch.size)))
    if size != launch.size:
        _abort(
            store,
            launch,
            f"rank {launch.rank} was started with --num-nodes {launch.size}, but others with {size}: "
            "give the same on every node",
        )
    if store.add(f"tickets/{launch.rank}", 1) > 1:
        store.wait([_joined(launch.rank)])
        first = Peer(**json.loads(store.get(_joined(launch.rank))))
        _abort(
            store,
            launch,
            f"rank {launch.rank} was started twice: on {first.host} (process {first.pid}) and on "
            f"{me.host} (process {me.pid}); give each node a --rank of its own",
        )
    store.set(_joined(launch.rank), json.dumps(asdict(me)))
    store.add(_COUNT, 1)


def _hand_out_placements(
    store: dist.TCPStore, launch: LaunchSpec, deadline: float, timeout_seconds: float
) -> RankPlacement:
    """Rank 0: wait for all, and tell each where it sits."""
    while store.add(_COUNT, 0) < launch.size:
        if store.check([_ABORT]):
            _send_all_away(store, launch, store.get(_ABORT).decode())
        if time.monotonic() > deadline:
            _send_all_away(store, launch, _missing_message(store, launch, timeout_seconds))
        time.sleep(_POLL_SECONDS)
    peers = [
        Peer(**json.loads(value))
        for value in store.multi_get([_joined(rank) for rank in range(launch.size)])
    ]
    placements = place_ranks(peers)
    store.multi_set(
        [_placement_key(rank) for rank in range(launch.size)],
        [json.dumps(asdict(placement)) for placement in placements],
    )
    return placements[0]


def _take_placement(
    store: dist.TCPStore, launch: LaunchSpec, deadline: float, timeout_seconds: float
) -> RankPlacement:
    """Any other rank: wait for what rank 0 tells it. The first whose time is over says who is missing, for all."""
    if not _comes(store, _placement_key(launch.rank), max(0.0, deadline - time.monotonic())):
        if store.add("late", 1) == 1:
            _abort(store, launch, _missing_message(store, launch, timeout_seconds))
        if not _comes(store, _placement_key(launch.rank), _FAREWELL_SECONDS):
            raise _lost(launch)
    told = json.loads(store.get(_placement_key(launch.rank)))
    if "away" in told:
        raise GroupError(told["away"])
    return RankPlacement(**told)


def _comes(store: dist.TCPStore, key: str, seconds: float) -> bool:
    """Wait for a key. The store tells when it is there; nobody asks again and again."""
    try:
        store.wait([key], timedelta(seconds=max(seconds, _POLL_SECONDS)))
    except dist.DistNetworkError:
        raise
    except dist.DistStoreError:
        return False
    return True


def _missing_message(store: dist.TCPStore, launch: LaunchSpec, timeout_seconds: float) -> str:
    missing = [rank for rank in range(launch.size) if not store.check([_joined(rank)])]
    names = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing[:20]))
    names += f" and {len(missing) - 20} more" if len(missing) > 20 else ""
    hint = ""
    if launch.rank == 0 and not _is_own_address(launch.master_ip):
        hint = f" (note that {launch.master_ip} is none of this node's own addresses)"
    return (
        f"{launch.size - len(missing)} of {launch.size} ranks came to {_place(launch)} within {timeout_seconds:g} "
        f"s; missing: {names}. Start them with the same command and their --rank, or give a longer --timeout{hint}"
    )


def _abort(store: dist.TCPStore, launch: LaunchSpec, message: str) -> NoReturn:
    """Have rank 0 tell those who are still waiting, then raise."""
    if launch.rank == 0:
        _send_all_away(store, launch, message)
    if (
        store.add(_COUNT, 0) < launch.size
    ):  # a latecomer's mistake must not end a run that has begun
        store.set(_ABORT, message)
    raise GroupError(message)


def _send_all_away(store: dist.TCPStore, launch: LaunchSpec, message: str) -> NoReturn:
    """Rank 0: tell everyone why there is no run, and raise."""
    most = max(launch.size, int(store.get("size")))
    store.multi_set(
        [_placement_key(rank) for rank in range(most)], [json.dumps({"away": message})] * most
    )
    time.sleep(
        _FAREWELL_SECONDS
    )  # rank 0 holds the store: the others must have read the message before it goes
    raise GroupError(message)


def _lost(launch: LaunchSpec) -> GroupError:
    return GroupError(
        f"lost rank 0 at {_place(launch)} while the ranks were meeting: it does not answer any more. Its node "
        "stands still, or the link to it is cut"
    )


def _is_own_address(host: str) -> bool:
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(
        entry[4][0] in own or entry[4][0].startswith("127.")
        for entry in socket.getaddrinfo(host, None)
    )


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _placement_key(rank: int) -> str:
    return f"seat/{rank}"


def _place(launch: LaunchSpec) -> str:
    return f"{launch.master_ip}:{launch.master_port}"
