"""Edge cases of the exact strategies: lengths, types, hooks that must go, and buffers."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError
from common.profiling.comm_trace import MessageRecorder
from common.sync import build_sync
from common.utils.hashing import digest
from lab.proofs.equivalence import parameter_errors, proof_sync
from tests.helpers import RankError, run_ranks
from tests.helpers.engines import prepared, sgd
from tests.helpers.strategies import EXACT, Deep, Mixed


def sums(rank, lengths):
    """Compare sums of whole numbers, which must be right to the bit."""
    for name in ("gather_scatter_flat", "tree", "ring", "halving_doubling", "hierarchical"):
        sync = proof_sync(name)
        model = nn.Linear(1, 1)
        sync.prepare(model, sgd(model))
        for length in lengths:
            total = torch.arange(length, dtype=torch.float64) * (rank + 1) + rank
            expected = total.clone()
            dist.all_reduce(expected)
            sync.sum_over_ranks(total)
            assert torch.equal(total, expected), f"{name} of {length}"
        sync.close()


@pytest.mark.parametrize(
    "size",
    [
        *(1, 2, 3, 4, 7),
        pytest.param(8, marks=pytest.mark.slow),
        *(pytest.param(size, marks=pytest.mark.long) for size in (5, 6, 9)),
    ],
)
def test_any_length_is_summed_over_any_number_of_ranks(size):
    run_ranks(size, sums, [0, 1, 2, 3, 5, 7, 8, 13, 64, 101])


def drawn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mixed_types(rank):
    found = {}
    for name in EXACT:
        torch.manual_seed(0)
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        small = {"bucket_mb": 0.002} if name in ("overlapped", "sharded") else {}
        sync = build_sync(name, **small)
        training = sync.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            training(drawn(4, 3, 5, 5, seed=10 * step + rank)).square().sum().backward()
            sync.synchronize(model)
            optimizer.step()
            sync.after_step(model)
        sync.sync_replicas(model)
        sync.close()
        found[name] = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    for name in EXACT:
        torch.testing.assert_close(found[name], found["all_reduce"], rtol=0, atol=1e-6, msg=name)


def test_parameters_of_two_types():
    run_ranks(2, mixed_types)


def order_of_events(rank):
    """Compare the order of gradients (by layer) and messages (by bucket) in several steps."""
    model, events = Deep(), []
    sync = build_sync("overlapped", bucket_mb=1)
    sync.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    class Teller(MessageRecorder):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = len(self.messages)
            result = super().__torch_dispatch__(func, types, args, kwargs)
            events.extend(f"{sent.kind} {before}" for sent in self.messages[before:])
            return result

    def step(parts=1):
        model.zero_grad(set_to_none=True)
        for _ in range(parts - 1):
            with sync.no_sync():
                model(torch.ones(2, 512)).sum().backward()
            events.append("part")
        model(torch.ones(2, 512)).sum().backward()
        events.append("backward ends")
        sync.synchronize(model)

    def told(parts=1):
        events.clear()
        with Teller():
            step(parts)
        return list(events)

    for index, p in enumerate(model.parameters()):
        p.register_hook(lambda _gradient, index=index: events.append(f"gradient {index}"))
    gradients = [f"gradient {i}" for i in (3, 2, 1, 0)]
    messages = [f"all_reduce {i}" for i in range(5)]
    pairs = zip(gradients, messages[:4], strict=True)
    overlapped = [event for pair in pairs for event in pair] + ["backward ends"]
    # The first message agrees on the gradients.
    assert told() == [*gradients, "backward ends", *messages]
    assert told() == overlapped
    assert told(parts=2) == [*gradients, "part", *overlapped]
    sync.close()
    step()
    with Teller():
        events.clear()
        model(torch.ones(2, 512)).sum().backward()
    assert events == gradients


def test_overlapped_sends_a_bucket_before_the_next_gradient_is_there():
    run_ranks(2, order_of_events)


def engines_in_turn(rank):
    """Train one model with engines that each prepare twice; compare with all_reduce throughout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, 4)).double()
    other = copy.deepcopy(model)
    labels = torch.tensor([0, 1, 2, 3])
    batches = [
        (drawn(4, 3, 8, 8, seed=10 * step + rank, dtype=torch.float64), labels) for step in range(3)
    ]
    several = ("overlapped", "sharded", "ring", "overlapped", "ddp_zero1")
    for trained, ways in ((model, several), (other, ("all_reduce",) * len(several))):
        for way in ways:
            engine = prepared(trained, way)
            engine.train_epoch(batches, epoch=1)
            engine.prepare(sgd(trained), nn.CrossEntropyLoss())
            engine.train_epoch(batches, epoch=2)
            engine.close()
    return max(parameter_errors(model, other).values()), digest(model.state_dict())


def test_engines_one_after_the_other_leave_no_hook_behind():
    results = run_ranks(2, engines_in_turn)
    assert results[0][0] < 1e-12
    assert results[0] == results[1]


def two_backward_passes(rank):
    model = Deep()
    sync = build_sync("overlapped")
    sync.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for passes in (1, 2):
        model.zero_grad(set_to_none=True)
        for _ in range(passes):
            model(torch.ones(2, 512)).sum().backward()
        sync.synchronize(model)


def test_a_second_backward_pass_in_a_step_is_an_error_in_place_of_a_wrong_sum():
    told = f"{UserError.__name__}: a parameter got a second gradient in one step"
    with pytest.raises(RankError, match=told):
        run_ranks(1, two_backward_passes)


def flat_gradients(rank, name):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 2)).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync, places = build_sync(name), []
    sync.prepare(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(1, 3, 5, 5)).sum().backward()
        sync.synchronize(model)
        gradients = [p.grad for p in model.parameters()]
        places.append([(g.untyped_storage().data_ptr(), g.storage_offset()) for g in gradients])
    offsets = sorted((g.storage_offset(), g.numel()) for g in gradients)
    assert places[0] == places[1], "they keep their addresses from step to step"
    assert len({storage for storage, _ in places[0]}) == 1, "they share one storage"
    assert all(p.grad.stride() == p.stride() for p in model.parameters())
    assert all(begin + n == after for (begin, n), (after, _) in pairwise(offsets)), "a gap"
    assert all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.parametrize(
    "name",
    [
        *("all_reduce_flat", "gather_scatter_flat", "tree", "ring", "halving_doubling"),
        *("hierarchical", "overlapped"),
    ],
)
def test_gradients_become_views_of_a_buffer_that_is_kept(name):
    run_ranks(1, flat_gradients, name)
