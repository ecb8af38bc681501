"""How the ranks meet; read it downward. ``meet`` returns the ``MeetingOutcome``.

Rank 0 opens a TCP store on its node, and the others connect to it; under torchrun the launcher has
one. Every rank leaves its ``Peer`` there, under its number. Once all have done so,
rank 0 sets the ``MeetingOutcome`` that all wait for. Any rank may set it before, with the reason
why there is no run: ranks are missing at its timeout, it was started twice, or with another number
of ranks.

Whoever reaches the port can use the store. So all keys have a prefix that only a process with the
run's token can compute, and a rank without the token is not admitted. A fingerprint of the token,
without the prefix, tells such a rank why. However many ranks there are, each sends few requests
until its timeout.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from common.distributed.gpus import JobGPUs, Peer, compare_gpus, this_peer, visible_gpus
from common.distributed.launch_env import LaunchSpec
from common.distributed.node_identity import layout_of, node_numbers
from common.errors import GroupError, UserError, first_line, print_to_stderr
from common.say import count, ranks_text
from common.utils.environment import RUN_TOKEN
from common.utils.network import (
    is_own,
    listen,
    listening_address,
    own_addresses,
    port_holder,
    what_is_no_store,
    why_unreached,
)
from common.utils.processes import in_thread
from common.utils.system import allow_most_descriptors, free_port
from common.utils.typed_json import Rank, Ranks, Text, decode, encode

T = TypeVar("T")
# Keys with the prefix
_SIZE = "size"
_PEER = "peer/{}"
_JOINED = "joined"
_OUTCOME = "outcome"
_FINGERPRINT = "token"  # the key without it
_STORE = "what is in the store where the ranks meet"

_POLL_SECONDS = 0.05
_TOKEN_SECONDS = 1.0  # for rank 0 to set the first keys, before its token is compared
_PROBE_SECONDS = 3.0
_ANSWER_SECONDS = 5.0  # for a store to answer
_AGAIN_SECONDS = 1.0  # until a program that did not answer as a store is asked once more
_BEGIN_SECONDS = 15.0  # for rank 0 to set the first keys in the store that it has opened
_FETCH_SECONDS = 1.0  # for the other ranks to read why there is no run, before the store ends
_LOST_SECONDS = 3.0  # after the timeout, until a store that does not answer is given up
_FIRST_NOTICE_SECONDS = 5.0
_NOTICE_SECONDS = 15.0


@dataclass(frozen=True)
class MeetingOutcome:
    """What all ranks wait for: why there is no run, or what follows.

    places : of each rank, its number on its machine and how many ranks that machine has.
    nodes : of each rank, the number of its node, which count in the order of their first ranks.
    gpus : those of the job. notice : where the launcher's variables contradict the nodes.
    """

    places: list[tuple[Rank, Ranks]]
    nodes: list[Rank]
    gpus: JobGPUs
    notice: Text = ""
    error: Text = ""


class MeetingError(GroupError):
    """There is no run, for a reason that all ranks know; the store still answers."""


@dataclass
class _Wait:
    """How long this rank waits, and for whom; ``whom`` changes as the ranks meet.

    flag : the one that sets ``seconds``. own : where the ranks meet, once this one has come there.
    """

    seconds: float
    deadline: float
    whom: Callable[[], str]
    flag: str
    own: dist.Store | None = None

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def meet(
    launch: LaunchSpec,
    timeout_seconds: float,
    *,
    store: dist.Store | None = None,
    flag: str = "--meeting-timeout",
) -> tuple[dist.Store, MeetingOutcome]:
    """Wait until all ranks have come; return the store that they share and every rank's place.

    ``store`` : the launcher's, which may hold what earlier ranks wrote; None: rank 0 opens one.
    ``flag`` : the one with which the user sets ``timeout_seconds``.
    Raises GroupError if rank 0 cannot be reached or is lost, ranks are missing after
    ``timeout_seconds``, a rank was started twice, the ranks were given different numbers of nodes,
    or this rank's token is not rank 0's; UserError if the port is in use, or if rank 0 runs on
    another machine than the address that the other ranks connect to.
    """
    return _within(
        timeout_seconds,
        launch,
        lambda wait: _join(store or _open_or_connect(launch, wait), launch, wait),
        flag,
    )


def shared_store(launch: LaunchSpec, timeout_seconds: float, *, flag: str) -> dist.TCPStore:
    """Return the store at rank 0's address, for ``meet`` and for what the ranks exchange besides.

    Raises the errors of ``meet`` that concern rank 0.
    """
    return _within(timeout_seconds, launch, lambda wait: _open_or_connect(launch, wait), flag)


def _open_or_connect(launch: LaunchSpec, wait: _Wait) -> dist.TCPStore:
    return _serve(launch, wait) if launch.rank == 0 else _connect(launch, wait)


def _within(timeout_seconds: float, launch: LaunchSpec, join: Callable[[_Wait], T], flag: str) -> T:
    """Return the result of ``join``, and meanwhile print for whom this rank waits."""
    deadline = time.monotonic() + timeout_seconds
    wait = _Wait(timeout_seconds, deadline, lambda: f"rank 0 at {_address(launch)}", flag)
    # If rank 0's node pauses or its link is cut, the store's operations block until TCP times out.
    # A thread lets this rank give up before that.
    joining = in_thread(lambda: join(wait))
    try:
        _wait_for(joining, launch, wait)
    except KeyboardInterrupt:
        if wait.own is not None:
            _tell_interrupt(wait.own, launch)
        raise
    return joining.result()


def _wait_for(joining: concurrent.futures.Future, launch: LaunchSpec, wait: _Wait) -> None:
    pause = _FIRST_NOTICE_SECONDS
    while not concurrent.futures.wait([joining], min(pause, wait.left + _LOST_SECONDS)).done:
        if wait.left + _LOST_SECONDS <= 0:
            raise GroupError(
                f"lost rank 0 at {_address(launch)} while the ranks were meeting: it no longer "
                "answers. Its machine is paused or down, or the link to it is cut"
            )
        if wait.left >= 1:
            print_to_stderr(
                f"rank {launch.rank}: waiting for {wait.whom()} ({wait.left:.0f} s left)"
            )
        pause = _NOTICE_SECONDS


def _tell_interrupt(own: dist.Store, launch: LaunchSpec) -> None:
    """Tell the ranks that wait that somebody ends this one; for at most a second."""
    reason = f"rank {launch.rank} was interrupted while the ranks were meeting"
    # On a connection of its own: this rank's other one waits for the outcome.
    telling = in_thread(lambda: _end_meeting(own.clone(), reason))
    concurrent.futures.wait([telling], _FETCH_SECONDS)
    if launch.rank == 0:
        time.sleep(_FETCH_SECONDS)


def _serve(launch: LaunchSpec, wait: _Wait) -> dist.TCPStore:
    """Rank 0: open the store that the others connect to.

    It listens at the address given alone, unless other machines may know this one by another.
    """
    assert launch.master_ip is not None  # a process without a group meets nobody
    address, reason = listening_address(launch.master_ip)
    try:
        listener = listen(address, launch.master_port)
    except OSError as error:
        where = f"rank 0 cannot listen at {_address(launch)} ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            where = f"port {launch.master_port} is taken on this machine{_by_whom(launch)}: end it,"
        free = free_port(max(1024, launch.master_port + 1), address=address)
        raise UserError(f"{where} or add --master-port {free} on every rank") from error
    # torch's store keeps every connection, also of strangers, and refuses all without a descriptor.
    allow_most_descriptors()
    # torch closes the descriptor with the store, and does not if the store cannot be opened.
    local = replace(launch, master_ip=address or "127.0.0.1")
    store = _open_store(local, wait.seconds, listener=listener.detach())
    if not is_own(launch.master_ip) and not _is_reached(store, launch):
        raise UserError(
            f"{launch.master_ip} is not an address of this machine (it has "
            f"{', '.join(own_addresses()) or 'no address but loopback'}). Rank 0 must run on the "
            "machine that owns --master-ip."
        )
    if reason:
        print_to_stderr(
            f"rank 0: {reason}, so port {launch.master_port} is open on all addresses of this "
            "machine: let a firewall close it to all but the machines of the ranks"
        )
    return store


def _by_whom(launch: LaunchSpec) -> str:
    """Rank 0: return what has the port that it cannot open."""
    stranger = ""
    with contextlib.suppress(OSError):  # it listens at another of this machine's addresses
        stranger = _ask(launch, _AGAIN_SECONDS)
    if stranger:
        holder = port_holder(launch.master_port)
        return f": something answers there, but it is not this program ({stranger}; {holder})"
    return ", by another run or by another rank 0 of this one"


def _is_reached(store: dist.TCPStore, launch: LaunchSpec) -> bool:
    """Rank 0: return whether the address given leads to this process's store, as with NAT."""
    mark = secrets.token_hex(8)
    store.set(mark, "")
    try:
        if _ask(launch, _PROBE_SECONDS):
            return False
        return _open_store(replace(launch, rank=1), _PROBE_SECONDS).check([mark])
    except (OSError, dist.DistStoreError, dist.DistNetworkError):
        return False


