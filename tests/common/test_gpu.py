"""Tests on a CUDA device: NCCL at world size 1, mixed precision, data on the GPU.

`python3 -m pytest -m gpu` runs only these.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from common.checkpoint import load_checkpoint
from common.data import load_dataset
from common.data.loaders import EvaluationLoader, TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.training_engine import (
    distributed_train_worker,
    launch_distributed_training,
    predict,
)
from tests.helpers import free_port, only_run_folder, run_part
from tests.helpers.engines import prepared
from tests.helpers.records import json_lines, json_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

QUICK = "--dataset digits --batch-size 64 --epochs 4 --log-every 5"


def train(folder, part, words):
    """Run the part with these flags in a group of one rank; PartOne and recipes without a group."""
    if part != "PartOne" and "--recipe" not in words:
        words += f" --master-ip 127.0.0.1 --master-port {free_port()} --num-nodes 1 --rank 0"
    [ended] = run_part(part, *words.split(), "--output-dir", folder, cwd=folder.parent)
    return ended


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ddp_with_nccl_and_amp_learns(tmp_path, dtype):
    ended = train(tmp_path, "PartThree", f"{QUICK} --amp-dtype {dtype}")
    assert ended.status == 0, ended.err
    assert ("float16" if dtype == "fp16" else "bfloat16") in ended.out
    folder = only_run_folder(tmp_path, "PartThree-ddp")
    summary = json_of(folder, "summary")
    assert (summary["backend"], summary["device"]) == ("nccl", "cuda")
    assert summary["test_accuracy"] > 0.9
    assert summary["peak_gpu_memory_bytes"] > 100e6  # weights, gradients, momentum and activations
    for step in json_lines(folder / "metrics.jsonl"):
        assert 0 < step["forward_seconds"] < 60
        assert 0 < step["backward_seconds"] < 60


@pytest.mark.parametrize("sync", ["gather_scatter", "all_reduce"])
def test_by_hand_with_nccl_learns(tmp_path, sync):
    ended = train(tmp_path, "PartTwo", f"--sync {sync} {QUICK}")
    assert ended.status == 0, ended.err
    folder = only_run_folder(tmp_path, f"PartTwo-{sync}")
    summary = json_of(folder, "summary")
    assert summary["backend"] == "nccl"
    assert summary["test_accuracy"] > 0.9


@pytest.mark.parametrize("sync", ["ddp_fp16", "ddp_powersgd"])
def test_strategies_that_change_the_gradient_run_with_default_flags(tmp_path, sync):
    ended = train(tmp_path, "PartThree", f"--sync {sync} {QUICK} --max-steps 4")
    assert ended.status == 0, ended.err
    assert "bfloat16" in ended.out


def test_no_checkpoint_holds_a_state_that_is_not_finite(tmp_path):
    """The rate is so high that the second step's loss overflows."""
    steps = "--learning-rate 1e20 --schedule constant --checkpoint-every 1"
    ended = train(tmp_path, "PartOne", f"{QUICK} {steps}")
    assert ended.status != 0
    assert "not finite" in ended.out + ended.err
    for path in tmp_path.rglob("*.pt"):
        state = torch.load(path, weights_only=True)["model_state_dict"]
        assert all(value.isfinite().all() for value in state.values()), path


def test_amp_resumes_with_the_scalers_state(tmp_path):
    first = train(tmp_path, "PartThree", f"{QUICK} --stop-after-epoch 2")
    second = train(tmp_path, "PartThree", f"{QUICK} --resume auto")
    assert [first.status, second.status] == [0, 0], second.err
    checkpoints = sorted((tmp_path / "PartThree-ddp").glob("*/checkpoints/Epoch_4.pt"))
    assert torch.load(checkpoints[0], weights_only=True)["scaler_state_dict"]["scale"] > 0


@pytest.mark.parametrize("options", [{}, {"flip": "alternating", "cutout": 8}])
def test_augmentation_is_the_same_on_the_gpu(tmp_path, options):
    digits = replace(load_dataset("digits", tmp_path), flip=True)
    loaders = [
        TrainLoader(
            digits, GlobalBatchSampler(len(digits.train), batch_size=100), device=device, **options
        )
        for device in ("cpu", "cuda")
    ]
    for (images, labels), (gpu_images, gpu_labels) in zip(*loaders, strict=True):
        assert torch.equal(labels, gpu_labels.cpu())
        torch.testing.assert_close(images, gpu_images.cpu(), rtol=0, atol=1e-6)


