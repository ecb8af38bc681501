"""Test and measure this project on a GPU that is lent for minutes; a later call goes on.

    python3 benchmarks/gpu.py --out reports/gpu --data FOLDER
    python3 benchmarks/gpu.py --out reports/gpu --dry-run

It runs from a checkout, without installation, with the Python that has torch. Each step is a
process with a limit; one that fails or hangs does not affect the next. A step that does not fit
into the rest of ``--budget-seconds`` waits for the next call with the same ``--out``, which runs
what is not ``ok`` yet. ``--out`` gets results.json, written whole after each step, and the output
of each step. A table comes last. --dry-run does the same on the CPU, with tiny sizes.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
CALL_SECONDS = 570
DRY_RUN_TIMES = 4  # as long: other work shares the CPU
VGG11_MACS = 152.8e6  # multiply-adds of one sample's forward pass; backward counts twice as much
IMPORTED_AS = {"scikit-learn": "sklearn", "pillow": "PIL"}
RECIPE_SECONDS = {"vgg11-cifar10-fast": 150}  # limits; 500 for others
CHILDREN = ("machine", "vgg11", "batchnorm")
SUMMARY = ("step_seconds", "total_seconds", "test_accuracy", "peak_gpu_memory_bytes")


class Step(NamedTuple):
    """A process: the arguments of the Python interpreter, its limit, and the run that it leaves."""

    name: str
    command: list[str]
    limit_seconds: float
    run: Path | None = None


def plan(args: argparse.Namespace) -> list[Step]:
    """Return the steps in the order of their value."""
    own = [__file__, "--out", str(args.out), *["--dry-run"] * args.dry_run]
    small = ["--dataset", "digits", "--batch-size", "16", "--max-steps", "2", "--no-amp"]
    flags = ["-o", "addopts=", "-q", "-rf", "--tb=short"]
    flags += ["-n", "8"] if importlib.util.find_spec("xdist") else []
    tests = ["tests/common", "tests/lab/calibrate/test_layer_profile.py"]
    group = ["--distributed", "--world-size", "1"]
    recipe = ["--recipe", args.recipe, *(["--epochs", str(args.epochs)] if args.epochs else [])]
    recipe_limit = RECIPE_SECONDS.get(args.recipe, 500)

    def run(name: str, limit: float, *words: str, folder: str = "") -> Step:
        command = [*words, "--data-dir", str(args.data), *small * args.dry_run]
        command += ["--output-dir", str(args.out), "--run-name", name]
        return Step(name, command, limit, args.out / (folder or words[0].split("/")[0]) / name)

    def with_seed(seed: int) -> Step:
        name = f"{args.recipe}-seed{seed}" if seed else args.recipe
        words = ["PartThree/main.py", *recipe, "--seed", str(seed)]
        return run(name, recipe_limit, *words, folder=args.recipe)

    return [
        Step("machine", [*own, "--child", "machine"], 60),
        Step("tests", ["-m", "pytest", *flags, "-m", "gpu", *tests], 300),
        Step("vgg11", [*own, "--child", "vgg11"], 150),
        Step("batchnorm", [*own, "--child", "batchnorm"], 90),
        run("one", 60, "PartOne/main.py", folder="PartOne-none"),
        *(
            run(sync, 60, "PartTwo/main.py", "--sync", sync, *group, folder=f"PartTwo-{sync}")
            for sync in ("gather_scatter", "all_reduce")
        ),
        run("ddp", 60, "PartThree/main.py", *group, folder="PartThree-ddp"),
        *(with_seed(seed) for seed in range(args.seeds)),
    ]


def arguments() -> argparse.Namespace:
    """Return the flags. Status 2 if nothing can run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for results")
    parser.add_argument("--data", default=REPOSITORY / "data", type=Path, help="of the datasets")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps, also again")
    parser.add_argument("--recipe", default="vgg11-cifar10-fast", help="the last step's recipe")
    parser.add_argument("--epochs", type=int, help="of the recipe, if it shall be shorter")
    parser.add_argument("--seeds", default=1, type=int, help="runs of the recipe")
    parser.add_argument("--budget-seconds", type=float, default=CALL_SECONDS, help="of this call")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out, args.data = args.out.resolve(), args.data.resolve()
    if not args.child and (missing := missing_packages()):
        parser.error(
            f"{sys.executable} does not find {', '.join(missing)}: install them, or unpack their "
            "wheels into a folder and put it on PYTHONPATH"
        )
    names = [step.name for step in plan(args)]
    if wrong := set(args.only or ()) - set(names):
        parser.error(f"--only: got {', '.join(wrong)}; choose from {names}")
    return args


def main() -> int:
    """Run the steps that are left; return 1 if one failed."""
    args = arguments()
    if args.child:
        measure = {"machine": machine, "vgg11": vgg11, "batchnorm": batchnorm}[args.child]
        print(json.dumps(measure(args.dry_run)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    slower = DRY_RUN_TIMES if args.dry_run else 1
    deadline = time.monotonic() + slower * args.budget_seconds
    for step in plan(args):
        left = deadline - time.monotonic()
        known = results.get(step.name, {"status": "waits"})
        wanted = known["status"] != "ok"
        if args.only:
            wanted = step.name in args.only
        if wanted and slower * step.limit_seconds <= left:
            known = run_step(step, args.out, slower * step.limit_seconds)
        results[step.name] = known
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        partial.replace(file)
    failed = False
    for name, result in results.items():
        print(f"{name:<20} {result['status']:<7} {shown(result)}")
        failed |= result["status"] not in ("ok", "waits")
    return int(failed)


def missing_packages() -> list[str]:
    """Return the packages that this project needs and this Python lacks."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    named = [re.split(r"[^\w-]", need)[0] for need in settings["project"]["dependencies"]]
    needed = [IMPORTED_AS.get(name, name) for name in [*named, "pytest"]]
    return [name for name in needed if importlib.util.find_spec(name) is None]


def run_step(step: Step, out: Path, limit_seconds: float) -> dict[str, Any]:
    """Run one step, and end everything that it has started; return what becomes of it."""
    # What these need is known to be there by now.
    from common.utils.processes import adopt_orphans, start_child
    from lab.fleet.supervision import kill_descendants

    began = time.monotonic()
    log = out / f"{step.name}.log"
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    adopt_orphans()
    status = None
    with log.open("wb") as output, contextlib.suppress(subprocess.TimeoutExpired):
        status = start_child(
            [sys.executable, *step.command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": path},
        ).wait(limit_seconds)
    kill_descendants()  # nothing may hold the GPU any longer
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    ended = "failed"
    if status is None:
        ended = "killed"
    elif status == 0:
        ended = "ok"
    found: dict[str, Any] = {"status": ended, "seconds": round(time.monotonic() - began, 1)}
    try:
        if step.run is not None:
            summary = json.loads((step.run / "summary.json").read_text())
            return found | {"result": {name: summary[name] for name in SUMMARY}}
        return found | {"result": json.loads(lines[-1])}
    except (ValueError, OSError):
        return found | {"result": {"last line": lines[-1][:200]}}


def shown(record: dict[str, Any]) -> str:
    """Return what a step found, for its line of the table."""
    found = {name: value for name, value in record.get("result", {}).items() if value is not None}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found.items()
    )


# --- what a child measures ---


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
    sys.exit(main())
