"""The stages: which steps each call runs, in the order of their value, and with which limits.

The limits of a stage add up to at most ``CALL_SECONDS``, so a call that may last ten minutes ends
by itself, with all results written.
"""

import importlib.util
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpu_book.runner import Step
from gpu_book.summaries import read_pytest, read_run

CALL_SECONDS = 570
GPU_TESTS = ("tests/common/test_gpu.py", "tests/common/test_gpu_step.py")
SEEDS = 5
_BOOK = "benchmarks/gpu_book"
_FAST = "vgg11-cifar10-fast"
_FIRST_FITTED = "resnet-cifar10-ema"


@dataclass(frozen=True)
class Call:
    """What the steps of a call need to know.

    Parameters
    ----------
    dry_run : on the CPU, with digits and two steps.
    work : folder for what does not come back: runs with their checkpoints.
    data : folder of the datasets.
    source, part, parts, unpack : of stage "data".
    """

    dry_run: bool
    work: Path
    data: Path
    source: Path | None = None
    part: int = 1
    parts: int = 1
    unpack: str = ""

    def child(self, name: str, *words: str) -> tuple[str, ...]:
        """Return the command of one of gpu_book's programs."""
        return (f"{_BOOK}/{name}.py", *words, *["--dry-run"] * self.dry_run)

    def run(self, part: str, name: str, way: str, *flags: str, limit_seconds: float) -> Step:
        """Return the step ``name`` that runs a part, whose results lie in the folder ``way``."""
        small = ("--dataset", "digits", "--batch-size", "16", "--max-steps", "2", "--no-amp")
        small += () if name == "seed0" else ("--measure-only",)
        words = [f"{part}/main.py", *flags, "--data-dir", str(self.data)]
        words += ["--output-dir", str(self.work), "--run-name", name]
        words += small if self.dry_run else ()
        read = partial(read_run, self.work / way / name)
        return Step(name, tuple(words), limit_seconds, read)


def stage_1(call: Call) -> list[Step]:
    """What the card can do, whether the code is right on it, and how fast the step is."""
    tests = ("-m", "pytest", "-o", "addopts=", "-v", "-rfE", "--tb=short", "-m", "gpu")
    tests += (*_plugin_flags(workers=1 if call.dry_run else 5), *GPU_TESTS)
    compiling = "a dry run does not compile" if call.dry_run else ""

    def ladder(*kinds: str, seconds: float, not_here: str = "") -> Step:
        command = call.child("steps", "ladder", "--kinds", *kinds)
        return Step(f"ladder: {', '.join(kinds)}", command, seconds, not_here=not_here)

    plain = call.child("steps", "plain", "--kinds", "fused" if call.dry_run else "compile")
    return [
        Step("the card", call.child("machine"), 50),
        Step("GPU tests", tests, 165, read_pytest),
        Step("host waits", call.child("steps", "waits"), 30),
        Step("two ranks, one GPU", call.child("ranks"), 80),
        Step("against a plain loop", plain, 80),
        ladder("compile", seconds=50, not_here=compiling),
        ladder("fused", "eager", seconds=50),
        Step("timer against wall", call.child("steps", "timer"), 30),
    ]


def _plugin_flags(*, workers: int) -> tuple[str, ...]:
    """Return flags that run tests in several processes and end those that hang, if pytest can."""
    flags: tuple[str, ...] = ()
    if importlib.util.find_spec("xdist"):
        flags += ("-n", str(workers))
    if importlib.util.find_spec("pytest_timeout"):
        flags += ("--timeout=75",)
    return flags


def stage_2(call: Call) -> list[Step]:
    """CIFAR-10: the fast recipe with several seeds, then the parts."""
    one_is_enough = "a dry run trains one seed" if call.dry_run else ""
    seeds = [
        call.run(
            *("PartThree", f"seed{seed}", _FAST, "--recipe", _FAST, "--seed", str(seed)),
            *("--save-every-epochs", "1000", "--log-every", "100", "--no-validate"),
            limit_seconds=50,
        )
        for seed in range(SEEDS)
    ]
    shared = ("--work", str(call.work), "--data-dir", str(call.data))
    ddp, group = "PartThree-ddp", _group_of_one
    return [
        seeds[0],
        *(replace(step, not_here=one_is_enough) for step in seeds[1:]),
        Step("accuracy of the seeds", call.child("recipes", "accuracy", *shared), 40),
        call.run("PartThree", "ddp", ddp, *group(), "--profile", limit_seconds=55),
        call.run("PartThree", "deterministic", ddp, *group(), "--deterministic", limit_seconds=55),
        call.run(
            *("PartTwo", "all_reduce", "PartTwo-all_reduce", "--sync", "all_reduce", *group()),
            "--timeline",
            limit_seconds=45,
        ),
        call.run(
            *("PartTwo", "gather_scatter", "PartTwo-gather_scatter", "--sync", "gather_scatter"),
            *group(),
            limit_seconds=45,
        ),
        call.run("PartOne", "one", "PartOne-none", limit_seconds=45),
    ]


def _group_of_one() -> tuple[str, ...]:
    """Return flags that open a process group of one rank, at a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ("--master-ip", "127.0.0.1", "--master-port", str(port))
    return (*address, "--num-nodes", "1", "--rank", "0")


def fitted(recipe: str, seconds: float, call: Call) -> list[Step]:
    """Train a recipe for as many epochs as fit into the seconds, and into the call."""
    limit = CALL_SECONDS - 10
    small = ("--dataset", "digits", "--batch-size", "16", "--model", "vgg11", "--no-amp")
    flags = ("--no-validate", "--data-dir", str(call.data))
    flags += small if call.dry_run else ("--amp-dtype", "bf16")
    words = ("fit", "--recipe", recipe, "--work", str(call.work), "--seconds", str(seconds))
    command = (*call.child("recipes", *words, "--limit", str(limit - 20)), "--flags", *flags)
    one_is_enough = call.dry_run and recipe != _FIRST_FITTED
    not_here = f"a dry run fits one recipe, {_FIRST_FITTED}" if one_is_enough else ""
    return [Step(recipe, command, limit, not_here=not_here)]


def stage_data(call: Call) -> list[Step]:
    """Copy one part of a dataset; after the last part unpack and check it."""
    place = ("--data", str(call.data))
    gather = (f"{_BOOK}/data.py", "gather", *place, "--from", str(call.source))
    steps = [Step("gather", gather, 120)]
    if call.part < call.parts:
        return steps
    if call.unpack:
        command = (f"{_BOOK}/data.py", "unpack", *place, "--script", call.unpack)
        steps.append(Step("unpack", command, 300))
    not_here = "a dry run has no dataset to check" if call.dry_run else ""
    return [*steps, Step("check", (f"{_BOOK}/data.py", "check", *place), 100, not_here=not_here)]


STAGES: dict[str, Callable[[Call], list[Step]]] = {
    "1": stage_1,
    "2": stage_2,
    "3-ema": partial(fitted, _FIRST_FITTED, 540),
    "3-resnet50": partial(fitted, "resnet50-cifar100-fast", 300),
    "3-wide-resnet": partial(fitted, "wide-resnet-cifar100-full", 540),
    "data": stage_data,
}
