"""How ranks meet: their places, the load on rank 0's machine, addresses, and what they print."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from common.distributed import meeting
from common.distributed.gpus import Peer
from common.distributed.launch_env import LaunchSpec
from common.distributed.meeting import meet, place_ranks
from common.errors import GroupError, UserError
from common.utils import network
from common.utils.processes import in_thread
from tests.helpers import ROOT, free_port
from tests.helpers.cluster import needs_namespaces

_ASKS = ("set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set")


def meet_all(launches, timeout_seconds, **more):
    """Let these ranks meet, each in a thread; return their outcomes as futures that have ended."""
    with ThreadPoolExecutor(len(launches)) as threads:
        return [threads.submit(meet, one, timeout_seconds, **more) for one in launches]


def test_ranks_of_a_machine_sit_there_in_their_order():
    outcome = place_ranks([Peer(host, 1, [], host, host) for host in "abacb"])
    assert outcome.places == [(0, 2), (0, 2), (1, 2), (0, 1), (1, 2)]
    assert outcome.gpus.obstacle == "ranks 0, 1, 2, 3 and 4 see no GPU"


# Each store looks up its peer's host name. If DNS drops some of many queries, 32 stores wait 5 s
# for one.
@pytest.mark.parametrize("size", [4, 10, pytest.param(32, marks=pytest.mark.slow)])
def test_what_a_rank_asks_does_not_grow_with_the_number_of_ranks(size, monkeypatch):
    """If each rank asked for each other rank, rank 0's machine would get size² requests.

    That is a million requests for 1,000 ranks. Counted once for each key that a request names.
    """
    asked = {}
    store_of_torch = dist.PrefixStore

    class CountingStore(store_of_torch):
        def __init__(self, prefix, store):
            super().__init__(prefix, store)
            self.asked = asked[id(self)] = Counter()

    def counting(name):
        def ask(store, keys, *arguments):
            store.asked[name] += len(keys) if isinstance(keys, list) else 1
            return getattr(store_of_torch, name)(store, keys, *arguments)

        return ask

    for name in _ASKS:
        setattr(CountingStore, name, counting(name))
    monkeypatch.setattr(dist, "PrefixStore", CountingStore)
    port = free_port()
    launches = [LaunchSpec(rank, size, "127.0.0.1", port) for rank in reversed(range(size))]
    for joined in meet_all(launches, 100.0):
        assert joined.result()[1].places == [(rank, size) for rank in range(size)]
    others = [one for one in asked.values() if not one["set"]]  # rank 0 alone sets a key
    assert len(others) == size - 1
    assert all(0 < one.total() <= 7 for one in others), others


def test_restarted_ranks_do_not_read_what_earlier_ones_left():
    """torchrun's store stays; the second generation has the ranks on other hosts' places."""
    store = dist.HashStore()

    def places(generation, local_ranks):
        launches = [
            LaunchSpec(rank, 2, "127.0.0.1", local_rank=local, generation=generation)
            for rank, local in enumerate(local_ranks)
        ]
        first, second = (one.result()[1] for one in meet_all(launches, 20.0, store=store))
        assert first == second
        return first.places

    assert places("job 0 2", (0, 1)) == [(0, 2), (1, 2)]
    assert places("job 1 2", (1, 0)) == [(1, 2), (0, 2)]


def test_under_a_launcher_too_a_rank_without_the_token_is_refused():
    store = dist.HashStore()
    ranks = [
        LaunchSpec(rank, 2, "127.0.0.1", local_rank=rank, token=token)
        for rank, token in ((0, "mine"), (1, ""))
    ]
    first, second = meet_all(ranks, 4.0, store=store)
    with pytest.raises(GroupError, match="refused rank 1: rank 0 has a run token and this"):
        second.result()
    with pytest.raises(GroupError, match="missing: rank 1"):
        first.result()


# --- rank 0 at an address that is not its own ---

NETWORK = """
set -e
ip link set lo up
unshare --net sleep 60 & other=$!
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add here type veth peer name there netns $other
ip addr add 10.9.0.1/24 dev here
ip addr add 10.8.0.1/24 dev here
ip link set here up
# Connections to this address come back to this machine, but no interface has it, as with NAT.
ip route add local 10.9.0.200/32 dev lo
nsenter -t $other -n sh -c '
    ip addr add 10.9.0.2/24 dev there
    ip link set there up
    exec "$0" -m http.server --bind 10.9.0.2 29502' "$PYTHON" > /dev/null &