def _connect(launch: LaunchSpec, wait: _Wait) -> dist.TCPStore:
    """Any other rank: connect to rank 0's store, as soon as rank 0 has opened it."""
    reason = "no answer"
    stranger = ""
    wait.whom = lambda: f"rank 0 at {_address(launch)}, {reason}"
    while (left := wait.left) > 0:
        try:
            found = _ask(launch, min(left, _ANSWER_SECONDS))
            if not found:
                return _open_store(launch, max(left, 1.0))
        except OSError as error:
            stranger = ""
            reason = why_unreached(error)
            time.sleep(_POLL_SECONDS)
            continue
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise _lost_rank0(launch, first_line(error)) from error
        if stranger:
            break  # twice in a row, so it is no rank 0 that has just ended
        stranger = reason = found
        time.sleep(_AGAIN_SECONDS)
    if stranger:
        raise _met_stranger(launch, stranger)
    raise GroupError(
        f"rank {launch.rank} could not reach rank 0 at {_address(launch)} within "
        f"{wait.seconds:g} s ({reason}): start rank 0, check that --master-ip is its machine's "
        "address, that --master-port is the same on every rank, and that no firewall closes it; "
        f"or give a longer {wait.flag}"
    )


def _met_stranger(launch: LaunchSpec, stranger: str) -> GroupError:
    return GroupError(
        f"something answers at {_address(launch)}, but it is not this program ({stranger}): end "
        "it, or give another --master-port on every rank"
    )


