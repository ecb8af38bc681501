"""The rendezvous of ranks: they meet at a TCP store, where rank 0 admits them (admission.py).

Callers need ``rendezvous``, which opens the store on rank 0's node for ranks that were started by
hand, or ``check_in``, which uses the store of a launcher; process_group.py then opens the group
over it. Unlike torch's rendezvous, they name missing ranks and a rank that was started twice, and
admit only ranks that have the run's token. However many ranks there are, each sends few requests:

    rank 0                 sets the invitation, takes arrivals from a queue, sets the answers
    every other rank       reads the invitation, queues its arrival, waits for its answer

The answer is the rank's placement on its machine, or the reason why there is no run. A rank that
waits prints for whom after a few seconds.
"""

import concurrent.futures
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from common.distributed.admission import (
    ANSWER,
    INVITATION,
    QUEUE,
    Admission,
    Decision,
    RankPlacement,
    other_size,
    started_twice,
)
from common.distributed.gpus import visible_gpus
from common.distributed.launch_env import LaunchSpec
from common.distributed.rank0_store import Wait, address_of, connect, lost_rank0, serve
from common.distributed.run_token import (
    Answer,
    Arrival,
    Invitation,
    Peer,
    explain_mismatch,
    new_nonce,
    this_peer,
)
from common.errors import GroupError, UserError, first_line, print_to_stderr
from common.utils.processes import in_thread
from common.utils.typed_json import decode, encode

T = TypeVar("T")
_SHORTEST_WAIT_SECONDS, _POLL_SECONDS = 0.05, 0.05
_FETCH_SECONDS = 1.0  # for rank 0 to say who is missing
_LAST_ANSWER_SECONDS = 2.0
_FIRST_NOTICE_SECONDS, _NOTICE_SECONDS = 5.0, 15.0


def rendezvous(launch: LaunchSpec, timeout_seconds: float) -> tuple[dist.TCPStore, RankPlacement]:
    """Wait until all ranks have joined; return the store that they share and this rank's placement.

    Raises GroupError if rank 0 cannot be reached or is lost, ranks are missing after
    ``timeout_seconds``, a rank was started twice, the ranks were given different numbers of nodes,
    or this rank's token is not rank 0's; UserError if the port is in use, or if rank 0 runs on
    another machine than the address that the other ranks connect to.
    """

    def join(wait: Wait) -> tuple[dist.TCPStore, RankPlacement]:
        store = serve(launch, wait) if launch.rank == 0 else connect(launch, wait)
        return store, _join(store, launch, wait)

    return _within(timeout_seconds, launch, join)


def check_in(store: dist.Store, launch: LaunchSpec, timeout_seconds: float) -> RankPlacement:
    """As ``rendezvous``, over a launcher's store, which may still hold what earlier ranks wrote."""
    return _within(timeout_seconds, launch, lambda wait: _join(store, launch, wait))


def _within(timeout_seconds: float, launch: LaunchSpec, join: Callable[[Wait], T]) -> T:
    """Return the result of ``join``, and meanwhile print for whom this rank waits."""
    wait = Wait(
        timeout_seconds,
        time.monotonic() + timeout_seconds,
        lambda: f"rank 0 at {address_of(launch)}",
    )
    # If rank 0's node pauses or its link is cut, the store's operations block until TCP times out.
    # A thread lets this rank give up before that.
    joining = in_thread(lambda: join(wait))
    pause, last_answer = _FIRST_NOTICE_SECONDS, _FETCH_SECONDS + _LAST_ANSWER_SECONDS
    while not concurrent.futures.wait([joining], min(pause, wait.left + last_answer)).done:
        if wait.left + last_answer <= 0:
            raise _lost(launch)
        if wait.left >= 1:
            notice = f"rank {launch.rank}: waiting for {wait.whom()} ({wait.left:.0f} s left)"
            print_to_stderr(notice)
        pause = _NOTICE_SECONDS
    return joining.result()


def _join(store: dist.Store, launch: LaunchSpec, wait: Wait) -> RankPlacement:
    peer = this_peer(visible_gpus(), launch.local_rank)
    try:
        if launch.rank == 0:
            return Admission(store, launch, wait, peer).admit_all()
        return _ask_rank0(store, launch, wait, peer)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise lost_rank0(launch, first_line(error)) from error


