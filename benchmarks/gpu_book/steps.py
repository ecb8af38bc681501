"""VGG-11's training step on random images: host waits, the timer, the ladder, and a plain loop.

Every measurement trains with ``TrainLoader`` and ``TrainingEngine``, as a run does: augmentation,
forward, loss, backward, update, schedule and the metrics of each step. ``waits`` adds the moving
average of the weights.
"""

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from common.data.dataset import Dataset, ImageSet, pixel_statistics
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.models import build_model
from common.training import prepare_model_for_training
from common.training_engine import StepRecord, TrainingEngine
from common.training_engine.lr_schedules import build_schedule
from common.training_engine.metrics import MetricsBuffer, StepOutcome
from gpu_book.measuring import DTYPES, choose_device, gemm_rate, parser, wait
from gpu_book.runner import REPOSITORY
from gpu_book.summaries import show

VGG11_MACS = 152.8e6  # multiply-adds of one sample's forward pass; backward counts twice as much
KINDS = ("eager", "fused", "compile")
_IMAGES = 51_200  # an epoch has whole batches only


def random_dataset(images: int) -> Dataset:
    """Return random images of ten classes."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 32, 32, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (images,), generator=generator)
    one = ImageSet(pixels, labels)
    return Dataset("random", one, one, tuple("0123456789"), *pixel_statistics(pixels[:1000]))


class Training:
    """VGG-11 on random images, trained in one of these ways.

    Parameters
    ----------
    kind : "eager"; "fused" has the fused optimiser; "compile" compiles the model, too.
    dtype : of mixed precision.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: torch.device,
        *,
        kind: str,
        dtype: str = "bf16",
        batch_size: int,
        ema: bool = False,
    ) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.batch_size, self.device = batch_size, device
        sampler = GlobalBatchSampler(len(dataset.train), batch_size=batch_size)
        self.loader = TrainLoader(dataset, sampler, device=device)
        model, criterion, optimizer = prepare_model_for_training(
            build_model("vgg11", 10), device, 0.01, 0.9, 5e-4, False
        )
        if kind == "eager":
            settings = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
            optimizer = torch.optim.SGD(model.parameters(), **settings)
        on_gpu = device.type == "cuda"  # half precision is slow, or missing, on many CPUs
        self.engine = TrainingEngine(
            model,
            device,
            amp_dtype=DTYPES[dtype] if on_gpu else None,
            use_ema=ema,
            compile_model=kind == "compile",
        )
        schedule = build_schedule(optimizer, "onecycle", total_steps=1_000_000)
        self.engine.prepare(optimizer, criterion, schedule)
        self._epoch = 0

    def train(
        self, steps: int, on_steps: Callable[[list[StepRecord]], object] = lambda records: None
    ) -> None:
        """Train this number of steps and wait for the GPU."""
        last = self.engine.step + steps
        while self.engine.step < last:
            self._epoch += 1
            self.loader.sampler.set_epoch(self._epoch)
            self.engine.train_epoch(
                self.loader, epoch=self._epoch, seed=0, max_steps=last, on_steps=on_steps
            )
        wait(self.device)

    def seconds(self, steps: int) -> float:
        """Return the wall seconds of a step, the mean over ``steps``."""
        began = time.perf_counter()
        self.train(steps)
        return (time.perf_counter() - began) / steps


def waits(device: torch.device) -> None:
    """Show whether a step between two flushes waits for the GPU."""
    training = Training(
        random_dataset(640), device, kind="fused", batch_size=_choose(device, 64, 8), ema=True
    )
    training.train(5)  # choose algorithms
    found = _first_wait(training)
    training.engine.close()
    show({"first_wait": {"fused": found}}, f"fused: {found}")


def _first_wait(training: Training) -> str:
    """Return the first operation of three steps that waits, with its place; or that none does."""
    engine, device = training.engine, training.device
    metrics = MetricsBuffer(
        engine.world,
        engine.timer,
        epoch=1,
        log_every=10,
        overflow_is_normal=False,
        equal_gradients=True,
    )
    batches = iter(training.loader)
    next(batches)  # the epoch's order is copied to the GPU here
    engine.model.train()
    _refuse_waits(device, True)
    try:
        for _ in range(3):
            with engine.timer.section("data"):
                inputs, labels = next(batches)
            numbers = engine.train_step([(inputs, labels)], global_samples=len(labels), seeds=[1])
            metrics.add(StepOutcome(engine.step, numbers, len(labels), 0.01, engine.timer.take()))
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [one for one in frames if one.filename.startswith(f"{REPOSITORY}/common")]
        return f"{error} at {ours[-1].filename}:{ours[-1].lineno}" if ours else str(error)
    finally:
        _refuse_waits(device, False)
    metrics.flush(stop=False)
    return "none" if device.type == "cuda" else "not checked: a CPU has no such mode"


