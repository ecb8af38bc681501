"""The rendezvous of ranks started by hand: local ranks, and the load on rank 0's machine."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from common.distributed import rendezvous as rendezvous_module
from common.distributed.admission import RankPlacement, place_ranks
from common.distributed.gpus import JobGPUs
from common.distributed.launch_env import LaunchSpec
from common.distributed.rank0_store import Wait, connect
from common.distributed.rendezvous import rendezvous
from common.distributed.run_token import Peer
from common.errors import GroupError
from tests.helpers import ROOT, free_port
from tests.helpers.cluster import needs_namespaces

_ASKS = (
    "set",
    "get",
    "add",
    "check",
    "wait",
    "compare_set",
    "multi_get",
    "multi_set",
    "queue_push",
)


def test_ranks_of_a_machine_sit_there_in_their_order() -> None:
    peers = [Peer(host, 1, []) for host in "abacb"]
    without = JobGPUs(0, "ranks 0, 1, 2, 3 and 4 see no GPU")
    assert place_ranks(peers) == [
        RankPlacement(0, 2, without),
        RankPlacement(0, 2, without),
        RankPlacement(1, 2, without),
        RankPlacement(0, 1, without),
        RankPlacement(1, 2, without),
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Count the requests to the stores of this process, once for each key they name."""
    counted: Counter = Counter()

    store_of_torch = dist.TCPStore

    class CountingStore(store_of_torch):
        """A store that counts the requests over its connection."""

        def __init__(self, host: str, port: int, **more: object) -> None:
            super().__init__(host, port, **more)
            self.by = "rank 0" if more["is_master"] else "others"

    def counting(name: str) -> object:
        def ask(store: CountingStore, keys: object, *arguments: object) -> object:
            counted[store.by] += len(keys) if isinstance(keys, list) else 1
            return getattr(store_of_torch, name)(store, keys, *arguments)

        return ask

    for name in _ASKS:
        setattr(CountingStore, name, counting(name))
    monkeypatch.setattr(dist, "TCPStore", CountingStore)
    return counted


# Each store looks up its peer's host name. If DNS drops some of many queries, 32 stores wait 5 s
# for one.
@pytest.mark.parametrize("size", [4, 10, pytest.param(32, marks=pytest.mark.slow)])
def test_what_a_rank_asks_does_not_grow_with_the_number_of_ranks(size: int, asked: Counter) -> None:
    """If each rank asked for each other rank, rank 0's machine would get size² requests.

    That is a million requests for 1,000 ranks.
    """
    port = free_port()
    with ThreadPoolExecutor(size) as threads:
        met = list(
            threads.map(
                lambda rank: rendezvous(LaunchSpec(rank, size, "127.0.0.1", port), 100.0),
                reversed(range(size)),
            )
        )
    assert sorted(placement.local_rank for _, placement in met) == list(range(size))
    assert {placement.local_size for _, placement in met} == {size}
    assert asked["others"] <= 7 * (size - 1)


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
def test_rank_0_must_run_where_the_address_leads() -> None:
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
    assert met == ["met", "0 1"]
    for place, outcome in zip(places[1:], wrong, strict=False):
        assert outcome == [
            "UserError",
            f"{place.partition(':')[0]} is not an address of this machine (it has 10.9.0.1, "
            "10.8.0.1). Rank 0 must run on the machine that owns --master-ip.",
        ]
    assert unknown[0] == "GroupError"
    assert "--master-ip no-such-host.invalid is not an address and no known host name" in unknown[1]


@pytest.mark.parametrize("stays", [False, True])
def test_a_lost_rank_0_and_another_program_are_told_apart(*, stays: bool) -> None:
    """Both accept a connection and close it; rank 0's port is closed with it."""

    def serve(listener: socket.socket) -> None:
        look, client = listener.accept()[0], listener.accept()[0]
        if not stays:
            listener.close()
        look.close()
        client.close()
        with suppress(OSError):  # the listener is closed
            while True:
                listener.accept()[0].close()

    expected = "something other than rank 0 answers" if stays else "lost rank 0"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        threads.submit(serve, listener)
        launch = LaunchSpec(1, 2, "127.0.0.1", listener.getsockname()[1])
        with pytest.raises(GroupError, match=f"^{expected} at 127"):
            connect(launch, Wait(1.0, time.monotonic() + 1.0, str))
        if stays:
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread


# --- what waiting ranks print ---


def test_waiting_ranks_say_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 names the missing ranks; the others say whether they have reached rank 0."""
    monkeypatch.setattr(rendezvous_module, "_FIRST_NOTICE_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous_module, "_NOTICE_SECONDS", 0.5)
    port, lone = free_port(), free_port()
    launches = [LaunchSpec(rank, 4, "127.0.0.1", port) for rank in (0, 2)]
    launches.append(LaunchSpec(3, 4, "127.0.0.1", lone))
    with ThreadPoolExecutor(3) as threads:
        joining = [threads.submit(rendezvous, launch, 3.0) for launch in launches]
        for rank in joining:
            assert isinstance(rank.exception(), GroupError)
    said = capsys.readouterr().err
    assert re.search(r"^rank 0: waiting for 2 of 4 ranks: 1, 3 \(\d s left\)$", said, re.M)
    joined = rf"^rank 2: waiting for the other ranks; this one has joined 127\.0\.0\.1:{port} "
    assert re.search(joined, said, re.M)
    alone = rf"^rank 3: waiting for rank 0 at 127\.0\.0\.1:{lone}, connection refused "
    assert re.search(alone, said, re.M)
    assert 6 <= said.count("\n") <= 15
