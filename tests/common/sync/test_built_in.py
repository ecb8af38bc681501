"""PyTorch's own ways to shard a training; test_sync.py compares them with one process."""

import functools
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from common.checkpoint import load_model_state, load_optimizer_state
from common.errors import UserError
from common.profiling.comm_trace import MessageRecorder
from common.sync import build_message_plan_from
from common.sync.fsdp import layers
from common.sync.message_cost import GradientSize
from common.training_engine.evaluation_loop import predict
from lab.proofs.equivalence import proof_sync
from tests.helpers import RankError, run_ranks
from tests.helpers.engines import prepared
from tests.helpers.strategies import Switching

SHARDING = ["fsdp", "ddp_zero1", "sharded"]


class Small(nn.Module):
    """BatchNorm, a layer that no rank uses, a frozen one; (batch, 3, 4, 4) to (batch, 3)."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)
        self.unused, self.frozen = nn.Linear(7, 7), nn.Linear(20, 20).requires_grad_(False)
        self.head = nn.Linear(20, 3)
        self.double()

    def forward(self, images):
        hidden = torch.tanh(self.norm(self.conv(images))).flatten(1)
        return self.head(torch.tanh(self.frozen(hidden)))


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 4, 3, 4, 4, generator=generator, dtype=torch.float64)
    return [(one, torch.tensor([0, 1, 2, 0])) for one in images]


def trained(rank, name, checkpoint):
    """Resume if there is a checkpoint, train, evaluate, train; return a loss and a checkpoint."""
    torch.manual_seed(rank)
    model, criterion = Small(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    entries = torch.load(io.BytesIO(checkpoint)) if checkpoint else {}
    if entries:
        load_model_state(model, entries, name="a test's")
        load_optimizer_state(optimizer, entries, name="a test's")
    sync = proof_sync(name)  # with the search for unused parameters, where there is one
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    settings = {"optimizer": optimizer, "scheduler": scheduler, "clip_norm": 0.5, "use_ema": True}
    engine = prepared(model, sync, **settings)
    if entries:
        engine.load_state(entries)
    engine.train_epoch(batches(3, rank), epoch=1)
    engine.agree_on_buffers()
    found = {"loss": predict(engine.model, "cpu", criterion, batches(1, 9)).mean_loss}
    predict(engine.model, "cpu", criterion, batches(rank, 8))  # each rank another number
    engine.train_epoch(batches(2, 50 + rank), epoch=2)
    engine.agree_on_buffers()
    buffer = io.BytesIO()
    torch.save(engine.state(epoch=2, loss=0.0), buffer)
    engine.close()
    optimizer.step()  # whole again: it steps without the strategy
    return {**found, "checkpoint": buffer.getvalue()}


def each_trained(rank, jobs):
    return {key: trained(rank, *job) for key, job in jobs.items()}


@functools.cache
def fresh():
    """Return by rank what each strategy has found on two ranks from a fresh start."""
    return run_ranks(2, each_trained, {name: (name, b"") for name in ["all_reduce", *SHARDING]})


@functools.cache
def resumed():
    """Return by rank what three ranks found from checkpoints of two, as "this from that"."""
    pairs = [("all_reduce", "all_reduce")]
    pairs += [pair for name in SHARDING for pair in ((name, "all_reduce"), ("all_reduce", name))]
    saved = {name: found["checkpoint"] for name, found in fresh()[0].items()}
    jobs = {f"{name} from {other}": (name, saved[other]) for name, other in pairs}
    return run_ranks(3, each_trained, jobs)


def assert_equal_results(ranks, key, other):
    for found in ranks:
        assert math.isclose(found[key]["loss"], found[other]["loss"], rel_tol=1e-9)
        ours, theirs = (
            dict(tree_flatten_with_path(torch.load(io.BytesIO(found[one]["checkpoint"])))[0])
            for one in (key, other)
        )
        assert ours.keys() == theirs.keys()
        for path, value in ours.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(value, theirs[path], rtol=1e-9, atol=1e-12)
            else:
                assert value == theirs[path], path


@pytest.mark.parametrize("name", SHARDING)
def test_checkpoints_are_those_of_all_reduce_also_with_another_number_of_ranks(name):
    """AdamW's state, weights, averages; with clipping, and an evaluation within the training."""
    assert_equal_results(fresh(), name, "all_reduce")
    for key in (f"{name} from all_reduce", f"all_reduce from {name}"):
        assert_equal_results(resumed(), key, "all_reduce from all_reduce")


def conv_net():
    return nn.Sequential(nn.Conv2d(3, 37, 3), nn.BatchNorm2d(37), nn.Flatten(), nn.Linear(148, 3))


def messages(rank):
    """Return kind, bytes and sent bytes of the messages of a step, after another one."""
    model, batch = conv_net(), (torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, 0]))
    engine = prepared(model, "fsdp", sync_batchnorm=False)
    for recorder in (MessageRecorder(), MessageRecorder()):
        with recorder:
            engine.train_step([batch], global_samples=4 * engine.world.size)
    recorder.finish()
    assert all(bool(p.isnan().all()) for p in model.parameters())  # a rank has not all of them
    engine.sync.sync_replicas(model)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    engine.close()
    return [(sent.kind, sent.bytes, sent.sent_bytes) for sent in recorder.messages]


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_fsdp_are_those_of_the_plan(size):
    sizes = GradientSize.of(conv_net().parameters())
    plan = build_message_plan_from("fsdp", {})
    planned = [(one.kind, int(one.nbytes)) for one in plan.operations(sizes, size)]
    for rank, real in enumerate(run_ranks(size, messages)):
        kinds = [kind for kind, *_ in real]
        assert "reduce_scatter" in kinds  # which Gloo runs as an all_reduce
        sent = [kind.replace("reduce_scatter", "all_reduce") for kind in kinds]
        assert list(zip(sent, [nbytes for _, nbytes, _ in real], strict=True)) == planned
        total = float(plan.bytes_sent(sizes, rank, size))
        assert sum(sent for *_, sent in real) == pytest.approx(total)


def test_a_layer_is_what_can_be_gathered_by_itself():
    convolution, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    attention, head = nn.MultiheadAttention(4, 2), nn.Linear(4, 4)
    model = nn.Sequential(convolution, norm, attention, head)
    model.tied = nn.Linear(4, 4)
    model.tied.weight = head.weight
    assert layers(model) == [[convolution, norm], [attention]]
    assert layers(model[0]) == []  # the whole model is gathered as one


def refused(rank, kind):
    model = Switching()
    model.use_extra = kind == "branches" and rank == 0
    if kind == "compiled":
        model.compile()
    batch = (torch.randn(2, 4), torch.tensor([0, 1]))
    prepared(model, "fsdp").train_step([batch], global_samples=4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("branches", "extra on rank 0, base on rank 1"),
        pytest.param("compiled", "leave out --compile", marks=pytest.mark.slow),
    ],
)
def test_what_fsdp_cannot_do_is_refused_by_name(kind, message):
    with pytest.raises(RankError, match=f"{UserError.__name__}: .*{message}"):
        run_ranks(2, refused, kind)
