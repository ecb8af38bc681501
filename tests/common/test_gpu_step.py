"""The training step on a CUDA device: compiled, without host waits, and on two ranks.

``python3 -m pytest -m gpu`` runs only these and test_gpu.py. Two ranks share one GPU here, over
NCCL if it allows that, else over Gloo: for correctness only.
"""

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from common.data import load_dataset
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.profiling.comm_trace import Timeline
from common.sync import STRATEGIES, is_exact
from common.training import prepare_model_for_training
from common.training_engine.evaluation_loop import unwrap
from common.training_engine.lr_schedules import build_schedule
from common.training_engine.metrics import MetricsBuffer, StepOutcome
from lab.proofs.equivalence import errors_on_this_rank, parameter_errors, proof_sync
from lab.proofs.proof_model import Case, ProofModel
from tests.helpers import RankError, run_ranks
from tests.helpers.engines import prepared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

GPU = "cuda:0"
STEPS, EPOCHS = 12, 2


@pytest.fixture(autouse=True)
def _same_algorithms():
    """Let cuDNN choose the same algorithms, without tf32, in every step of a test."""
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        yield


class Batches:
    """Eleven batches of 16 and one of 9; each epoch has others."""

    def __init__(self, device):
        self.sampler, self._device, self._epoch = self, device, 1

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __len__(self):
        return STEPS

    def __iter__(self):
        generator = torch.Generator().manual_seed(self._epoch)
        for size in [16] * (STEPS - 1) + [9]:
            images = torch.randn(size, 3, 8, 8, generator=generator)
            labels = images.mean(dim=(1, 2, 3)).gt(0).long()
            yield images.to(self._device), labels.to(self._device)


class Network(nn.Module):
    """Maps (batch, 3, 8, 8) to (batch, 2); a class, since torch 2.11 compiles no nn.Sequential."""

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(3)
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 2))

    def forward(self, images):
        return self.layers(images)


def train(device, *, dropout=0.3, **options):
    """Return the engine and the records of all steps; ``options`` are of TrainingEngine."""
    model, criterion, optimizer = prepare_model_for_training(
        Network(dropout), device, 0.1, 0.9, 1e-3, False
    )
    schedule = build_schedule(optimizer, "onecycle", total_steps=STEPS * EPOCHS, warmup_steps=5)
    options |= {"optimizer": optimizer, "criterion": criterion, "scheduler": schedule}
    engine = prepared(model, device=device, use_ema=True, **options)
    batches, records = Batches(device), []
    for epoch in range(1, EPOCHS + 1):
        batches.set_epoch(epoch)
        engine.train_epoch(batches, epoch=epoch, seed=5, on_steps=records.extend)
    engine.close()
    return engine, records


def assert_close(one, other, tolerance):
    """Compare weights, running statistics and moving averages."""
    for model, expected in zip(one.evaluated_models, other.evaluated_models, strict=True):
        for (name, value), reference in zip(
            model.state_dict().items(), expected.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance, msg=name)


def test_a_compiled_training_equals_a_readable_one():
    """Without dropout, whose masks differ in compiled code."""
    readable, _ = train(GPU, dropout=0.0)
    graphs_before = counters["stats"]["unique_graphs"]
    compiled, _ = train(GPU, dropout=0.0, compile_model=True)
    assert counters["stats"]["unique_graphs"] > graphs_before, "nothing was compiled"
    assert compiled.compile_seconds > 0
    assert_close(compiled, readable, 1e-3)


def waiting_operation(device, steps, **options):
    """Return the error of the first operation of a step that waits for the GPU; "" if none does."""
    digits = load_dataset("digits", Path())
    loader = TrainLoader(
        digits, GlobalBatchSampler(len(digits.train), batch_size=16), device=device
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(7200, 10))
    model, criterion, optimizer = prepare_model_for_training(
        model, device, 0.01, 0.9, 5e-4, False, label_smoothing=0.1
    )
    schedule = build_schedule(optimizer, "onecycle", total_steps=99)
    options |= {"optimizer": optimizer, "criterion": criterion, "scheduler": schedule}
    engine = prepared(model, device=device, use_ema=True, clip_norm=1.0, **options)
    engine.train_epoch(loader, epoch=1, seed=0, max_steps=6)  # choose algorithms
    metrics = MetricsBuffer(
        engine.world,
        engine.timer,
        epoch=1,
        log_every=100,
        overflow_is_normal=engine.scaler.is_enabled(),
        equal_gradients=True,
    )
    batches = iter(loader)
    next(batches)  # copies the epoch's order to the GPU
    refuse = torch.cuda.set_sync_debug_mode if device != "cpu" else lambda _mode: None
    engine.timer.begin()
    refuse("error")
    try:
        for _ in range(steps):
            with engine.timer.section("data"):
                images, labels = next(batches)
            numbers = engine.train_step([(images, labels)], global_samples=len(labels), seeds=[1])
            metrics.add(StepOutcome(engine.step, numbers, 0.01, engine.timer.take()))
    except RuntimeError as error:
        return str(error)
    finally:
        refuse("default")
    metrics.flush(stop=False)
    engine.close()
    return ""


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_no_operation_of_a_step_waits_for_the_gpu(dtype):
    assert waiting_operation(GPU, 4, amp_dtype=dtype) == ""