def _ask_rank0(store: dist.Store, launch: LaunchSpec, wait: Wait, peer: Peer) -> RankPlacement:
    """Any other rank: ask to join, wait for rank 0's answer, and after the timeout give up."""
    while True:
        invitation = _invitation(store, launch, wait)
        # Without the signature it is a stranger's, or the tokens differ: rank 0's answer shows it.
        # A launcher's store may hold the one of earlier ranks.
        proven = invitation.proves(launch.token)
        if proven and invitation.joined and launch.opens_store:
            raise GroupError(_late(launch, invitation, peer))
        wait.whom = lambda: f"the other ranks; this one has joined {address_of(launch)}"
        sender = new_nonce()
        arrival = Arrival(
            invitation.nonce, sender, launch.rank, launch.size, peer, bool(launch.token)
        ).signed(launch.token)
        decision = _answer(store, launch, wait, arrival)
        if decision is None:
            raise _lost(launch) if proven else _impostor(launch, there=invitation.has_token)
        if decision.placement is not None:
            return decision.placement
        if decision.error:
            raise GroupError(decision.error)
        current = _invitation(store, launch, wait)
        if current.nonce == invitation.nonce:  # else it was of earlier ranks
            reason = explain_mismatch(here=bool(launch.token), there=current.has_token)
            raise GroupError(f"rank 0 at {address_of(launch)} refused rank {launch.rank}: {reason}")


def _invitation(store: dist.Store, launch: LaunchSpec, wait: Wait) -> Invitation:
    """Return the invitation. What a stranger writes in its place is ignored: rank 0 restores it."""
    while _wait_for_key(store, INVITATION, wait.left):
        try:
            return _read(store, INVITATION, Invitation, launch)
        except GroupError:
            if wait.left < 0:
                raise
        time.sleep(_POLL_SECONDS)
    raise _lost(launch)


def _answer(store: dist.Store, launch: LaunchSpec, wait: Wait, arrival: Arrival) -> Decision | None:
    """Queue the arrival and return what rank 0 decides; an empty decision if it is refused.

    None if there is no answer in time.
    """
    key = ANSWER.format(arrival.sender)
    store.queue_push(QUEUE, encode(arrival))
    if not _wait_for_key(store, key, wait.left):
        # Rank 0 may have a longer timeout: let it tell all ranks who is missing.
        late = arrival.waiting(wait.seconds).signed(launch.token)
        store.queue_push(QUEUE, encode(late))
        if not _wait_for_key(store, key, _FETCH_SECONDS):
            return None
    answer = _read(store, key, Answer, launch)
    if not answer.content:
        return Decision()
    if not answer.proves(launch.token, arrival):
        raise _impostor(launch, there=True)
    return _parse(answer.content.encode(), Decision, launch)


def _read(store: dist.Store, key: str, schema: type[T], launch: LaunchSpec) -> T:
    return _parse(store.get(key), schema, launch)


def _parse(content: bytes, schema: type[T], launch: LaunchSpec) -> T:
    try:
        return decode(content, schema, name="its message")
    except UserError as error:
        raise GroupError(
            f"what answers at {address_of(launch)} is not rank 0 of this version: {error}"
        ) from error


def _wait_for_key(store: dist.Store, key: str, seconds: float) -> bool:
    """Return whether the key is set within ``seconds``; the store answers this one request then."""
    try:
        store.wait([key], timedelta(seconds=max(seconds, _SHORTEST_WAIT_SECONDS)))
    except dist.DistStoreError:  # a lost store is a DistNetworkError
        return False
    return True


def _late(launch: LaunchSpec, invitation: Invitation, peer: Peer) -> str:
    """Return why a rank cannot join: the group is full."""
    size = len(invitation.joined)
    if launch.size != size:
        return other_size(launch.rank, launch.size, size)
    return started_twice(launch.rank, invitation.joined[launch.rank], peer)


def _impostor(launch: LaunchSpec, *, there: bool) -> GroupError:
    return GroupError(
        f"what answers at {address_of(launch)} is not rank 0 of this run: "
        f"{explain_mismatch(here=bool(launch.token), there=there)}"
    )


def _lost(launch: LaunchSpec) -> GroupError:
    return GroupError(
        f"lost rank 0 at {address_of(launch)} while the ranks were meeting: it no longer answers. "
        "Its node is paused or down, or the link to it is cut"
    )
