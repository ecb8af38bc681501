"""Edge cases of the exact strategies: accumulation, types, lengths, and hooks.

The lengths include those that no world size divides. Hooks must disappear when an engine closes.
"""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError
from common.profiling.comm_trace import Message, MessageRecorder
from common.sync import build_sync
from common.sync.base import GradientSync
from common.sync.halving_doubling import halving_doubling_all_reduce
from common.sync.local_sgd import LocalSGD
from common.sync.ring import ring_all_reduce
from common.sync.tree import tree_all_reduce
from common.training_engine import TrainingEngine
from common.utils.hashing import digest
from lab.proofs.equivalence import parameter_errors
from tests.helpers import RankError, run_ranks
from tests.helpers.strategies import EXACT, Deep, Mixed

MIXING = [name for name in EXACT if name != "ddp_zero1"]  # which refuses several types
BY_HAND = {
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}


# --- All-reduce algorithms ---


def sums(rank: int, lengths: list[int]) -> list[str]:
    """Return the algorithms and lengths with a wrong sum.

    The values are whole numbers, so the sum must be right to the bit.
    """
    wrong = []
    for length in lengths:
        for name, all_reduce in BY_HAND.items():
            total = torch.arange(length, dtype=torch.float64) * (rank + 1) + rank
            expected = total.clone()
            dist.all_reduce(expected)
            all_reduce(total)
            if not torch.equal(total, expected):
                wrong.append(f"{name} of {length}")
    return wrong


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 7, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 6, 8, 9))]
)
def test_any_length_is_summed_over_any_number_of_ranks(size: int) -> None:
    assert run_ranks(size, sums, [0, 1, 2, 3, 5, 7, 8, 13, 64, 101]) == [[]] * size


# --- Whole steps ---


def mixed_types(rank: int) -> dict[str, str]:
    found = {}
    for name in MIXING:
        torch.manual_seed(0)
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sync = build_sync(
            name, **({"bucket_mb": 0.002} if name in ("overlapped", "sharded") else {})
        )
        training = sync.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(
                4, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank)
            )
            training(inputs).square().sum().backward()
            sync.synchronize(model)
            optimizer.step()
            sync.after_step(model)
        sync.sync_replicas(model)
        sync.close()
        found[name] = [p.detach().double().numpy() for p in model.parameters()]
    return found


def test_parameters_of_two_types() -> None:
    for found in run_ranks(2, mixed_types):
        for name in MIXING:
            for ours, theirs in zip(found[name], found["all_reduce"], strict=True):
                assert abs(ours - theirs).max() <= 1e-6, name


# --- overlapped ---


def order_of_events(rank: int) -> dict[str, list]:
    """Return the order of gradients (by layer) and messages (by bucket) in several steps.

    These are the first step, the second, one with accumulation, and one after close().
    """
    model, events = Deep(), []
    sync = build_sync("overlapped", bucket_mb=1)
    sync.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    class Teller(MessageRecorder):
        def _record(self, message: Message, work: object) -> None:
            super()._record(message, work)
            events.append(f"{message.kind} {len(self.messages) - 1}")

    def step(parts: int = 1) -> None:
        for p in model.parameters():
            p.grad = None
        for _ in range(parts - 1):
            with sync.no_sync():
                model(torch.ones(2, 512)).sum().backward()
            events.append("part")
        model(torch.ones(2, 512)).sum().backward()
        events.append("backward ends")
        sync.synchronize(model)

    def told(parts: int = 1) -> list[str]:
        events.clear()
        with Teller():
            step(parts)
        return list(events)

    for index, p in enumerate(model.parameters()):
        p.register_hook(lambda _gradient, index=index: events.append(f"gradient {index}"))
    first, second, accumulated = told(), told(), told(parts=2)
    sync.close()
    step()
    with Teller():
        events.clear()
        model(torch.ones(2, 512)).sum().backward()
    return {"first": first, "second": second, "accumulated": accumulated, "closed": list(events)}


