"""Training steps and evaluations do not wait for the GPU: shown without one, by fake_gpu.py."""

import contextlib
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD

from common.data.augmentation import RandomCropFlip
from common.data.dataset import Dataset, ImageSet
from common.data.loaders import EvaluationLoader, TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.models.vgg import vgg11
from common.training import prepare_model_for_training
from common.training_engine import predict
from common.training_engine.ema import WeightAverage
from common.training_engine.lr_schedules import build_schedule
from common.training_engine.metrics import MetricsBuffer
from tests.helpers.engines import prepared
from tests.helpers.fake_gpu import (
    COPY_TO_GPU,
    MIXES_DEVICES,
    READ_FROM_GPU,
    SIZE_FROM_GPU,
    fake_gpu,
)
from tests.helpers.tiny_model import tiny

# Models are copied for the moving average; deepcopy asks each tensor for its memory.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

SAMPLES, BATCH_SIZE, STEPS = 44, 8, 6  # the last batch has 4 samples


@pytest.fixture
def gpu():
    with fake_gpu() as gpu:
        yield gpu


def dataset():
    images = torch.randint(0, 256, (SAMPLES, 32, 32, 3), dtype=torch.uint8)
    some = ImageSet(images, torch.arange(SAMPLES) % 10)
    mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
    return Dataset("random", some, some, tuple("0123456789"), mean, std)


def train_epoch(gpu, monkeypatch, network=tiny, amp_dtype=None, accumulation_steps=1):
    """Train an epoch; raise AssertionError if a step waits. A flush of the metrics may read."""
    flush = MetricsBuffer.flush

    def flush_that_may_wait(metrics, **options):
        with mock.patch.object(gpu, "record"):
            return flush(metrics, **options)

    monkeypatch.setattr(MetricsBuffer, "flush", flush_that_may_wait)
    sampler = GlobalBatchSampler(
        SAMPLES, batch_size=BATCH_SIZE, accumulation_steps=accumulation_steps
    )
    loader = TrainLoader(dataset(), sampler, flip="alternating", cutout=8, device="cuda")
    model, criterion, optimizer = prepare_model_for_training(
        network(10), "cuda", 0.1, 0.9, 5e-4, False, nesterov=True
    )
    schedule = build_schedule(optimizer, "onecycle", total_steps=STEPS)
    options = {"amp_dtype": amp_dtype, "accumulation_steps": accumulation_steps, "clip_norm": 1.0}
    options |= {"optimizer": optimizer, "criterion": criterion, "scheduler": schedule}
    engine = prepared(model, device="cuda", use_ema=True, **options)
    computed_in = []
    model.register_forward_hook(lambda _model, _inputs, outputs: computed_in.append(outputs.dtype))
    gpu.faults.clear()

    def after_step(done):
        if done == 1:  # it may copy the epoch's order to the GPU and compare the clocks
            gpu.faults = [
                fault
                for fault in gpu.faults
                if fault.reason != COPY_TO_GPU and fault.operation != "synchronize"
            ]

    records = []
    engine.train_epoch(loader, epoch=1, seed=0, on_steps=records.extend, after_step=after_step)
    engine.close()
    gpu.check()
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert computed_in == [amp_dtype or torch.float32] * (STEPS * accumulation_steps)


@pytest.mark.parametrize(
    ("network", "amp_dtype", "accumulation_steps"),
    [(tiny, None, 1), (vgg11, torch.bfloat16, 1), (tiny, torch.float16, 1), (tiny, None, 2)],
)
def test_no_step_waits(gpu, monkeypatch, network, amp_dtype, accumulation_steps):
    train_epoch(gpu, monkeypatch, network, amp_dtype, accumulation_steps)


def wait(function):
    """Return ``function`` with a planted wait before it."""

    def planted(*args, **kwargs):
        torch.zeros((), device="cuda").item()
        return function(*args, **kwargs)

    return planted


def wait_for_each_batch(iterate):
    def planted(loader):
        for images, labels in iterate(loader):
            labels.sum().item()
            yield images, labels

    return planted