def refuse_stranger(launch: LaunchSpec) -> None:
    """Raise GroupError if something else than a store of torch answers at the ranks' address."""
    with contextlib.suppress(OSError):
        if stranger := _ask(launch, _ANSWER_SECONDS):
            raise _met_stranger(launch, stranger)


def _ask(launch: LaunchSpec, timeout_seconds: float) -> str:
    """Return what answers at rank 0's address instead of a store; "" if one does.

    Raises OSError if nothing answers; GroupError if the name is unknown.
    """
    assert launch.master_ip is not None
    try:
        return what_is_no_store(launch.master_ip, launch.master_port, timeout_seconds)
    except socket.gaierror as error:
        raise GroupError(
            f"--master-ip {launch.master_ip} is not an address and no known host name ({error}): "
            "give the IP address of rank 0's machine"
        ) from error


def _open_store(
    launch: LaunchSpec, timeout_seconds: float, *, listener: int | None = None
) -> dist.TCPStore:
    assert launch.master_ip is not None
    return dist.TCPStore(
        launch.master_ip,
        launch.master_port,
        is_master=launch.rank == 0,
        wait_for_workers=False,  # torch would not say which ones are missing
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener,
    )


def _join(store: dist.Store, launch: LaunchSpec, wait: _Wait) -> tuple[dist.Store, MeetingOutcome]:
    """Leave this rank's ``Peer`` and wait for the outcome."""
    own = dist.PrefixStore(keyed(launch.token, f"meeting {launch.generation}"), store)
    wait.own = own
    try:
        if launch.rank == 0:
            own.set(_SIZE, str(launch.world_size))
            store.set(_FINGERPRINT, _fingerprint(launch))
        else:
            _check_rank0(store, own, launch, wait)
        peer = this_peer(visible_gpus(), launch.local_rank, local_size=launch.local_size)
        first = own.compare_set(_PEER.format(launch.rank), "", encode(peer).decode())
        if first != encode(peer):
            other = decode(first, Peer, name=_STORE)
            raise _end_meeting(
                own,
                f"rank {launch.rank} was started twice: on {other.host} (process {other.pid}) and "
                f"on {peer.host} (process {peer.pid}); give each its own --rank",
            )
        own.add(_JOINED, 1)
        if launch.rank == 0:
            _wait_for_all(own, launch, wait)
        else:
            wait.whom = lambda: f"the other ranks; this one has joined {_address(launch)}"
            if not are_set(own, [_OUTCOME], wait.left):
                _end_meeting(own, _missing_ranks(own, launch, wait))
        outcome = decode(own.get(_OUTCOME), MeetingOutcome, name=_STORE)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise _lost_rank0(launch, first_line(error)) from error
    if outcome.error:
        if launch.rank == 0:
            time.sleep(_FETCH_SECONDS)
        raise MeetingError(outcome.error)
    return own, outcome