connect='import socket; socket.create_connection(("10.9.0.2", 29502))'
until "$PYTHON" -c "$connect" 2> /dev/null; do sleep 0.1; done
exec "$PYTHON" "$@"
"""


@needs_namespaces
def test_rank_0_must_run_where_the_address_leads():
    """An address of NAT is right; nobody's, a refusing one and another program's are wrong."""
    places = ["10.9.0.200:29500", "10.9.0.77:29501", "10.9.0.2:29502", "10.9.0.2:29503"]
    places += ["no-such-host.invalid:29504"]
    namespaces = ("--user", "--map-root-user", "--net", "--mount", "--pid", "--mount-proc")
    done = subprocess.run(
        [
            *("unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", NETWORK, "sh"),
            *(Path(__file__).with_name("rank0_addresses.py"), *places),
        ],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    met, *wrong, unknown = json.loads(done.stdout)
    assert met == ["met", "[(0, 2), (1, 2)]"]
    for place, (kind, told) in zip(places[1:], wrong, strict=False):
        assert kind == "UserError"
        assert f"{place.partition(':')[0]} is not an address of this machine" in told
        assert "10.9.0.1, 10.8.0.1" in told
    assert unknown[0] == "GroupError"
    assert "--master-ip no-such-host.invalid is not an address and no known host name" in unknown[1]


def speaks(banner):
    def serve(connection):
        connection.sendall(banner)
        connection.recv(100)

    return serve


def answers_lines(connection):
    """A web server: it waits for the empty line that ends a request."""
    asked = b""
    while b"\r\n\r\n" not in asked:
        asked += connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n")


def listens(connection):
    while connection.recv(100):
        pass


STRANGERS = {
    "ssh": (speaks(b"SSH-2.0-OpenSSH_9.2p1\r\n"), "it says 'SSH-2.0-OpenSSH_9.2p1'"),
    "http": (answers_lines, "it says 'HTTP/1.1 400 Bad Request'"),
    "binary": (speaks(b"\xff\x00" * 60), r"it says '\\xff"),
    "silent": (listens, "it says nothing within"),
    # as a rank 0 that has just ended
    "closing": (lambda connection: None, "it closes the connection"),
}


@contextmanager
def stranger(serve):
    """Let ``serve`` answer each connection at a port of loopback; yield the port."""

    def accept(listener):
        with suppress(OSError):  # the listener is closed
            while True:
                with listener.accept()[0] as connection, suppress(OSError):
                    connection.settimeout(5.0)
                    serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        threads.submit(accept, listener)
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(meeting, "_AGAIN_SECONDS", 0.3)
    monkeypatch.setattr(network, "_PROMPT_SECONDS", 0.3)
    monkeypatch.setattr(meeting, "_BEGIN_SECONDS", 1.0)


@pytest.mark.parametrize("kind", STRANGERS)
def test_every_rank_says_what_has_the_port(kind, impatient, capfd):
    """Long before the meeting's timeout, and without torch's warnings."""
    serve, says = STRANGERS[kind]
    with stranger(serve) as port:
        ranks = [LaunchSpec(rank, 3, "127.0.0.1", port) for rank in range(3)]
        first, *others = (rank.exception() for rank in meet_all(ranks, 60.0))
    assert isinstance(first, UserError)
    assert f"port {port} is taken on this machine: something answers there, but" in str(first)
    assert f"process {os.getpid()}" in str(first)
    for error in (first, *others):
        assert "it is not this program" in str(error)
        assert re.search(says, str(error))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_of_another_program_is_no_rank_0(use_libuv, impatient):
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv
    )
    store.set("token", "")  # a run without a token, which trains already
    assert network.what_is_no_store("127.0.0.1", store.port, 10.0) == ""
    with pytest.raises(GroupError, match=r"not this program \(it is the store of another run"):
        meet(LaunchSpec(1, 2, "127.0.0.1", store.port), 60.0)


def test_a_rank_0_that_comes_after_a_program_that_ended_is_met(impatient):
    """One closed connection is not enough: so does a rank 0 that has just ended."""
    with stranger(lambda connection: None) as port:
        other = in_thread(lambda: meet(LaunchSpec(1, 2, "127.0.0.1", port), 60.0))
        time.sleep(0.1)
    _, outcome = meet(LaunchSpec(0, 2, "127.0.0.1", port), 60.0)
    assert other.result()[1] == outcome


# --- what waiting ranks print ---


def test_waiting_ranks_say_for_whom(monkeypatch, capsys):
    """Rank 0 names the missing ranks; the others say whether they have reached rank 0."""
    monkeypatch.setattr(meeting, "_FIRST_NOTICE_SECONDS", 0.5)
    monkeypatch.setattr(meeting, "_NOTICE_SECONDS", 0.5)
    port, lone = free_port(), free_port()
    launches = [LaunchSpec(rank, 4, "127.0.0.1", port) for rank in (0, 2)]
    launches.append(LaunchSpec(3, 4, "127.0.0.1", lone))
    ended = meet_all(launches, 3.0)
    for rank in ended:
        assert isinstance(rank.exception(), GroupError)
    said = capsys.readouterr().err
    assert re.search(r"^rank 0: waiting for ranks 1 and 3 of 4 \(\d s left\)$", said, re.M)
    joined = rf"^rank 2: waiting for the other ranks; this one has joined 127\.0\.0\.1:{port} "
    assert re.search(joined, said, re.M)
    alone = rf"^rank 3: waiting for rank 0 at 127\.0\.0\.1:{lone}, connection refused "
    assert re.search(alone, said, re.M)
    assert 6 <= said.count("\n") <= 15
    for rank in ended:
        assert "give a longer --meeting-timeout" in str(rank.exception())