def test_overlapped_sends_a_bucket_before_the_next_gradient_is_there() -> None:
    gradients, messages = (
        [f"gradient {i}" for i in (3, 2, 1, 0)],
        [f"all_reduce {i}" for i in range(4)],
    )
    overlapped = [event for pair in zip(gradients, messages, strict=True) for event in pair] + [
        "backward ends"
    ]
    for found in run_ranks(2, order_of_events):
        assert found["first"] == [
            *gradients,
            "backward ends",
            "all_reduce 0",
            *[f"all_reduce {i}" for i in range(1, 5)],
        ]
        assert found["second"] == overlapped
        assert found["accumulated"] == [*gradients, "part", *overlapped]
        assert found["closed"] == gradients


def engines_in_turn(rank: int) -> tuple[float, str]:
    """Train one model with three engines in turn; return its error and a digest.

    The engines use overlapped, sharded, ring and overlapped again, and each prepares twice. The
    reference uses all_reduce throughout.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, 4)).double()
    other = copy.deepcopy(model)
    batches = [
        (
            torch.randn(
                4,
                3,
                8,
                8,
                generator=torch.Generator().manual_seed(10 * step + rank),
                dtype=torch.float64,
            ),
            torch.tensor([0, 1, 2, 3]),
        )
        for step in range(3)
    ]
    for trained, ways in (
        (model, ("overlapped", "sharded", "ring", "overlapped")),
        (other, ("all_reduce",) * 4),
    ):
        for way in ways:
            engine = TrainingEngine(trained, "cpu", distributed=True, sync=way)
            for _ in range(2):
                engine.prepare(torch.optim.SGD(trained.parameters(), lr=0.1), nn.CrossEntropyLoss())
            engine.train_epoch(batches, epoch=1)
            engine.close()
    return max(parameter_errors(model, other).values()), digest(model.state_dict())


def test_engines_one_after_the_other_leave_no_hook_behind() -> None:
    results = run_ranks(2, engines_in_turn)
    assert results[0][0] < 1e-12
    assert results[0] == results[1]


def two_backward_passes(rank: int) -> None:
    model = Deep()
    sync = build_sync("overlapped")
    sync.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 512)).sum().backward()
    sync.synchronize(model)
    for p in model.parameters():
        p.grad = None
    model(torch.ones(2, 512)).sum().backward()
    model(torch.ones(2, 512)).sum().backward()


def test_a_second_backward_pass_in_a_step_is_an_error_in_place_of_a_wrong_sum() -> None:
    with pytest.raises(
        RankError, match=f"{UserError.__name__}: a parameter got a second gradient in one step"
    ):
        run_ranks(1, two_backward_passes)


def flat_gradients(rank: int, name: str) -> list[bool]:
    """Return five checks of the gradients; True if each holds.

    They keep their addresses from step to step, share one storage, have the parameters' strides,
    leave no gap, and are finite.
    """
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
        places.append(
            [
                (p.grad.untyped_storage().data_ptr(), p.grad.storage_offset())
                for p in model.parameters()
            ]
        )
    offsets = sorted(
        (offset, p.numel()) for (_, offset), p in zip(places[0], model.parameters(), strict=True)
    )
    return [
        places[0] == places[1],
        len({storage for storage, _ in places[0]}) == 1,
        all(p.grad.stride() == p.stride() for p in model.parameters()),
        [offset for offset, _ in offsets]
        == [sum(n for _, n in offsets[:i]) for i in range(len(offsets))],
        math.isfinite(float(next(model.parameters()).grad.sum())),
    ]


@pytest.mark.parametrize(
    "name",
    ["all_reduce_flat", "gather_scatter_flat", "tree", "ring", "halving_doubling", "overlapped"],
)
def test_gradients_become_views_of_a_buffer_that_is_kept(name: str) -> None:
    assert run_ranks(1, flat_gradients, name)[0] == [True] * 5


def test_settle_is_sync_replicas_by_its_older_name() -> None:
    """The old name works for one release; a strategy may define either of the two."""

    class Older(GradientSync):
        def settle(self, model: nn.Module) -> None:
            super().settle(model)  # as before, the base class does nothing
            model.settled = True

    class OlderLocalSGD(LocalSGD):
        def settle(self, model: nn.Module) -> None:
            model.settled = True

    for kind in (Older, OlderLocalSGD):
        for name in ("settle", "sync_replicas"):
            model = nn.Linear(1, 1)
            getattr(kind(), name)(model)
            assert model.settled
    assert LocalSGD.settle is LocalSGD.sync_replicas is not GradientSync.sync_replicas