def _check_rank0(store: dist.Store, own: dist.Store, launch: LaunchSpec, wait: _Wait) -> None:
    """Any other rank: raise GroupError unless rank 0 has this rank's token and number of ranks."""
    deadline = wait.deadline
    if launch.opens_store:  # then rank 0 has, and sets its keys at once
        deadline = min(deadline, time.monotonic() + _BEGIN_SECONDS)
    wait.whom = lambda: f"rank 0 to begin at {_address(launch)}, where a store answers"
    while not are_set(own, [_SIZE], min(wait.left, _TOKEN_SECONDS)):
        if store.check([_FINGERPRINT]):
            there = store.get(_FINGERPRINT)
            if there != _fingerprint(launch).encode():
                reason = explain_mismatch(here=bool(launch.token), there=bool(there))
                raise GroupError(
                    f"rank 0 at {_address(launch)} refused rank {launch.rank}: {reason}"
                )
        if time.monotonic() >= deadline:
            if launch.opens_store:
                raise _met_stranger(launch, "it is the store of another run, or of lab doctor")
            raise _lost_rank0(launch, "it has not begun to meet the others")
    size = decode(own.get(_SIZE), Ranks, name=_STORE)
    if size != launch.world_size:
        raise _end_meeting(
            own,
            f"rank {launch.rank} was started with --num-nodes {launch.world_size}, but rank 0 with "
            f"{size}: give the same on every rank",
        )


def _wait_for_all(own: dist.Store, launch: LaunchSpec, wait: _Wait) -> None:
    """Rank 0: wait until all ranks have come, and set the outcome."""
    wait.whom = lambda: f"{ranks_text(_missing(own, launch))} of {launch.world_size}"
    # The store runs on this machine: polling it costs the network nothing.
    while own.add(_JOINED, 0) < launch.world_size and not own.check([_OUTCOME]):
        if wait.left < 0:
            _end_meeting(own, _missing_ranks(own, launch, wait))
        time.sleep(_POLL_SECONDS)
    if not own.check([_OUTCOME]):
        contents = own.multi_get([_PEER.format(rank) for rank in range(launch.world_size)])
        outcome = place_ranks([decode(content, Peer, name=_STORE) for content in contents])
        own.compare_set(_OUTCOME, "", encode(outcome).decode())


