"""Tests on a CUDA device: NCCL at world size 1, mixed precision, data on the GPU.

`python3 -m pytest -m gpu` runs only these.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from common.data import load_dataset
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.training_engine import (
    TrainingEngine,
    distributed_train_worker,
    launch_distributed_training,
)
from tests.helpers import free_port, only_run_folder, run_part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

QUICK = ("--dataset", "digits", "--batch-size", 64, "--epochs", 4, "--log-every", 5)


def group(rank: int = 0, size: int = 1) -> list[object]:
    return [
        "--master-ip",
        "127.0.0.1",
        "--master-port",
        free_port(),
        "--num-nodes",
        size,
        "--rank",
        rank,
    ]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ddp_with_nccl_and_amp_learns(tmp_path: Path, dtype: str) -> None:
    [ended] = run_part(
        "PartThree", *QUICK, *group(), "--amp-dtype", dtype, "--output-dir", tmp_path, cwd=tmp_path
    )
    assert ended.status == 0, ended.err
    assert ("float16" if dtype == "fp16" else "bfloat16") in ended.out
    folder = only_run_folder(tmp_path, "PartThree-ddp")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["backend"], summary["device"]) == ("nccl", "cuda")
    assert summary["test_accuracy"] > 0.9
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(
        0 < step["forward_seconds"] < 60 and 0 < step["backward_seconds"] < 60 for step in steps
    )


@pytest.mark.parametrize("sync", ["gather_scatter", "all_reduce"])
def test_by_hand_with_nccl_learns(tmp_path: Path, sync: str) -> None:
    [ended] = run_part(
        "PartTwo", "--sync", sync, *QUICK, *group(), "--output-dir", tmp_path, cwd=tmp_path
    )
    assert ended.status == 0, ended.err
    summary = json.loads(
        (only_run_folder(tmp_path, f"PartTwo-{sync}") / "summary.json").read_text()
    )
    assert summary["backend"] == "nccl"
    assert summary["test_accuracy"] > 0.9


def test_amp_resumes_with_the_scalers_state(tmp_path: Path) -> None:
    arguments = [*QUICK, "--output-dir", tmp_path]
    [first] = run_part("PartThree", *arguments, *group(), "--stop-after-epoch", 2, cwd=tmp_path)
    [second] = run_part("PartThree", *arguments, *group(), "--resume", "auto", cwd=tmp_path)
    assert [first.status, second.status] == [0, 0], second.err
    checkpoints = sorted((tmp_path / "PartThree-ddp").glob("*/checkpoints/Epoch_4.pt"))
    assert torch.load(checkpoints[0], weights_only=True)["scaler_state_dict"]["scale"] > 0


def test_augmentation_is_the_same_on_the_gpu(tmp_path: Path) -> None:
    digits = load_dataset("digits", tmp_path)
    loaders = [
        TrainLoader(digits, GlobalBatchSampler(len(digits.train), batch_size=100), device=device)
        for device in ("cpu", "cuda")
    ]
    for (images, labels), (gpu_images, gpu_labels) in zip(*loaders, strict=True):
        assert torch.equal(labels, gpu_labels.cpu())
        torch.testing.assert_close(images, gpu_images.cpu(), rtol=0, atol=1e-6)


def points() -> TensorDataset:
    """Return two classes that a line separates."""
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def test_the_engine_trains_on_the_gpu_with_amp_ema_and_accumulation(tmp_path: Path) -> None:
    history = launch_distributed_training(
        distributed_train_worker,
        torch.cuda.device_count(),
        model_fn=lambda: nn.Linear(8, 2),
        train_dataset=points(),
        val_dataset=points(),
        batch_size=16,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        criterion_fn=nn.CrossEntropyLoss,
        engine_kwargs={
            "use_amp": True,
            "use_ema": True,
            "accumulation_steps": 2,
            "clip_norm": 5.0,
            "output_dir": tmp_path,
        },
        train_kwargs={"num_epochs": 5},
    )
    assert history["val_accuracy"][-1] > 0.95
    assert history["ema_val_accuracy"][-1] > 0.9
    assert (tmp_path / "experiment" / "best.pt").exists()


def test_an_overflow_of_fp16_skips_the_step_and_is_no_error() -> None:
    model = nn.Linear(8, 2)
    engine = TrainingEngine(model, "cuda", use_amp=True)
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    engine.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    before = model.weight.detach().clone()
    engine.train_epoch([(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))], epoch=1)
    assert torch.equal(model.weight.detach(), before)
    assert engine.scaler.get_scale() < 2.0**40


def test_deterministic_runs_are_equal_bit_for_bit_and_say_what_it_costs(tmp_path: Path) -> None:
    weights = []
    for name in ("first", "second"):
        [ended] = run_part(
            "PartThree",
            *QUICK,
            *group(),
            "--deterministic",
            "--output-dir",
            tmp_path / name,
            cwd=tmp_path,
        )
        assert ended.status == 0, ended.err
        assert "times as long as with the fastest algorithms" in ended.out
        [path] = (tmp_path / name).glob("PartThree-ddp/*/checkpoints/Epoch_4.pt")
        weights.append(torch.load(path, weights_only=True)["model_state_dict"])
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


@pytest.mark.parametrize(
    "recipe",
    ["vgg11-cifar10-fast", "resnet-cifar10-ema", "wide-resnet-cifar100", "resnet50-cifar100"],
)
def test_recipes_run_on_the_gpu(tmp_path: Path, recipe: str) -> None:
    [ended] = run_part(
        "PartThree",
        "--recipe",
        recipe,
        "--dataset",
        "digits",
        "--max-steps",
        5,
        "--batch-size",
        64,
        "--output-dir",
        tmp_path,
        cwd=tmp_path,
    )
    assert ended.status == 0, ended.err
    assert "on cuda" in ended.out
