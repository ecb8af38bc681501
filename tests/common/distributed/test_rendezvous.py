"""The rendezvous of ranks started by hand: local ranks, and the load on rank 0's machine."""

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
