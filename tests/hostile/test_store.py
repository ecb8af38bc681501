"""Strangers at the port where the ranks meet: none becomes a rank, runs code or ends the run."""

import contextlib
import json
import os
import pickle
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from common.distributed.admission import ANSWER, INVITATION, QUEUE, Decision
from common.distributed.launch_env import LaunchSpec
from common.distributed.rendezvous import rendezvous
from common.distributed.run_token import Answer, Arrival, Invitation, new_nonce, this_peer
from common.errors import GroupError
from common.utils.environment import RUN_TOKEN
from common.utils.system import allow_most_descriptors
from common.utils.typed_json import decode, encode
from tests.helpers import TINY, Started, free_port, start_part, wait_until
from tests.helpers.hostile import CASES, altered, damaged, run_cases

TOKEN = "the right one"
ESCAPES = "\x1b[2J\x1b]0;owned\x07"


class Ranks:
    """Two ranks in threads; rank 1 starts with ``finish``, once the strangers have been here."""

    def __init__(self, threads: ThreadPoolExecutor, token: str) -> None:
        self._threads = threads
        self.launch = LaunchSpec(0, 2, "127.0.0.1", free_port(), token=token)
        self.root = threads.submit(rendezvous, self.launch, 20.0)

    def store(self) -> dist.TCPStore:
        """Return a stranger's connection to the store, once rank 0 has opened it."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.launch.master_port), 5).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        store = dist.TCPStore(
            "127.0.0.1",
            self.launch.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
        )
        store.wait([INVITATION])
        return store

    def joins(self, token: str, timeout_seconds: float = 20.0) -> Any:
        """Return the placement of a rank 1 with this token, or raise its error."""
        launch = replace(self.launch, rank=1, token=token)
        return self._threads.submit(rendezvous, launch, timeout_seconds).result(40)[1]

    def finish(self) -> None:
        """Assert that the rightful rank 1 still joins."""
        assert self.joins(self.launch.token).local_rank == 1
        assert self.root.result(40)[1].local_rank == 0


@contextlib.contextmanager
def ranks(token: str = TOKEN) -> Iterator[Ranks]:
    with ThreadPoolExecutor(4) as threads:
        yield Ranks(threads, token)


def arrival(store: dist.TCPStore, **changes: Any) -> Arrival:
    """Return what a stranger who knows the protocol, but no token, sends as rank 1."""
    invitation = decode(store.get(INVITATION), Invitation, name="invitation")
    return replace(
        Arrival(invitation.nonce, new_nonce(), 1, 2, this_peer(), True), **changes
    ).signed("guessed")


@pytest.mark.parametrize(
    ("root", "other", "here", "there"),
    [
        (TOKEN, "another", "its LAB_RUN_TOKEN is not rank 0's", "its LAB_RUN_TOKEN is not"),
        (TOKEN, "", "rank 0 has a run token and this rank has none", "rank 0 has a run token and"),
        ("", TOKEN, "this rank has a run token and rank 0 has none", "this rank has a run token"),
    ],
)
def test_a_rank_with_another_token_is_refused_and_its_number_stays_free(
    root: str, other: str, here: str, there: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ranks(root) as group:
        with pytest.raises(GroupError, match=f"refused rank 1: {here}"):
            group.joins(other)
        group.finish()
    said = capsys.readouterr().err
    assert said.count("refused a process on") == 1, said
    assert f"(process {os.getpid()}) that wants to be rank 1: {there}" in said
    assert "the right one" not in said


def test_a_rank_does_not_believe_a_store_that_lacks_its_token() -> None:
    """A stranger who is at the address first cannot place this rank, or speak to its terminal."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for content in ('{"error":"' + ESCAPES.encode("unicode_escape").decode() + '"}', "{}"):
        store.set(INVITATION, encode(Invitation(new_nonce(), True, [])).decode())
        with ThreadPoolExecutor(1) as threads:
            launch = LaunchSpec(1, 2, "127.0.0.1", port, token=TOKEN)
            joining = threads.submit(rendezvous, launch, 10.0)
            found = decode(store.queue_pop(QUEUE), Arrival, name="arrival")
            answer = Answer.to(found, content, "guessed")
            store.set(ANSWER.format(found.sender), encode(answer).decode())
            with pytest.raises(GroupError, match="is not rank 0 of this run") as refused:
                joining.result(20)
        assert "\x1b" not in str(refused.value)


def test_a_stranger_cannot_replace_the_invitation(capsys: pytest.CaptureFixture[str]) -> None:
    """Garbage and forgeries are ignored, rank 0 sets its own again, also where it was deleted."""
    forged = Invitation(new_nonce(), True, [this_peer(), this_peer()]).signed("guessed")
    with ranks() as group:
        store = group.store()
        own = store.get(INVITATION)
        for content in ("garbage", encode(forged).decode(), "[" * 100_000):
            store.set(INVITATION, content)
            wait_until(lambda: store.get(INVITATION) == own, "rank 0 sets its invitation again")
        store.delete_key(INVITATION)
        store.wait([INVITATION], timedelta(seconds=5))
        store.set(INVITATION, encode(forged).decode())
        group.finish()
    assert capsys.readouterr().err.count("refused what somebody wrote over its invitation") == 4


