"""The token of a run: a secret that every rank has, and the messages that it signs.

Ranks meet at a store that everyone who reaches its port can read and write. So a rank that wants
to join signs its arrival with the token, and rank 0 signs its answer; the token itself is never
sent. Without a token all messages have the same signature key, the empty one. No torch here.
"""

import hashlib
import hmac
import os
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from common.utils.environment import RUN_TOKEN, setting
from common.utils.typed_json import Count, Rank, Ranks, Seconds, encode

_Hex = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
_Signature = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_UNSIGNED = "0" * 64
_Host = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,253}$")]
_NCCLHost = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{0,253}$")]
_GPU = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,60}$")]

MOST_GPUS = 32
"""A rank reports no more; an arrival must fit into the 4096 bytes that rank 0 reads."""


@dataclass(frozen=True)
class Peer:
    """What each rank reports about itself when it joins.

    host : its host's name. pid : its process id.
    gpus : names of the GPUs that it sees, in CUDA's order; the same GPU has one name everywhere.
    local_rank : from its launcher; None: rank 0 counts the ranks on each host.
    nccl_host : NCCL_HOSTID, by which NCCL tells machines apart; "" if it is not set.
    """

    host: _Host
    pid: Count
    gpus: Annotated[list[_GPU], Meta(max_length=MOST_GPUS)]
    local_rank: Rank | None = None
    nccl_host: _NCCLHost = ""


@dataclass(frozen=True)
class Invitation:
    """What rank 0 shows to all.

    nonce : signed by every arrival, so that none can be used for another run.
    has_token : whether rank 0 has a token. joined : all ranks by number, once the group is full.
    signature : proves that somebody with the token wrote it.
    """

    nonce: _Hex
    has_token: bool
    joined: Annotated[list[Peer], Meta(max_length=65_536)]
    signature: _Signature = _UNSIGNED

    def signed(self, token: str) -> "Invitation":
        """Return this invitation with the signature that the token gives it."""
        unsigned = encode(replace(self, signature=_UNSIGNED))
        return replace(self, signature=_sign(token, b"invitation", unsigned))

    def proves(self, token: str) -> bool:
        """Return whether rank 0, or an earlier one, has this token."""
        return hmac.compare_digest(self.signature, self.signed(token).signature)


@dataclass(frozen=True)
class Arrival:
    """A rank's request to join the group.

    sender : a number of this process, under which it waits for the answer.
    waited_seconds : 0, or the time after which the rank gives up.
    """

    nonce: _Hex
    sender: _Hex
    rank: Rank
    size: Ranks
    peer: Peer
    has_token: bool
    waited_seconds: Seconds = 0.0
    signature: _Signature = _UNSIGNED

    def signed(self, token: str) -> "Arrival":
        """Return this arrival with the signature that the token gives it."""
        unsigned = encode(replace(self, signature=_UNSIGNED))
        return replace(self, signature=_sign(token, b"arrival", unsigned))

    def waiting(self, seconds: float) -> "Arrival":
        """Return this arrival as the rank repeats it when it gives up after ``seconds``."""
        return replace(self, waited_seconds=seconds)

    def proves(self, token: str) -> bool:
        """Return whether the sender has this token."""
        return hmac.compare_digest(self.signature, self.signed(token).signature)


@dataclass(frozen=True)
class Answer:
    """Rank 0's answer to one arrival: ``content`` is JSON, "" if the signature was wrong."""

    content: Annotated[str, Meta(max_length=10_000)]
    signature: _Signature

    @staticmethod
    def to(arrival: Arrival, content: str, token: str) -> "Answer":
        """Return the signed answer to an arrival."""
        question = (arrival.nonce + arrival.sender).encode()
        return Answer(content, _sign(token, b"answer", question, content.encode()))

    def proves(self, token: str, arrival: Arrival) -> bool:
        """Return whether somebody with this token answered this arrival."""
        expected = Answer.to(arrival, self.content, token)
        return hmac.compare_digest(self.signature, expected.signature)


def new_nonce() -> str:
    """Return 32 random hexadecimal digits."""
    return secrets.token_hex(16)


def this_peer(gpus: Sequence[str] = (), local_rank: int | None = None) -> Peer:
    """Return what this process reports about itself."""
    nccl_host = _plain(setting("NCCL_HOSTID") or "")
    return Peer(host_name(), os.getpid(), list(gpus), local_rank, nccl_host)


def host_name() -> str:
    """Return this host's name, without characters that no host name has."""
    return _plain(socket.gethostname()) or "unknown"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:253]


def explain_mismatch(*, here: bool, there: bool) -> str:
    """Return why a rank's token does not match rank 0's; here, there : whether each has one."""
    if here and there:
        return f"its {RUN_TOKEN} is not rank 0's: set the same value on every node"
    with_one, without = ("this rank", "rank 0") if here else ("rank 0", "this rank")
    return (
        f"{with_one} has a run token and {without} has none: set {RUN_TOKEN} to the same value on "
        "every node, or on none"
    )


def _sign(token: str, *parts: bytes) -> str:
    return hmac.new(os.fsencode(token), b"\0".join(parts), hashlib.sha256).hexdigest()
