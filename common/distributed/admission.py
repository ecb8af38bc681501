"""Rank 0's side of the rendezvous: ``Admission`` decides which processes become ranks.

Everyone who reaches the port can write to the store, so what is read here is bounded and checked.
A stranger's message costs a line in rank 0's output; the rank that it wanted to be stays free.
Rank 0 restores an invitation that was overwritten. A stranger who keeps deleting keys or taking
arrivals from the queue can still keep the ranks from meeting, until their timeout; so can one who
shows again what an earlier run with the same token wrote. Without a token, everyone can join.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn

import torch.distributed as dist
from msgspec import Meta

from common.distributed.gpus import JobGPUs, compare_gpus
from common.distributed.launch_env import LaunchSpec
from common.distributed.rank0_store import Wait, address_of, strangers
from common.distributed.run_token import (
    Answer,
    Arrival,
    Invitation,
    Peer,
    explain_mismatch,
    new_nonce,
)
from common.errors import GroupError, UserError, print_to_stderr
from common.utils.typed_json import Rank, Ranks, decode, encode

INVITATION, QUEUE, ANSWER = "invitation", "arrivals", "answer/{}"  # keys in the store

_POLL_SECONDS = 0.05
_FETCH_SECONDS = 1.0  # for the other ranks to fetch rank 0's message before its store ends
_MOST_BYTES = 4096
_MOST_LINES = 10
_AT_ONCE = 1000

_Line = Annotated[str, Meta(max_length=10_000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


@dataclass(frozen=True)
class RankPlacement:
    """A rank is ``local_rank`` of ``local_size`` on its machine; ``gpus`` are those of the job."""

    local_rank: Rank
    local_size: Ranks
    gpus: JobGPUs


@dataclass(frozen=True)
class Decision:
    """What rank 0 answers to a rank that has the token: its placement, or why there is no run."""

    placement: RankPlacement | None = None
    error: _Line = ""


def place_ranks(peers: Sequence[Peer]) -> list[RankPlacement]:
    """Return every rank's placement.

    Without a launcher, local ranks follow the order of the ranks on each host.
    """
    hosts = [peer.host for peer in peers]
    local_ranks = [
        hosts[:rank].count(peer.host) if peer.local_rank is None else peer.local_rank
        for rank, peer in enumerate(peers)
    ]
    gpus = compare_gpus(peers, local_ranks)
    return [
        RankPlacement(local_rank, hosts.count(host), gpus)
        for local_rank, host in zip(local_ranks, hosts, strict=True)
    ]


def started_twice(rank: int, first: Peer, second: Peer) -> str:
    """Return the message for two processes that want to be the same rank."""
    return (
        f"rank {rank} was started twice: on {first.host} (process {first.pid}) and on "
        f"{second.host} (process {second.pid}); give each node a --rank of its own"
    )


def other_size(rank: int, size: int, others: int) -> str:
    """Return the message for a rank that was given another number of ranks than the others."""
    return (
        f"rank {rank} was started with --num-nodes {size}, but others with {others}: give the "
        "same on every node"
    )


class Admission:
    """Invites the ranks, and waits until all have joined; ``own`` describes rank 0 itself."""

    def __init__(self, store: dist.Store, launch: LaunchSpec, wait: Wait, own: Peer) -> None:
        self._store, self._launch, self._wait = store, launch, wait
        self._nonce, self._invitation = new_nonce(), ""
        self._peers = {0: own}
        self._arrivals: dict[int, Arrival] = {}
        self._refusals = 0
        wait.whom = self._missing_text
        self._invite([])

    def admit_all(self) -> RankPlacement:
        """Wait until all ranks have joined, tell each its placement, and return rank 0's own.

        Raises GroupError if ranks are missing at the end, or contradict each other.
        """
        while len(self._peers) < self._launch.size:
            self._restore_invitation()
            if self._wait.left < 0:
                self._end(self._missing_message(self._wait.seconds))
            # The store runs on this machine: polling it costs the network nothing.
            if (arrival := self._next()) is None:
                time.sleep(_POLL_SECONDS)
            elif problem := self._problem(arrival):
                self._end(problem, arrival)
            elif arrival.rank not in self._peers:
                self._peers[arrival.rank] = arrival.peer
                self._arrivals[arrival.rank] = arrival
        placements = place_ranks([self._peers[rank] for rank in range(self._launch.size)])
        for rank, arrival in self._arrivals.items():
            self._answer(arrival, Decision(placements[rank]))
        self._invite([self._peers[rank] for rank in range(self._launch.size)])
        self._report_strangers()
        return placements[0]

    def _invite(self, joined: list[Peer]) -> None:
        token = self._launch.token
        invitation = Invitation(self._nonce, bool(token), joined).signed(token)
        self._invitation = encode(invitation).decode()
        self._store.set(INVITATION, self._invitation)

    def _restore_invitation(self) -> None:
        # Unlike get, compare_set does not wait for a key that was deleted: it sets it.
        found = self._store.compare_set(INVITATION, "", self._invitation)
        if found != self._invitation.encode():
            self._store.set(INVITATION, self._invitation)
            self._refuse("what somebody wrote over its invitation, and set this again")

    def _next(self) -> Arrival | None:
        """Return the next arrival that has the token; None if there is none now."""
        for _ in range(_AT_ONCE):  # a flood of others must not outlast the timeout
            try:
                content = self._store.queue_pop(QUEUE, block=False)
            except dist.QueueEmptyError:
                return None
            if arrival := self._checked(content):
                return arrival
        return None

    def _checked(self, content: bytes) -> Arrival | None:
        """Return the arrival if its sender has the token; else refuse it."""
        try:
            arrival = decode(content[: _MOST_BYTES + 1], Arrival, name="an arrival")
        except UserError:
            self._refuse("a message that no rank of this version sends")
            return None
        if arrival.nonce == self._nonce and arrival.proves(self._launch.token):
            return arrival
        self._restore_invitation()  # before the sender reads it again
        self._store.set(ANSWER.format(arrival.sender), encode(Answer("", "0" * 64)).decode())
        if arrival.nonce == self._nonce:  # else it answers the invitation of earlier ranks
            peer = arrival.peer
            reason = explain_mismatch(here=arrival.has_token, there=bool(self._launch.token))
            self._refuse(
                f"a process on {peer.host} (process {peer.pid}) that wants to be rank "
                f"{arrival.rank}: {reason}"
            )
        return None

    def _refuse(self, what: str) -> None:
        self._refusals += 1
        if self._refusals <= _MOST_LINES:
            last = " (the last such line)" if self._refusals == _MOST_LINES else ""
            print_to_stderr(f"rank 0: refused {what}{last}")

    def _report_strangers(self) -> None:
        if self._launch.opens_store and (found := strangers(self._launch)):
            print_to_stderr(f"rank 0: {found}")

    def _problem(self, arrival: Arrival) -> str:
        """Return why this arrival ends the rendezvous; "" if it does not."""
        size = self._launch.size
        if arrival.size != size or arrival.rank >= size:
            return other_size(arrival.rank, arrival.size, size)
        if arrival.waited_seconds:
            return self._missing_message(arrival.waited_seconds)
        known = self._arrivals.get(arrival.rank)
        if arrival.rank in self._peers and (known is None or known.sender != arrival.sender):
            return started_twice(arrival.rank, self._peers[arrival.rank], arrival.peer)
        return ""

    def _answer(self, arrival: Arrival, decision: Decision) -> None:
        answer = Answer.to(arrival, encode(decision).decode(), self._launch.token)
        self._store.set(ANSWER.format(arrival.sender), encode(answer).decode())

    def _end(self, message: str, cause: Arrival | None = None) -> NoReturn:
        """Tell every rank why there is no run, also those that still arrive; then raise."""
        self._report_strangers()
        for arrival in (*self._arrivals.values(), *([cause] if cause else [])):
            self._answer(arrival, Decision(error=message))
        deadline = time.monotonic() + _FETCH_SECONDS
        while time.monotonic() < deadline:
            if (late := self._next()) is not None:
                self._answer(late, Decision(error=message))
            else:
                time.sleep(_POLL_SECONDS)
        raise GroupError(message)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._launch.size) if rank not in self._peers]

    def _missing_text(self) -> str:
        missing = self._missing()
        return f"{len(missing)} of {self._launch.size} ranks: {_names(missing)}"

    def _missing_message(self, seconds: float) -> str:
        missing, size = self._missing(), self._launch.size
        remedy = "Start them with the same command and their --rank, or give a longer --timeout"
        if self._launch.local_rank is not None:
            remedy = "Their output says why, or give a longer --timeout"
        return (
            f"{size - len(missing)} of {size} ranks came to {address_of(self._launch)} within "
            f"{seconds:g} s; missing: rank{'s' if len(missing) > 1 else ''} {_names(missing)}. "
            f"{remedy}"
        )


def _names(ranks: Sequence[int]) -> str:
    """Return the numbers of the first 20 ranks."""
    more = f" and {len(ranks) - 20} more" if len(ranks) > 20 else ""
    return ", ".join(map(str, ranks[:20])) + more
