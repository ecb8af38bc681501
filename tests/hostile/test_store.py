"""Strangers at the port where the ranks meet: none becomes a rank, runs code or ends the run."""

import contextlib
import os
import pickle
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from common.distributed.launch_env import LaunchSpec
from common.distributed.meeting import meet
from common.errors import GroupError
from common.utils.environment import RUN_TOKEN
from common.utils.system import allow_most_descriptors
from tests.helpers import TINY, free_port, start_part, wait_until

TOKEN = "the right one"


class Ranks:
    """Two ranks in threads; rank 1 starts with ``finish``, once the strangers have been here."""

    def __init__(self, threads, token):
        self._threads = threads
        self.launch = LaunchSpec(0, 2, "127.0.0.1", free_port(), token=token)
        self.root = threads.submit(meet, self.launch, 20.0)

    def store(self):
        """Return a stranger's connection to the store, once rank 0 has opened it."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.launch.master_port), 5).close()
                break
            time.sleep(0.02)
        store = dist.TCPStore(
            "127.0.0.1",
            self.launch.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
        )
        store.wait(["token"])
        return store

    def joins(self, token, timeout_seconds=20.0):
        """Return the outcome for a rank 1 with this token, or raise its error."""
        launch = replace(self.launch, rank=1, token=token)
        return self._threads.submit(meet, launch, timeout_seconds).result(40)[1]

    def finish(self):
        """Assert that the rightful rank 1 still joins."""
        assert self.joins(self.launch.token).places == [(0, 2), (1, 2)]
        assert self.root.result(40)[1].places == [(0, 2), (1, 2)]


@contextlib.contextmanager
def ranks(token=TOKEN):
    with ThreadPoolExecutor(4) as threads:
        yield Ranks(threads, token)


@pytest.mark.parametrize(
    ("root", "other", "reason"),
    [
        (TOKEN, "another", "its LAB_RUN_TOKEN is not rank 0's"),
        (TOKEN, "", "rank 0 has a run token and this rank has none"),
        ("", TOKEN, "this rank has a run token and rank 0 has none"),
    ],
)
def test_a_rank_with_another_token_is_refused_at_once_and_its_number_stays_free(
    root, other, reason
):
    with ranks(root) as group:
        began = time.monotonic()
        with pytest.raises(GroupError, match=f"refused rank 1: {reason}") as refused:
            group.joins(other)
        assert time.monotonic() - began < 10, "it waited for the timeout"
        assert TOKEN not in str(refused.value)
        group.finish()


def test_a_rank_does_not_believe_a_store_that_lacks_its_token():
    """A stranger is at the address first, with the fingerprint of another token or of this one."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    launch = LaunchSpec(1, 2, "127.0.0.1", port, token=TOKEN)
    store.set("token", "0" * 64)
    with pytest.raises(GroupError, match="its LAB_RUN_TOKEN is not rank 0's"):
        meet(launch, 10.0)
    with ranks() as group:
        store.set("token", group.store().get("token"))  # what anybody can copy
        group.finish()
    for key, content in {"size": "2", "outcome": '{"places":[[0,2],[1,2]],"gpus":{}}'}.items():
        store.set(key, content)
    with pytest.raises(GroupError, match="the store of another run"):
        meet(launch, 2.0)


class Bomb:
    """Pickled, it leaves a file where it is loaded."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def test_what_strangers_write_ends_no_meeting_and_runs_no_code(tmp_path):
    """They do not know the prefix of the ranks' keys, and overwrite the one key without it."""
    bomb = pickle.dumps(Bomb(tmp_path / "owned")).decode("latin-1")
    garbage = (bomb, "", "\x00" * 100, "x" * 1_000_000, "[" * 100_000, "\x1b]0;owned\x07")
    with ranks() as group:
        store = group.store()
        for content in garbage:
            for key in ("token", "size", "joined", "peer/1", "outcome", "message", "found"):
                store.set(key, content)
        store.delete_key("token")
        store.set("token", "0" * 64)
        group.finish()
    assert not (tmp_path / "owned").exists()


def test_bytes_that_are_no_store_protocol_leave_the_meeting_alone():
    """While the ranks meet, strangers send garbage and stay connected, or only connect."""
    with ranks() as group, contextlib.ExitStack() as stack:
        group.store()
        for kind in range(256):
            place = ("127.0.0.1", group.launch.master_port)
            stranger = stack.enter_context(socket.create_connection(place, 5))
            with contextlib.suppress(OSError):  # the store has closed the connection
                stranger.sendall(bytes([kind]) + os.urandom(kind))
        group.finish()


@pytest.mark.slow
def test_900_strangers_at_the_port_delay_no_run(tmp_path):
    """600 say nothing, 300 one byte; rank 0 may open 256 files unless it asks for more.

    Rank 0 has its token from the flag, which wins over the variable and is in no file.
    """
    allow_most_descriptors()  # of this process: the strangers'
    port = free_port()

    def start(rank, variable, *flags):
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

        def connected():
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
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    for content in [end.out + end.err for end in ends] + [
        path.read_bytes().decode(errors="replace") for path in written
    ]:
        assert "the-token" not in content