@pytest.mark.parametrize(
    ("owner", "method", "caller"),
    [
        (TrainLoader, "__iter__", "common/training_engine/engine.py"),
        (RandomCropFlip, "__call__", "common/data/loaders.py"),
        (nn.Conv2d, "forward", "common/training_engine/forward.py"),
        (SGD, "step", "common/training_engine/engine.py"),
        (WeightAverage, "update", "common/training_engine/engine.py"),
        (MetricsBuffer, "add", "common/training_engine/engine.py"),
    ],
    ids=["loader", "augmentation", "forward", "optimiser", "EMA", "metrics"],
)
def test_a_planted_wait_is_found(gpu, monkeypatch, owner, method, caller):
    plant = wait_for_each_batch if owner is TrainLoader else wait
    monkeypatch.setattr(owner, method, plant(getattr(owner, method)))
    with pytest.raises(AssertionError) as raised:
        train_epoch(gpu, monkeypatch)
    assert len(gpu.faults) == STEPS
    place = rf"  tests/common/test_no_host_waits\.py:\d+ planted: .*\.item\(\)\n  {caller}:\d+ "
    for fault in gpu.faults:
        assert (fault.operation, fault.reason) == ("Tensor.item", READ_FROM_GPU)
        assert re.match(place, fault.place), fault.place
        assert str(fault) in str(raised.value)


def test_an_evaluation_reads_only_after_its_last_batch(gpu):
    data, model = dataset(), tiny(10).to("cuda")
    loader = EvaluationLoader(
        data.test, mean=data.mean, std=data.std, batch_size=20, device=torch.device("cuda")
    )

    def batches():
        gpu.faults.clear()
        yield from loader
        gpu.check()

    predictions = predict(
        model, torch.device("cuda"), nn.CrossEntropyLoss(), batches(), amp_dtype=torch.bfloat16
    )
    assert {fault.reason for fault in gpu.faults} == {READ_FROM_GPU}
    assert len(predictions.predicted) == SAMPLES


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (lambda x: x.sum().item(), READ_FROM_GPU),
        (lambda x: x.cpu(), READ_FROM_GPU),
        (lambda x: torch.zeros(4).copy_(x), READ_FROM_GPU),
        (lambda x: torch.equal(x, x), READ_FROM_GPU),
        (lambda x: torch.cuda.synchronize(), READ_FROM_GPU),
        (lambda x: x.nonzero(), SIZE_FROM_GPU),
        (lambda x: x[x > 0], SIZE_FROM_GPU),
        (lambda x: torch.ones(4).to("cuda"), COPY_TO_GPU),
        (lambda x: torch.tensor(1.0, device="cuda"), COPY_TO_GPU),
        (lambda x: x.copy_(torch.ones(4)), COPY_TO_GPU),
        (lambda x: x[torch.tensor([0, 1])], MIXES_DEVICES),
        (lambda x: x + torch.ones(4), MIXES_DEVICES),
    ],
)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_each_kind_of_fault_is_found(gpu, operation, reason, inference):
    x = torch.zeros(4, device="cuda")
    # The fake GPU cannot go on after an operation whose result has an unknown shape.
    with torch.inference_mode(inference), contextlib.suppress(AssertionError):
        operation(x)
    assert {fault.reason for fault in gpu.faults} == {reason}
    assert all("lambda" in fault.place for fault in gpu.faults)


def test_operations_that_do_not_wait_are_no_faults(gpu):
    x, rows = torch.zeros(4, device="cuda"), torch.arange(3, device="cuda")
    x[1:] = 2.0
    x.masked_fill_(x > 0, 0.5)
    zeros = torch.zeros(4).new_zeros(4, device="cuda")
    results = [x[rows], 2 * x, torch.where(x > 0, x, 0.0), zeros]
    assert all(result.is_cuda for result in results)
    assert float(torch.ones(3).sum()) == 3.0  # CPU tensors are real
    gpu.check()