def _refuse_waits(device: torch.device, refuse: bool) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if refuse else "default")


def timer(device: torch.device) -> None:
    """Show the sum of the timer's steps over the wall time of the same 50 steps."""
    dataset = random_dataset(_choose(device, _IMAGES, 64))
    training = Training(dataset, device, kind="fused", batch_size=_choose(device, 1024, 16))
    training.train(_choose(device, 10, 1))
    records: list[StepRecord] = []
    began = time.perf_counter()
    training.train(_choose(device, 50, 2), on_steps=records.extend)
    wall = time.perf_counter() - began
    steps_over_wall = sum(record.step_seconds for record in records) / wall
    sections_over_wall = sum(sum(one.seconds.values()) for one in records) / wall
    training.engine.close()
    found = {
        "steps": len(records),
        "wall_seconds": wall,
        "steps_over_wall": steps_over_wall,
        "sections_over_wall": sections_over_wall,
    }
    show(
        {"fused": found},
        f"fused: timed steps / wall {steps_over_wall:.3f}, sections / wall "
        f"{sections_over_wall:.3f} ({len(records)} steps)",
    )


def ladder(device: torch.device, kinds: Sequence[str]) -> None:
    """Show the speed of kinds of steps, on a GPU in bf16 and fp16, at batch 1024 and 256.

    A row that fails holds its error, and the others are measured.
    """
    types = _choose(device, ("bf16", "fp16"), ("fp32",))  # a CPU trains in float32
    rates = {name: gemm_rate(DTYPES[name], device) for name in types}
    dataset = random_dataset(_choose(device, _IMAGES, 64))
    rows: list[dict[str, Any]] = []
    for kind, batch_size, dtype in product(kinds, _choose(device, (1024, 256), (16,)), rates):
        row: dict[str, Any] = {"kind": kind, "dtype": dtype, "batch_size": batch_size}
        try:
            row |= _rung(dataset, device, kind, dtype, batch_size, rates[dtype])
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        rows.append(row)
        show({"gemm_flops_per_second": rates, "rows": rows}, *map(_row_text, rows))


