"""``sharded``: weights under way, optimisers and their state, overflow, and the order of events.

No step is followed by ``sync_replicas``, so that weights and state stay spread over the ranks.
"""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.errors import UserError
from common.profiling.comm_trace import MessageRecorder
from common.sync.optimizer_shards import ELEMENTWISE, OptimizerShards
from common.sync.plans.sharded import ShardedPlan
from common.sync.sharded import Sharded
from lab.proofs.equivalence import parameter_errors
from tests.helpers import run_ranks, wait_until
from tests.helpers.engines import prepared, sgd
from tests.helpers.strategies import Deep

STEPS, SAMPLES = 4, 3
BUCKET_MB = 0.0008  # several buckets


class WhenWaitedFor:
    """A gather that begins only when somebody waits for it: whoever does not wait reads NaN."""

    def __init__(self, weights):
        self._weights = weights

    def wait(self):
        self._weights.start_gather().wait()


class Poisoned(Sharded):
    """Fills the other ranks' parts of the weights with NaN until somebody waits for them."""

    def after_step(self, model):
        for bucket in self._buckets:
            own = bucket.weights.own.clone()
            bucket.weights.tensor.fill_(torch.nan)
            bucket.weights.own.copy_(own)
            bucket.gathering = WhenWaitedFor(bucket.weights)


class Attends(nn.Module):
    """Attention, whose ``out_proj`` is never called, tied weights, and a parameter of one entry."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        # Without biases: that of the keys has a gradient of rounding errors alone.
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.norm, self.second = nn.LayerNorm(8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden)[0])
        return self.head(self.gain * torch.tanh(self.second(hidden)).mean(dim=1))


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(SAMPLES, 5, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (SAMPLES,), generator=generator)


def new_model():
    torch.manual_seed(0)
    return Attends()


def two_groups(kind, model, **options):
    """Return an optimiser with two groups, since biases rarely have weight decay."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return kind([{"params": weights, "weight_decay": 0.01}, {"params": others}], lr=0.02, **options)