def test_the_test_set_is_the_same_on_the_gpu(tmp_path):
    """Equal images, labels, predictions and loss, in another number of batches."""
    digits = load_dataset("digits", tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).double()
    results = []
    for device, batch_size in (("cpu", 100), ("cuda", None)):
        loader = EvaluationLoader(
            digits.test, mean=digits.mean, std=digits.std, batch_size=batch_size, device=device
        )
        batches = ((images.double(), labels) for images, labels in loader)
        results.append(predict(model.to(device), device, nn.CrossEntropyLoss(), batches, flip=True))
    on_cpu, on_gpu = results
    assert on_gpu.labels.tolist() == on_cpu.labels.tolist()
    assert on_gpu.predicted.tolist() == on_cpu.predicted.tolist()
    assert on_gpu.mean_loss == pytest.approx(on_cpu.mean_loss, rel=1e-5)


def points():
    """Return two classes that a line separates."""
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def test_the_engine_trains_on_the_gpu_with_amp_ema_and_accumulation(tmp_path):
    history = launch_distributed_training(
        distributed_train_worker,
        torch.cuda.device_count(),
        model_fn=lambda: nn.Linear(8, 2),
        train_dataset=points(),
        val_dataset=points(),
        batch_size=16,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        criterion_fn=nn.CrossEntropyLoss,
        engine_kwargs={"use_amp": True, "use_ema": True, "clip_norm": 5.0, "output_dir": tmp_path}
        | {"accumulation_steps": 2},
        train_kwargs={"num_epochs": 5},
    )
    assert history["val_accuracy"][-1] > 0.95
    assert history["ema_val_accuracy"][-1] > 0.9
    assert (tmp_path / "experiment" / "best.pt").exists()


def test_an_overflow_of_fp16_skips_the_step_and_is_no_error():
    model = nn.Linear(8, 2)
    engine = prepared(model, device="cuda", use_amp=True)
    engine.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    before = model.weight.detach().clone()
    engine.train_epoch([(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))], epoch=1)
    assert torch.equal(model.weight.detach(), before)
    assert engine.scaler.get_scale() < 2.0**40


def test_deterministic_runs_are_equal_bit_for_bit(tmp_path):
    weights = []
    for name in ("first", "second"):
        ended = train(tmp_path / name, "PartThree", f"{QUICK} --deterministic")
        assert ended.status == 0, ended.err
        [path] = (tmp_path / name).glob("PartThree-ddp/*/checkpoints/Epoch_4.pt")
        weights.append(torch.load(path, weights_only=True)["model_state_dict"])
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


@pytest.mark.parametrize(
    "recipe",
    ["vgg11-cifar10-fast", "resnet-cifar10-ema", "wide-resnet-cifar100", "resnet50-cifar100"],
)
def test_recipes_run_on_the_gpu(tmp_path, recipe):
    words = f"--recipe {recipe} --dataset digits --max-steps 5 --batch-size 64"
    ended = train(tmp_path, "PartThree", words)
    assert ended.status == 0, ended.err
    assert "on cuda" in ended.out


def test_checkpoints_hold_what_the_gpu_held_and_the_timeline_has_its_times(tmp_path):
    flags = "--timeline --checkpoint-every 3 --keep-checkpoints 4"
    ended = train(tmp_path, "PartTwo", f"--sync all_reduce {QUICK} {flags}")
    assert ended.status == 0, ended.err
    assert "GPU memory" in ended.out
    folder = only_run_folder(tmp_path, "PartTwo-all_reduce")
    summary, ranks, timeline = (json_of(folder, one) for one in ("summary", "ranks", "timeline"))
    assert summary["peak_gpu_memory_bytes"] > 2 * 4 * 9_231_114  # weights and gradients
    assert ranks["ranks"][0]["peak_gpu_memory_bytes"] == pytest.approx(
        summary["peak_gpu_memory_bytes"], rel=0.5
    )
    checkpoints = list((folder / "checkpoints").glob("Epoch_*.pt"))
    assert len(checkpoints) == 4
    for path in checkpoints:
        load_checkpoint(path)  # raises if the digest does not fit
    assert Path(summary["checkpoint"]).name == "Epoch_4.pt"
    [rank] = timeline["ranks"]
    [(sync_begin, sync_end), *_] = rank["sections"]["sync"]
    for message in rank["messages"]:
        assert sync_begin - 1e-3 < message["begin"] <= message["end"] < sync_end + 1e-3
