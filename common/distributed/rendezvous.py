"""The rendezvous of ranks that were started by hand: a TCP store on rank 0's node.

Callers need only ``rendezvous``; process_group.py then opens the group over its store. Unlike
torch's rendezvous, it names missing ranks and a rank that was started twice. However many ranks
there are, each sends the same few requests:

    every rank r           size = --num-nodes         compared with the first rank's
                           tickets/r += 1             2: rank r was started twice
                           joined/r = host, process, GPUs
                           joined += 1
    rank 0                 waits until joined is the world size, reads joined/*, writes answer/*
    every other rank r     waits for answer/r

The answer is the rank's placement on its machine, or the reason why there is no run. A rank that
waits prints for whom after a few seconds; only rank 0 asks its store for that, in its own process.
"""

import concurrent.futures
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from common.distributed.launch_env import LaunchSpec
from common.distributed.rank0_store import Wait, address_of, connect, serve
from common.errors import GroupError, first_line
from common.utils.processes import in_thread

_POLL_SECONDS = 0.05
_FETCH_SECONDS = 1.0  # for the other ranks to fetch rank 0's message before its store ends
_LAST_ANSWER_SECONDS = 2.0
_FIRST_NOTICE_SECONDS, _NOTICE_SECONDS = 5.0, 15.0
_COUNT, _ABORT = "joined", "abort"
_JOINED, _ANSWER = "joined/{}", "answer/{}"  # of each rank


@dataclass(frozen=True)
class Peer:
    """What each rank reports when it joins: host name, process id, number of GPUs on its node."""

    host: str
    pid: int
    gpus: int


@dataclass(frozen=True)
class RankPlacement:
    """A rank is ``local_rank`` of ``local_size`` on its machine.

    ``gpus_suffice``: every rank of the job has its own GPU.
    """

    local_rank: int
    local_size: int
    gpus_suffice: bool


def rendezvous(launch: LaunchSpec, timeout_seconds: float) -> tuple[dist.TCPStore, RankPlacement]:
    """Wait until all ranks have joined; return the store that they share and this rank's placement.

    Raises GroupError if rank 0 cannot be reached or is lost, ranks are missing after
    ``timeout_seconds``, a rank was started twice, or the ranks were given different numbers of
    nodes; UserError if the port is in use, or if rank 0 runs on another machine than the address
    that the other ranks connect to.
    """
    wait = Wait(
        timeout_seconds,
        time.monotonic() + timeout_seconds,
        lambda: f"rank 0 at {address_of(launch)}",
    )
    # If rank 0's node pauses or its link is cut, the store's operations block until TCP times out.
    # A thread lets this rank give up before that.
    joining = in_thread(lambda: _rendezvous(launch, wait))
    pause, last_answer = _FIRST_NOTICE_SECONDS, _FETCH_SECONDS + _LAST_ANSWER_SECONDS
    while not concurrent.futures.wait([joining], min(pause, wait.left + last_answer)).done:
        if wait.left + last_answer <= 0:
            raise _lost(launch)
        if wait.left >= 1:
            notice = f"rank {launch.rank}: waiting for {wait.whom()} ({wait.left:.0f} s left)"
            print(notice, file=sys.stderr, flush=True)
        pause = _NOTICE_SECONDS
    return joining.result()


def _rendezvous(launch: LaunchSpec, wait: Wait) -> tuple[dist.TCPStore, RankPlacement]:
    open_store, get_placement = (
        (serve, _assign_placements) if launch.rank == 0 else (connect, _wait_for_placement)
    )
    store = open_store(launch, wait)
    try:
        _join(store, launch)
        return store, get_placement(store, launch, wait)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise GroupError(
            f"lost rank 0 at {address_of(launch)} while the ranks were meeting; its own output "
            f"says why ({first_line(error)})"
        ) from error


def place_ranks(peers: Sequence[Peer]) -> list[RankPlacement]:
    """Return every rank's placement; local ranks follow the order of the ranks on each host."""
    hosts = [peer.host for peer in peers]
    gpus_suffice = all(peer.gpus >= hosts.count(peer.host) for peer in peers)
    return [
        RankPlacement(hosts[:rank].count(host), hosts.count(host), gpus_suffice)
        for rank, host in enumerate(hosts)
    ]


def _join(store: dist.TCPStore, launch: LaunchSpec) -> None:
    """Report this rank to rank 0, unless its world size or its rank contradicts another rank's."""
    # compare_set(key, "", value) sets the key if it is missing, and returns its value afterwards.
    size = int(store.compare_set("size", "", str(launch.size)))
    if size != launch.size:
        _abort(
            store,
            launch,
            f"rank {launch.rank} was started with --num-nodes {launch.size}, but others with "
            f"{size}: give the same on every node",
        )
    me = Peer(socket.gethostname(), os.getpid(), torch.cuda.device_count())
    if store.add(f"tickets/{launch.rank}", 1) > 1:
        first = Peer(**json.loads(store.get(_JOINED.format(launch.rank))))  # waits for the key
        _abort(
            store,
            launch,
            f"rank {launch.rank} was started twice: on {first.host} (process {first.pid}) and on "
            f"{me.host} (process {me.pid}); give each node a --rank of its own",
        )
    store.set(_JOINED.format(launch.rank), json.dumps(asdict(me)))
    store.add(_COUNT, 1)


