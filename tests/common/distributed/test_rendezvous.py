"""The meeting of ranks that were started by hand: who sits where, and how much of it passes rank 0's node."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from common.distributed.launch_env import LaunchSpec
from common.distributed.rendezvous import Peer, RankPlacement, place_ranks, rendezvous
from tests.helpers import free_port

_ASKS = ("set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set")


def test_ranks_of_a_machine_sit_there_in_their_order() -> None:
    peers = [Peer("a", 1, 2), Peer("b", 1, 2), Peer("a", 2, 2), Peer("c", 1, 2), Peer("b", 2, 2)]
    assert place_ranks(peers) == [
        RankPlacement(0, 2, True),
        RankPlacement(0, 2, True),
        RankPlacement(1, 2, True),
        RankPlacement(0, 1, True),
        RankPlacement(1, 2, True),
    ]
    crowded = [*peers, Peer("a", 3, 2)]
    assert [placement.gpus_suffice for placement in place_ranks(crowded)] == [False] * 6
    assert place_ranks(crowded)[5] == RankPlacement(2, 3, False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """What is asked of stores in this process, and how many keys those questions name."""
    counted: Counter = Counter()

    store_of_torch = dist.TCPStore

    class CountingStore(store_of_torch):
        """A store that counts what is asked of it over one connection."""

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


# Each store looks up the other end's name: where DNS leaves some of many questions without an
# answer, 32 wait 5 s for one.
@pytest.mark.parametrize("size", [4, 10, pytest.param(32, marks=pytest.mark.slow)])
def test_what_a_rank_asks_does_not_grow_with_the_number_of_ranks(size: int, asked: Counter) -> None:
    """Each rank asking for each other one would make it size² at rank 0's node: a million for a thousand ranks."""
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