def _rung(
    dataset: Dataset, device: torch.device, kind: str, dtype: str, batch_size: int, rate: float
) -> dict[str, Any]:
    gc.collect()  # otherwise the peak holds tensors of earlier rows
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if kind == "compile":
        torch.compiler.reset()  # otherwise the second batch size would compile for all sizes
    training = Training(dataset, device, kind=kind, dtype=dtype, batch_size=batch_size)
    try:
        began = time.perf_counter()
        training.train(_choose(device, 10, 1))
        warm_up = time.perf_counter() - began
        seconds = training.seconds(_choose(device, 51_200 * 2 // batch_size, 2))
    finally:
        training.engine.close()  # ends the refusal to compile, which would hold for the next row
    return {
        "step_seconds": seconds,
        "samples_per_second": batch_size / seconds,
        "share_of_gemm": 6 * VGG11_MACS * batch_size / seconds / rate,
        "warm_up_seconds": warm_up,
        "compile_seconds": training.engine.compile_seconds,
        "peak_memory_bytes": (
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        ),
    }


def _row_text(row: dict[str, Any]) -> str:
    name = f"{row['kind']} {row['dtype']} batch {row['batch_size']}"
    if "error" in row:
        return f"{name}: {row['error']}"
    return (
        f"{name}: {1000 * row['step_seconds']:.2f} ms, {row['samples_per_second']:,.0f} images/s, "
        f"{100 * row['share_of_gemm']:.1f} % of GEMM"
    )


class Plain:
    """A plain loop: VGG-11, bf16 autocast, channels_last, fused SGD, images on the GPU.

    ``compiled`` compiles the network with torch's default settings. The loop neither augments nor
    reads a loss, so it does less than a run does.
    """

    def __init__(
        self, dataset: Dataset, device: torch.device, *, batch_size: int, compiled: bool
    ) -> None:
        torch.manual_seed(0)
        self._batch_size, self._device = batch_size, device
        images = dataset.train.images.to(device).permute(0, 3, 1, 2).float() / 255
        self._images = images.contiguous(memory_format=torch.channels_last)
        self._labels = dataset.train.labels.to(device)
        self._model = build_model("vgg11", 10).to(device, memory_format=torch.channels_last).train()
        self._forward = torch.compile(self._model) if compiled else self._model
        self._optimizer = torch.optim.SGD(
            self._model.parameters(),
            lr=0.01,
            momentum=0.9,
            nesterov=True,
            weight_decay=5e-4,
            fused=True,
        )

    def train(self, steps: int) -> None:
        """Train this number of steps and wait for the GPU."""
        criterion = nn.CrossEntropyLoss()
        while steps > 0:
            order = torch.randperm(len(self._labels), device=self._device)
            for ids in order.split(self._batch_size)[:steps]:
                with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
                    loss = criterion(self._forward(self._images[ids]), self._labels[ids])
                self._optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self._optimizer.step()
                steps -= 1
        wait(self._device)


def _start_plain(dataset: Dataset, device: torch.device, *, batch_size: int) -> tuple[Plain, str]:
    """Return the plain loop after two steps, and why it is not compiled; "" if it is.

    It compiles before ours starts: later the engine may forbid more compiling.
    """
    not_compiled = "a dry run does not compile"
    if device.type == "cuda":
        loop = Plain(dataset, device, batch_size=batch_size, compiled=True)
        before = counters["stats"]["unique_graphs"]
        try:
            loop.train(2)
            if counters["stats"]["unique_graphs"] > before:
                return loop, ""
            not_compiled = "torch.compile compiled nothing"
        except Exception as error:
            not_compiled = f"{type(error).__name__}: {error}"[:200]
    loop = Plain(dataset, device, batch_size=batch_size, compiled=False)
    loop.train(2)
    return loop, not_compiled


def plain(device: torch.device, kind: str) -> None:
    """Show an epoch of ours over an epoch of the plain compiled loop, measured in turns.

    A plain loop that cannot be compiled is measured without, and the result says why.
    """
    dataset = random_dataset(_choose(device, _IMAGES, 32))
    batch_size, rounds = _choose(device, 1024, 16), _choose(device, 7, 1)
    steps = len(dataset.train) // batch_size
    theirs, not_compiled = _start_plain(dataset, device, batch_size=batch_size)
    ours = Training(dataset, device, kind=kind, batch_size=batch_size)
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for measured in range(-1, rounds):  # the first round warms up
        for name, loop in (("ours", ours), ("plain", theirs)):
            began = time.perf_counter()
            loop.train(steps)
            if measured >= 0:
                times[name].append(time.perf_counter() - began)
    ratios = sorted(a / b for a, b in zip(times["ours"], times["plain"], strict=True))
    middle = ratios[len(ratios) // 2]
    result = {"kind": kind, "batch_size": batch_size, "epoch_seconds": times}
    show(
        result | {"ours_over_plain": middle, "plain_not_compiled": not_compiled},
        f"{kind}, batch {batch_size}: ours / plain, an epoch: {middle:.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}), ours {1000 * min(times['ours']):.0f} ms at best",
        *[f"the plain loop is not compiled: {not_compiled}"] * bool(not_compiled),
    )
    ours.engine.close()


def _choose(device: torch.device, on_gpu: Any, in_dry_run: Any) -> Any:
    return on_gpu if device.type == "cuda" else in_dry_run


def main() -> None:
    """Make one measurement and print its result."""
    flags = parser(__doc__)
    flags.add_argument("measurement", choices=("waits", "timer", "ladder", "plain"))
    flags.add_argument("--kinds", choices=KINDS, nargs="+", default=["fused"], help="of step")
    arguments = flags.parse_args()
    device = choose_device(arguments.dry_run)
    if arguments.measurement == "ladder":
        ladder(device, arguments.kinds)
    elif arguments.measurement == "plain":
        plain(device, arguments.kinds[0])
    else:
        {"waits": waits, "timer": timer}[arguments.measurement](device)


if __name__ == "__main__":
    main()
