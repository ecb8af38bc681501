"""On a CUDA device: NCCL at world size 1, mixed precision, data on the GPU. `python3 -m pytest -m gpu` runs these alone."""

import json
from pathlib import Path

import pytest
import torch

from common.data import load_dataset
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from tests.helpers import free_port, only_run_folder, run_part

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

QUICK = ("--dataset", "digits", "--batch-size", 64, "--epochs", 4, "--log-every", 5)


def group(rank: int = 0, size: int = 1) -> list[object]:
    return ["--master-ip", "127.0.0.1", "--master-port", free_port(), "--num-nodes", size, "--rank", rank]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ddp_with_nccl_and_amp_learns(tmp_path: Path, dtype: str) -> None:
    [ended] = run_part("PartThree", *QUICK, *group(), "--amp-dtype", dtype, "--output-dir", tmp_path, cwd=tmp_path)
    assert ended.status == 0, ended.err
    assert ("float16" if dtype == "fp16" else "bfloat16") in ended.out
    folder = only_run_folder(tmp_path, "PartThree-ddp")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["backend"], summary["device"]) == ("nccl", "cuda")
    assert summary["test_accuracy"] > 0.9
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < step["forward_seconds"] < 60 and 0 < step["backward_seconds"] < 60 for step in steps)


@pytest.mark.parametrize("sync", ["gather_scatter", "all_reduce"])
def test_by_hand_with_nccl_learns(tmp_path: Path, sync: str) -> None:
    [ended] = run_part("PartTwo", "--sync", sync, *QUICK, *group(), "--output-dir", tmp_path, cwd=tmp_path)
    assert ended.status == 0, ended.err
    summary = json.loads((only_run_folder(tmp_path, f"PartTwo-{sync}") / "summary.json").read_text())
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
    loaders = [TrainLoader(digits, GlobalBatchSampler(len(digits.train), batch_size=100), device=device)
               for device in ("cpu", "cuda")]
    for (images, labels), (gpu_images, gpu_labels) in zip(*loaders, strict=True):
        assert torch.equal(labels, gpu_labels.cpu())
        torch.testing.assert_close(images, gpu_images.cpu(), rtol=0, atol=1e-6)
