"""Measure this project on a GPU: versions and rates, VGG-11's step, and SyncBatchNorm's.

    python3 benchmarks/gpu.py machine vgg11 batchnorm
    python3 benchmarks/gpu.py vgg11 --dry-run

It runs from a checkout, without installation, with the Python that has torch, and prints a line of
JSON for each. ``--dry-run`` does the same on the CPU, with tiny sizes. gpu.md has the commands of
tests and training.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
VGG11_MACS = 152.8e6  # multiply-adds of one sample's forward pass; backward counts twice as much


def main() -> None:
    """Measure what was asked for, in that order."""
    measures = {"machine": machine, "vgg11": vgg11, "batchnorm": batchnorm}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=measures)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    args = parser.parse_args()
    for name in args.what:
        print(json.dumps({name: measures[name](args.dry_run)}), flush=True)


def seconds_of(action: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call: the median of five rounds."""
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    times = []
    for _ in range(6):  # the first round warms up
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            action()
        wait()
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times[1:])


def gemm_rate(dtype: str, device: str) -> float:
    """Return operations per second of a square matrix product, of 8192 x 8192 on a GPU."""
    import torch

    size = 8192 if device == "cuda" else 64
    left = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    right = torch.randn_like(left)
    return 2 * size**3 / seconds_of(lambda: left @ right, 10)


def machine(dry_run: bool) -> dict[str, Any]:
    """Return versions, the GPU, and the rates that the step's can be compared with."""
    import torch

    device = "cpu" if dry_run else "cuda"
    host = torch.empty(2**20 if dry_run else 2**30, dtype=torch.uint8)
    source = host.to(device)
    target = torch.empty_like(source)
    card = {}
    if not dry_run:
        properties = torch.cuda.get_device_properties(0)
        card = {"gpu": properties.name, "memory GB": properties.total_memory / 1e9}
        card["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    rates = {
        f"{dtype} TFLOP/s": gemm_rate(dtype, device) / 1e12
        for dtype in ("bfloat16", "float16", "float32")
    }
    return {
        **card,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **rates,
        "copy GB/s": 2 * len(host) / seconds_of(lambda: target.copy_(source), 10) / 1e9,
        "from host GB/s": len(host) / seconds_of(lambda: target.copy_(host), 2) / 1e9,
    }


def vgg11(dry_run: bool) -> dict[str, Any]:
    """Compare an epoch of ours, compiled, with one of a plain compiled loop, in turns.

    Both train VGG-11 in bf16 (float32 on a CPU) on random images that lie on the GPU. Ours does all
    that a run does: augmentation, schedule and the metrics of each step. The plain loop does less.
    """
    import torch
    from torch import nn

    from common.data.dataset import Dataset, ImageSet, pixel_statistics
    from common.data.loaders import TrainLoader
    from common.data.sharding import GlobalBatchSampler
    from common.models import build_model
    from common.training import prepare_model_for_training
    from common.training_engine import TrainingEngine
    from common.training_engine.lr_schedules import build_schedule

    device = "cuda"
    count = 51_200  # images of an epoch
    size = 1024  # of a batch
    dtype = torch.bfloat16
    if dry_run:
        device = "cpu"
        count = 32
        size = 16
        dtype = None
    torch.backends.cudnn.benchmark = True
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=generator)
    images = ImageSet(pixels, torch.randint(0, 10, (count,), generator=generator))
    dataset = Dataset("random", images, images, tuple("0123456789"), *pixel_statistics(pixels[:99]))

    loader = TrainLoader(dataset, GlobalBatchSampler(count, batch_size=size), device=device)
    model, criterion, optimizer = prepare_model_for_training(
        build_model("vgg11", 10), device, 0.01, 0.9, 5e-4, False
    )
    engine = TrainingEngine(model, device, amp_dtype=dtype, compile_model=not dry_run)
    engine.prepare(optimizer, criterion, build_schedule(optimizer, "onecycle", total_steps=10_000))

    everything = pixels.to(device).permute(0, 3, 1, 2).float() / 255
    everything = everything.contiguous(memory_format=torch.channels_last)
    labels = images.labels.to(device)
    plain = build_model("vgg11", 10).to(device, memory_format=torch.channels_last).train()
    forward = plain if dry_run else torch.compile(plain)
    settings = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    sgd = torch.optim.SGD(plain.parameters(), fused=True, **settings)

    def plain_epoch() -> None:
        for ids in torch.randperm(count, device=device).split(size):
            with torch.autocast(device, dtype, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(forward(everything[ids]), labels[ids])
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()

    plain_epoch()  # compiles before ours, which may forbid more compiling
    engine.train_epoch(loader, epoch=1)
    pairs = [
        (seconds_of(lambda: engine.train_epoch(loader, epoch=2), 1), seconds_of(plain_epoch, 1))
        for _ in range(1 if dry_run else 3)
    ]
    engine.close()
    fastest = min(ours for ours, _ in pairs)
    ratios = sorted(ours / plain for ours, plain in pairs)
    rate = gemm_rate("float32" if dry_run else "bfloat16", device)
    return {
        "ours/plain": ratios[len(ratios) // 2],
        "from": ratios[0],
        "to": ratios[-1],
        "ms a step": 1000 * fastest * size / count,
        "% of GEMM": 100 * 6 * VGG11_MACS * count / fastest / rate,
    }


def batchnorm(dry_run: bool) -> dict[str, Any]:
    """Return the milliseconds of a VGG-11 step on two ranks without and with SyncBatchNorm.

    Both ranks share the device, so only the ratios mean something. The ways take turns.
    """
    from lab.proofs.ranks import run_ranks

    backend = "gloo" if dry_run else "nccl"
    seconds = run_ranks(2, batchnorm_seconds, dry_run, backend=backend)[0]
    return {f"{way} ms": 1000 * statistics.median(times) for way, times in seconds.items()}


def batchnorm_seconds(_rank: int, dry_run: bool) -> dict[str, list[float]]:
    """Return the seconds of a step for each kind of BatchNorm, in turns. Collective."""
    import torch
    from torch import nn

    from common.models import build_model
    from common.training_engine import TrainingEngine

    device = "cpu" if dry_run else "cuda"
    size = 8 if dry_run else 256
    steps = 1 if dry_run else 20
    turns = 2 if dry_run else 4  # the first one warms up
    images = torch.randn(size, 3, 32, 32)
    batch = (images.to(device), torch.randint(0, 10, (size,)).to(device))
    engines = {}
    for way, kind in {"without": False, "PyTorch's": True, "ours": "ours"}.items():
        model = build_model("vgg11", 10)
        amp = None if dry_run else torch.bfloat16
        engine = TrainingEngine(
            model, device, distributed=True, amp_dtype=amp, sync="ddp", sync_batchnorm=kind
        )
        engine.prepare(torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss())
        engines[way] = engine
    found: dict[str, list[float]] = {way: [] for way in engines}
    for turn in range(turns):
        for way, engine in engines.items():
            began = time.perf_counter()
            engine.train_epoch([batch] * steps, epoch=turn + 1)
            found[way].append((time.perf_counter() - began) / steps)
    for engine in engines.values():
        engine.close()
    return {way: times[1:] for way, times in found.items()}


if __name__ == "__main__":
    main()