def one_process(model, optimizer, ranks, steps):
    for step in steps:
        shards = [batch(step, rank) for rank in range(ranks)]
        inputs, labels = (torch.cat(parts) for parts in zip(*shards, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def train(engine, rank, steps):
    for step in steps:
        engine.train_step([batch(step, rank)], global_samples=SAMPLES * engine.world.size)


def poisoned():
    return Poisoned(ShardedPlan(bucket_mb=BUCKET_MB))


def greatest_error(model, reference):
    return max(parameter_errors(model, reference).values())


def state_tensors(optimizer):
    values = tree_leaves(list(optimizer.state.values()))
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


OPTIONS = {"SGD": {"momentum": 0.9}, "ASGD": {"t0": 1}}


def made(kind, model):
    if kind.__name__ == "Rprop":  # has no weight decay
        return kind(model.parameters(), lr=0.002)
    return two_groups(kind, model, **OPTIONS.get(kind.__name__, {}))


def every_optimizer(rank, ranks):
    """Compare with one process after four steps; return by optimiser this rank's share of state."""
    found = {}
    for kind in ELEMENTWISE:
        model, reference = new_model(), new_model()
        optimizer, whole = (made(kind, one) for one in (model, reference))
        engine = prepared(model, poisoned(), optimizer=optimizer)
        train(engine, rank, range(STEPS))
        one_process(reference, whole, ranks, range(STEPS))
        entries, own = (sum(s.numel() for s in state_tensors(one)) for one in (whole, optimizer))
        held = [one.untyped_storage().nbytes() // 8 for one in state_tensors(optimizer)]
        assert sum(held) == own, "the state keeps the memory of other ranks' parts"
        share = own / entries if entries else 0.0
        engine.agree_on_buffers()
        state, expected = optimizer.state_dict(), whole.state_dict()
        torch.testing.assert_close(state["state"], expected["state"])
        assert state["param_groups"] == expected["param_groups"]
        assert greatest_error(model, reference) < 1e-9, kind
        found[kind.__name__] = share
        engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_optimiser_equals_one_process_with_its_nth_part_of_the_state(ranks):
    by_rank = run_ranks(ranks, every_optimizer, ranks)
    for name in by_rank[0]:
        shares = [found[name] for found in by_rank]
        # Adagrad also keeps a state for the unused parameters, on every rank.
        assert sum(shares) == pytest.approx(1.0, abs=0.05), name
        assert max(shares) < 1 / ranks + 0.05, name


def test_other_optimisers_are_refused_by_name():
    class Own(torch.optim.SGD):
        """May do anything in its step."""

    model = nn.Linear(2, 2)
    for kind in (torch.optim.LBFGS, Own):
        with pytest.raises(UserError, match=rf"got the optimiser {kind.__name__}, .*SGD"):
            OptimizerShards(kind(model.parameters(), lr=0.1))


def averages(rank):
    found = []
    for sync in (poisoned(), "all_reduce"):
        model = new_model()
        optimizer = two_groups(torch.optim.SGD, model)
        engine = prepared(model, sync, optimizer=optimizer, use_ema=True)
        train(engine, rank, range(STEPS))
        found.append(torch.cat([p.detach().reshape(-1) for p in engine.ema.module.parameters()]))
        copy.deepcopy(model)(batch(0, 0)[0])  # a copy has hooks that wait for nothing
        engine.close()
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)


def test_the_moving_average_reads_whole_weights():
    run_ranks(2, averages)


def overflow(rank, ranks, name):
    """Let one entry of rank 0's gradient overflow in the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    sync = poisoned() if name == "sharded" else name
    engine = prepared(model, sync, amp_dtype=torch.float16)
    torch.manual_seed(rank)
    data = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))]

    def step():
        engine.train_step(data, global_samples=4 * ranks)
        engine.agree_on_buffers()

    step()
    before, scale = copy.deepcopy(model), engine.scaler.get_scale()

    def break_one_entry(gradient):
        broken = gradient.clone()
        broken.view(-1)[-1] = torch.inf
        return broken

    hook = model[0].weight.register_hook(break_one_entry) if rank == 0 else None
    step()
    assert greatest_error(model, before) == 0
    assert engine.scaler.get_scale() == scale / 2
    if hook is not None:
        hook.remove()
    step()
    engine.close()
    assert 0 < greatest_error(model, before) < 1


@pytest.mark.parametrize("name", ["sharded", "ddp_zero1"])
def test_all_ranks_skip_a_step_that_overflows_in_one_ranks_part(name):
    run_ranks(3, overflow, 3, name)


def order_of_events(rank):
    """Compare the events of the third step, which has two micro-batches, and of a step after."""
    model, events = Deep(), []
    sync = Sharded(ShardedPlan(bucket_mb=1))
    optimizer = sgd(model)
    sync.prepare(model, optimizer)

    @contextmanager
    def waiting():
        events.append("waits")
        yield

    def compute_gradient(index):
        """In the last micro-batch, wait until the bucket before this one is under way."""
        sent = 2 * (len(model.layers) - 1 - index) if sync.recording != nullcontext else 0
        wait_until(lambda: len(recorder.messages) >= sent, f"bucket {index + 1}")
        events.append(f"gradient {index}")

    recorder = MessageRecorder()
    sync.waiting = waiting
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, index=index: events.append(f"layer {index}"))
        layer.weight.register_hook(lambda _, index=index: compute_gradient(index))
    for step in range(3):
        events.clear()
        optimizer.zero_grad()
        with sync.no_sync():
            model(torch.ones(2, 512)).sum().backward()
        events.append("accumulated")
        sync.recording = recorder.for_thread if step == 2 else nullcontext
        with recorder if step == 2 else nullcontext():
            model(torch.ones(2, 512)).sum().backward()
            sync.synchronize(model)
        optimizer.step()
        sync.after_step(model)
    sync.sync_replicas(model)
    sync.close()
    count = len(events)
    model(torch.ones(2, 512)).sum().backward()
    layers, gradients = [f"layer {i}" for i in range(4)], [f"gradient {i}" for i in (3, 2, 1, 0)]
    waits = [event for layer in layers for event in ("waits", layer)]
    assert events[:count] == [*waits, *gradients, "accumulated", *layers, *gradients]
    assert events[count:] == [*layers, *gradients], "after close"


def test_each_layer_waits_for_its_own_bucket_and_each_bucket_leaves_when_it_is_full():
    run_ranks(2, order_of_events)