@pytest.mark.parametrize("content", ["garbage", "forged"])
def test_a_rank_waits_for_an_invitation_with_its_token(content: str) -> None:
    """A rank that meets a stranger's alone blames nobody, and ends at its timeout."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    forged = Invitation(new_nonce(), True, [this_peer(), this_peer()]).signed("guessed")
    store.set(INVITATION, content if content == "garbage" else encode(forged).decode())
    began = time.monotonic()
    with pytest.raises(GroupError, match=r"what answers at .* is not rank 0 of this"):
        rendezvous(LaunchSpec(1, 2, "127.0.0.1", port, token=TOKEN), 0.5)
    assert time.monotonic() - began >= 0.5


class Bomb:
    """Pickled, it leaves a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_strangers_cost_a_line_each_and_run_no_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "owned"))
    with ranks() as group:
        store = group.store()
        for garbage in (
            bomb,
            b"",
            b"\x00" * 100,
            b"x" * 1_000_000,
            b"[" * 100_000,
            encode({"host": ESCAPES}),
            encode(arrival(store)).replace(b'"rank":1', b'"rank":99999'),
        ):
            store.queue_push(QUEUE, garbage)
        claimed = arrival(store)
        store.queue_push(QUEUE, encode(claimed))
        store.wait([ANSWER.format(claimed.sender)])
        for _ in range(3000):  # more than rank 0 takes at once
            store.queue_push(QUEUE, bomb)
        group.finish()
    said = capsys.readouterr().err
    assert said.count("rank 0: refused") == 10, said
    assert "(the last such line)" in said
    assert "\x1b" not in said
    assert not (tmp_path / "owned").exists()


def test_bytes_that_are_no_store_protocol_leave_the_meeting_alone() -> None:
    """While the ranks meet, strangers send garbage and stay connected, or only connect."""
    with ranks() as group, contextlib.ExitStack() as stack:
        group.store()
        for kind in range(256):
            place = ("127.0.0.1", group.launch.master_port)
            stranger = stack.enter_context(socket.create_connection(place, 5))
            with contextlib.suppress(OSError):  # the store has closed the connection
                stranger.sendall(bytes([kind]) + os.urandom(kind))
        group.finish()


@CASES
def test_altered_messages_are_refused_or_read(cases: int) -> None:
    """Whatever is in the store: one error, and no proof without the token."""
    good = Arrival(new_nonce(), new_nonce(), 1, 2, this_peer(), True).signed(TOKEN)
    contents = (
        (Arrival, good),
        (Answer, Answer.to(good, '{"error":"x"}', TOKEN)),
        (Invitation, Invitation(new_nonce(), True, [this_peer()]).signed(TOKEN)),
        (Decision, Decision(error="no")),
    )
    for schema, content in contents:
        plain = json.loads(encode(content))

        def read(raw: bytes, schema: Any = schema, content: Any = content) -> None:
            found = decode(raw, schema, name="message")
            if isinstance(found, Arrival | Invitation) and found != content:
                assert not found.proves(TOKEN)

        values = altered(plain).map(lambda value: json.dumps(value).encode())
        run_cases(cases, values | damaged(encode(content)), read)


@pytest.mark.slow
def test_900_strangers_at_the_port_cost_a_run_a_line(tmp_path: Path) -> None:
    """600 say nothing, 300 one byte; rank 0 may open 256 files unless it asks for more.

    Rank 0 has its token from the flag, which wins over the variable and is in no file.
    """
    allow_most_descriptors()  # of this process: the strangers'
    port = free_port()

    def start(rank: int, variable: str, *flags: str) -> Started:
        return start_part(
            "PartTwo",
            *("--master-ip", "127.0.0.1", "--master-port", port, "--num-nodes", 2, "--rank", rank),
            *("--dataset", "digits", "--max-steps", 2, "--batch-size", 16, "--threads", 1, *TINY),
            *("--output-dir", tmp_path / "out", *flags),
            cwd=tmp_path,
            env={RUN_TOKEN: variable},
        )

    root = start(0, "an old one", "--run-token", "the-token-of-this-run")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    psutil.Process(root.process.pid).rlimit(psutil.RLIMIT_NOFILE, (256, hard))
    with contextlib.ExitStack() as held:

        def connected() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                held.enter_context(socket.create_connection(("127.0.0.1", port), 5))
                return True
            return False

        wait_until(connected, "rank 0 listens")
        for number in range(900):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            stranger.sendall(b"\x00" * (number % 3 == 0))
        other = start(1, "the-token-of-this-run")
        ends = [one.end() for one in (root, other)]
    assert [end.status for end in ends] == [0, 0], ends
    assert re.search(r"rank 0: port \d+ has 90\d connections for 2 ranks, 90\d of", ends[0].err)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    for content in [end.out + end.err for end in ends] + [
        path.read_bytes().decode(errors="replace") for path in written
    ]:
        assert "the-token" not in content