def place_ranks(peers: Sequence[Peer]) -> MeetingOutcome:
    """Return every rank's place.

    Without a launcher, local ranks follow the order of the ranks on each machine. Emulated nodes
    are one machine: they share its cores.
    """
    sizes = Counter(peer.machine for peer in peers)
    come: Counter[str] = Counter()
    local_ranks = []
    for peer in peers:
        local_ranks.append(come[peer.machine] if peer.local_rank is None else peer.local_rank)
        come[peer.machine] += 1
    places = [
        (local_rank, sizes[peer.machine])
        for local_rank, peer in zip(local_ranks, peers, strict=True)
    ]
    layout = layout_of([peer.node for peer in peers])
    return MeetingOutcome(
        places,
        node_numbers(layout),
        compare_gpus(peers, local_ranks),
        _contradiction(peers, layout),
    )


def _contradiction(peers: Sequence[Peer], layout: Sequence[Sequence[int]]) -> str:
    """Return how a launcher's number of ranks on a node differs from what the ranks found.

    That of the first such rank; "" if none differs.
    """
    for ranks in layout:
        for rank in ranks:
            said = peers[rank].local_size
            if said is not None and said != len(ranks):
                value = "1 or not set" if said == 1 else said
                return (
                    f"LOCAL_WORLD_SIZE of rank {rank} is {value}, but by host name, boot and "
                    f"network its node {peers[rank].host} has {count(len(ranks), 'rank')}: "
                    f"{ranks_text(ranks)}. Threads and GPUs follow LOCAL_WORLD_SIZE. Start one "
                    "torchrun per node, or set LOCAL_RANK and LOCAL_WORLD_SIZE to match"
                )
    return ""


def _end_meeting(own: dist.Store, reason: str) -> MeetingError:
    """Tell all ranks why there is no run, unless they know the outcome; return it as an error."""
    own.compare_set(_OUTCOME, "", encode(MeetingOutcome([], [], JobGPUs(), error=reason)).decode())
    return MeetingError(reason)


def are_set(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Return whether the keys are set within ``seconds``; the store answers this request then."""
    try:
        store.wait(keys, timedelta(seconds=max(seconds, _POLL_SECONDS)))
    except dist.DistStoreError:  # a lost store is a DistNetworkError
        return False
    return True


def keyed(token: str, purpose: str) -> str:
    """Return a text that only those who have the token can compute."""
    return hmac.new(os.fsencode(token), purpose.encode(), hashlib.sha256).hexdigest()


def _fingerprint(launch: LaunchSpec) -> str:
    return keyed(launch.token, "fingerprint") if launch.token else ""


def explain_mismatch(*, here: bool, there: bool) -> str:
    """Return why a rank's token does not match rank 0's; here, there : whether each has one."""
    if here and there:
        return f"its {RUN_TOKEN} is not rank 0's: set the same value on every node"
    found = (
        "this rank has a run token and rank 0 has none"
        if here
        else "rank 0 has a run token and this rank has none"
    )
    return f"{found}: set {RUN_TOKEN} to the same value on every node, or on none"


def _missing(own: dist.Store, launch: LaunchSpec) -> list[int]:
    return [rank for rank in range(launch.world_size) if not own.check([_PEER.format(rank)])]


def _missing_ranks(own: dist.Store, launch: LaunchSpec, wait: _Wait) -> str:
    missing = _missing(own, launch)
    remedy = "Start them with the same command and their --rank"
    if launch.local_rank is not None:
        remedy = "Their output says why"
    return (
        f"{launch.world_size - len(missing)} of {launch.world_size} ranks came to "
        f"{_address(launch)} within {wait.seconds:g} s; missing: {ranks_text(missing)}. {remedy}, "
        f"or give a longer {wait.flag}"
    )


def _lost_rank0(launch: LaunchSpec, reason: str) -> GroupError:
    return GroupError(
        f"lost rank 0 at {_address(launch)} while the ranks were meeting; its own output says "
        f"why ({reason})"
    )


def _address(launch: LaunchSpec) -> str:
    return f"{launch.master_ip}:{launch.master_port}"