def test_the_steps_times_add_up_to_the_wall_time():
    """Each step begins where the one before ended, by the GPU's clock."""
    _, records = train(GPU)
    for record in records:
        assert 0 < sum(record.seconds.values()) <= record.step_seconds * 1.001 + 1e-5


@functools.cache
def backend():
    """Return "nccl" if it connects two ranks of one GPU as ranks of two hosts, else "gloo"."""
    run_ranks(2, connect, "cpu")  # imports torch: a slow start is no fault of NCCL
    try:
        run_ranks(2, connect, GPU, timeout_seconds=30, backend="nccl")
    except RankError:
        return "gloo"
    return "nccl"


def backend_for(name):
    """Return ``backend()``; skip the test if that cannot exchange what the strategy sends."""
    if backend() == "gloo" and name in ("tree", "ring", "halving_doubling"):
        pytest.skip("NCCL does not connect two ranks on this GPU, and Gloo sends no GPU tensors")
    return backend()


def connect(_rank, device):
    """Return the number of ranks. Collective."""
    ones = torch.ones((), device=device)
    dist.all_reduce(ones)
    return float(ones)


def errors_of(rank, device, name):
    """Return a strategy's largest error against one process, and digests. Collective."""
    # Some lossy strategies need every gradient, and fsdp the same layers on every rank.
    case = Case(device=device, unused=is_exact(name) and name != "fsdp")
    result = errors_on_this_rank(rank, 2, proof_sync(name), case)
    return max(error for step in result.by_parameter for error in step.values()), result.digests


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "none"])
def test_two_ranks_equal_one_process_in_float64(name):
    """Those that lose precision hold equal and finite weights on both ranks."""
    first, second = run_ranks(2, errors_of, GPU, name, backend=backend_for(name))
    assert max(first[0], second[0]) < (Case().tolerance if is_exact(name) else 1e6)
    assert first[1] == second[1]


def synchronised_batchnorm(rank, device, kind):
    """Return how far DDP with this SyncBatchNorm is from the whole batch. Collective."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(144, 2)).double()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 8, 3, 8, 8, generator=generator, dtype=torch.float64).to(device)
    labels = torch.randint(0, 2, (3, 8), generator=generator).to(device)
    trained = []
    for sync, own in ((None, slice(0, 8)), ("ddp", slice(4 * rank, 4 * rank + 4))):
        torch.manual_seed(0)
        engine = prepared(copy.deepcopy(model), sync, device=device, sync_batchnorm=kind)
        engine.train_epoch([(x[own], y[own]) for x, y in zip(images, labels, strict=True)], epoch=1)
        engine.close()
        trained.append(unwrap(engine.model))
    return max(parameter_errors(trained[1], trained[0]).values())


@pytest.mark.parametrize("kind", [True, "ours"], ids=["pytorch", "ours"])
def test_synchronised_batchnorm_and_ddp_equal_the_whole_batch(kind):
    errors = run_ranks(2, synchronised_batchnorm, GPU, kind, backend=backend())
    assert max(errors) < Case().tolerance


def message_seconds(rank, device, name):
    """Return how long each message of the third step took, by the timeline. Collective."""
    case = Case(device=device, uneven=False)
    torch.manual_seed(0)
    model = ProofModel(case)
    engine = prepared(model, proof_sync(name), device=device, optimizer=case.sgd(model))
    engine.timeline = Timeline(3, 3)
    engine.train_epoch([batches[rank] for batches in case.global_batches(2)], epoch=1)
    engine.close()
    messages = engine.timeline.steps[3].messages
    return [message.end - message.begin for message in messages]


@pytest.mark.parametrize("name", ["all_reduce", "ring", "ddp"])
def test_messages_of_a_timeline_take_time(name):
    for seconds in run_ranks(2, message_seconds, GPU, name, backend=backend_for(name)):
        assert seconds
        assert all(0 < one < 60 for one in seconds), seconds