def _assign_placements(store: dist.TCPStore, launch: LaunchSpec, wait: Wait) -> RankPlacement:
    """Rank 0: wait until all have joined, and set the placement of each."""
    wait.whom = lambda: _missing_text(store, launch)
    while store.add(_COUNT, 0) < launch.size:
        # The store runs in this process: polling it costs the network nothing.
        if store.check([_ABORT]):
            _abort_all(store, launch, store.get(_ABORT).decode())
        if wait.left < 0:
            _abort_all(store, launch, _missing_message(store, launch, wait))
        time.sleep(_POLL_SECONDS)
    joined = store.multi_get([_JOINED.format(rank) for rank in range(launch.size)])
    placements = place_ranks([Peer(**json.loads(value)) for value in joined])
    _set_answers(store, [asdict(placement) for placement in placements])
    return placements[0]


def _wait_for_placement(store: dist.TCPStore, launch: LaunchSpec, wait: Wait) -> RankPlacement:
    """Any other rank: wait for rank 0's answer, and after the timeout report who is missing."""
    wait.whom = lambda: f"the other ranks; this one has joined {address_of(launch)}"
    key = _ANSWER.format(launch.rank)
    if not _wait_for_key(store, key, wait.left):
        # Finding the missing ranks costs a request per rank, so only the first late rank does it.
        if store.add("late", 1) == 1:
            _abort(store, launch, _missing_message(store, launch, wait))
        if not _wait_for_key(store, key, _FETCH_SECONDS):
            raise _lost(launch)
    answer = json.loads(store.get(key))
    if "error" in answer:
        raise GroupError(answer["error"])
    return RankPlacement(**answer)


def _wait_for_key(store: dist.TCPStore, key: str, seconds: float) -> bool:
    """Return whether the key is set within ``seconds``; the store answers this one request then."""
    try:
        store.wait([key], timedelta(seconds=max(seconds, _POLL_SECONDS)))
    except dist.DistStoreError:  # a lost store is a DistNetworkError
        return False
    return True


def _missing(store: dist.TCPStore, launch: LaunchSpec) -> tuple[int, str]:
    """Return how many ranks have not joined, and the numbers of the first of them."""
    missing = [rank for rank in range(launch.size) if not store.check([_JOINED.format(rank)])]
    more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
    return len(missing), ", ".join(map(str, missing[:20])) + more


def _missing_text(store: dist.TCPStore, launch: LaunchSpec) -> str:
    count, names = _missing(store, launch)
    return f"{count} of {launch.size} ranks: {names}"


def _missing_message(store: dist.TCPStore, launch: LaunchSpec, wait: Wait) -> str:
    count, names = _missing(store, launch)
    return (
        f"{launch.size - count} of {launch.size} ranks came to {address_of(launch)} within "
        f"{wait.seconds:g} s; missing: rank{'s' if count > 1 else ''} {names}. Start them with the "
        "same command and their --rank, or give a longer --timeout"
    )


def _abort(store: dist.TCPStore, launch: LaunchSpec, message: str) -> NoReturn:
    """Make rank 0 pass the message on to the ranks that are still waiting, then raise."""
    if launch.rank == 0:
        _abort_all(store, launch, message)
    # A rank that joins late by mistake must not end a run that has begun.
    if store.add(_COUNT, 0) < launch.size:
        store.set(_ABORT, message)
    raise GroupError(message)


def _abort_all(store: dist.TCPStore, launch: LaunchSpec, message: str) -> NoReturn:
    """Rank 0: answer every rank with the reason why there is no run, and raise."""
    largest_size = max(launch.size, int(store.get("size")))
    _set_answers(store, [{"error": message}] * largest_size)
    time.sleep(_FETCH_SECONDS)
    raise GroupError(message)


def _set_answers(store: dist.TCPStore, answers: Sequence[dict]) -> None:
    store.multi_set(  # type: ignore[attr-defined]  # missing in torch's stubs
        [_ANSWER.format(rank) for rank in range(len(answers))],
        [json.dumps(answer) for answer in answers],
    )


def _lost(launch: LaunchSpec) -> GroupError:
    return GroupError(
        f"lost rank 0 at {address_of(launch)} while the ranks were meeting: it no longer answers. "
        "Its node is paused or down, or the link to it is cut"
    )
