"""The rendezvous of ranks that were started by hand: a TCP store on rank 0's node, and messages that name missing ranks.

Callers use ``rendezvous`` alone. torch's own rendezvous names neither the ranks that are missing nor one that was started
twice. Each rank asks the store a handful of times, whatever the number of ranks: it joins, then waits for its placement.
Rank 0 alone reads what all ranks wrote; it answers with the placements, or with the reason why there is no run.
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
_FETCH_SECONDS = 1.0  # for the other ranks to fetch rank 0's message before its store ends
_LAST_ANSWER_SECONDS = 2.0
_COUNT, _ABORT = "count", "abort"


@dataclass(frozen=True)
class Peer:
    """What each rank reports when it joins: host name, process id, and the number of GPUs on its node."""

    host: str
    pid: int
    gpus: int


@dataclass(frozen=True)
class RankPlacement:
    """A rank is ``local_rank`` of ``local_size`` on its machine; ``gpus_suffice``: every rank of the job has its own GPU."""

    local_rank: int
    local_size: int
    gpus_suffice: bool


def rendezvous(launch: LaunchSpec, timeout_seconds: float) -> tuple[dist.TCPStore, RankPlacement]:
    """Wait until all ranks have joined; return the store that they share and this rank's placement.

    Raises GroupError where rank 0 cannot be reached or is lost, ranks are missing after ``timeout_seconds``, a rank was
    started twice or the ranks were given different numbers of nodes; UserError where the port is in use.
    """
    # In a thread: where rank 0's node pauses or its link is cut, the store's operations block until TCP times out.
    joining = in_thread(lambda: _rendezvous(launch, timeout_seconds))
    wait([joining], timeout=timeout_seconds + _FETCH_SECONDS + _LAST_ANSWER_SECONDS)
    if not joining.done():
        raise _lost(launch)
    return joining.result()


def _rendezvous(launch: LaunchSpec, timeout_seconds: float) -> tuple[dist.TCPStore, RankPlacement]:
    deadline = time.monotonic() + timeout_seconds
    if launch.rank == 0:
        store, get_placement = _serve(launch, timeout_seconds), _assign_placements
    else:
        store, get_placement = _connect(launch, deadline, timeout_seconds), _wait_for_placement
    try:
        _join(store, launch)
        return store, get_placement(store, launch, deadline, timeout_seconds)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise GroupError(
            f"lost rank 0 at {_address(launch)} while the ranks were meeting; its own output says why "
            f"({first_line(error)})"
        ) from error


def place_ranks(peers: Sequence[Peer]) -> list[RankPlacement]:
    """Return the placement of every rank; ranks on one host get their local ranks in the order of their ranks."""
    sizes = Counter(peer.host for peer in peers)
    gpus_suffice = all(peer.gpus >= sizes[peer.host] for peer in peers)
    placed: Counter[str] = Counter()
    placements = []
    for peer in peers:
        placements.append(RankPlacement(placed[peer.host], sizes[peer.host], gpus_suffice))
        placed[peer.host] += 1
    return placements


def _serve(launch: LaunchSpec, timeout_seconds: float) -> dist.TCPStore:
    if launch.master_port != (free := free_port(launch.master_port)):
        raise UserError(
            f"port {launch.master_port} is taken on this machine, by another run or by another rank 0 of this one: "
            f"end that one, or add --master-port {free} on every node"
        )
    return dist.TCPStore(
        _host(launch),
        launch.master_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


def _connect(launch: LaunchSpec, deadline: float, timeout_seconds: float) -> dist.TCPStore:
    """Connect to rank 0's store. A plain socket tries first: its errors are immediate and name the cause."""
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            address = (_host(launch), launch.master_port)
            socket.create_connection(address, timeout=min(left, 5.0)).close()
            return dist.TCPStore(
                _host(launch),
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
            no_answer = isinstance(error, TimeoutError)
            reason = "no answer" if no_answer else (error.strerror or str(error)).lower()
            time.sleep(_POLL_SECONDS)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise GroupError(
                f"something else than rank 0 answers at {_address(launch)} ({first_line(error)}): give "
                "another --master-port on every node"
            ) from error
    raise GroupError(
        f"rank {launch.rank} could not reach rank 0 at {_address(launch)} within {timeout_seconds:g} s ({reason}): start "
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


def _assign_placements(
    store: dist.TCPStore, launch: LaunchSpec, deadline: float, timeout_seconds: float
) -> RankPlacement:
    """Rank 0: wait until all have joined, and set the placement of each."""
    while store.add(_COUNT, 0) < launch.size:
        if store.check([_ABORT]):
            _abort_all(store, launch, store.get(_ABORT).decode())
        if time.monotonic() > deadline:
            _abort_all(store, launch, _missing_message(store, launch, timeout_seconds))
        time.sleep(_POLL_SECONDS)
    peers = [
        Peer(**json.loads(value))
        for value in store.multi_get([_joined(rank) for rank in range(launch.size)])
    ]
    placements = place_ranks(peers)
    _set_answers(store, [json.dumps(asdict(placement)) for placement in placements])
    return placements[0]


def _wait_for_placement(
    store: dist.TCPStore, launch: LaunchSpec, deadline: float, timeout_seconds: float
) -> RankPlacement:
    """Any other rank: wait for rank 0's answer. The first rank whose timeout ends reports who is missing, for all."""
    key = _answer_key(launch.rank)
    if not _wait_for_key(store, key, max(0.0, deadline - time.monotonic())):
        if store.add("late", 1) == 1:
            _abort(store, launch, _missing_message(store, launch, timeout_seconds))
        if not _wait_for_key(store, key, _FETCH_SECONDS):
            raise _lost(launch)
    answer = json.loads(store.get(key))
    if "away" in answer:
        raise GroupError(answer["away"])
    return RankPlacement(**answer)


def _wait_for_key(store: dist.TCPStore, key: str, seconds: float) -> bool:
    """Return whether the key is set within ``seconds``. One message, no polling: the store answers when the key is set."""
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
    if launch.rank == 0 and not _is_own_address(_host(launch)):
        hint = f" (note that {launch.master_ip} is none of this node's own addresses)"
    return (
        f"{launch.size - len(missing)} of {launch.size} ranks came to {_address(launch)} within {timeout_seconds:g} "
        f"s; missing: {names}. Start them with the same command and their --rank, or give a longer --timeout{hint}"
    )


def _abort(store: dist.TCPStore, launch: LaunchSpec, message: str) -> NoReturn:
    """Have rank 0 pass the message on to the ranks that still wait, then raise."""
    if launch.rank == 0:
        _abort_all(store, launch, message)
    # A rank that is late and wrong must not end a run that has begun.
    if store.add(_COUNT, 0) < launch.size:
        store.set(_ABORT, message)
    raise GroupError(message)


def _abort_all(store: dist.TCPStore, launch: LaunchSpec, message: str) -> NoReturn:
    """Rank 0: answer every rank with the reason why there is no run, and raise."""
    largest_size = max(launch.size, int(store.get("size")))
    _set_answers(store, [json.dumps({"away": message})] * largest_size)
    time.sleep(_FETCH_SECONDS)
    raise GroupError(message)


def _set_answers(store: dist.TCPStore, answers: list[str]) -> None:
    keys = [_answer_key(rank) for rank in range(len(answers))]
    store.multi_set(keys, answers)  # type: ignore[attr-defined]  # missing in torch's stubs


def _lost(launch: LaunchSpec) -> GroupError:
    return GroupError(
        f"lost rank 0 at {_address(launch)} while the ranks were meeting: it does not answer any more. Its node "
        "stands still, or the link to it is cut"
    )


def _is_own_address(host: str) -> bool:
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    return any(address in own or address.startswith("127.") for address in found)


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _answer_key(rank: int) -> str:
    return f"seat/{rank}"


def _host(launch: LaunchSpec) -> str:
    assert launch.master_ip is not None  # a process without a group has no rendezvous
    return launch.master_ip


def _address(launch: LaunchSpec) -> str:
    return f"{launch.master_ip}:{launch.master_port}"
