"""Two ranks on one GPU: every strategy against one process, for correctness, never for times.

NCCL refuses two ranks on one GPU of one host. Each rank has its own NCCL_HOSTID, so that it takes
them for two hosts. If it refuses nevertheless, Gloo exchanges the tensors of the GPU, except those
of strategies that send from rank to rank, which Gloo does on the CPU only. Each strategy trains in
float64 with ``errors_on_this_rank`` (lab/proofs/equivalence.py), whose reference is one process on
the whole batch. Strategies that lose precision have to keep the ranks equal and finite.

One pair of ranks makes all checks. Those that it leaves, because one raises or hangs, get a pair of
their own each.
"""

import copy
import json
import math
import re
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.sync import STRATEGIES, is_exact
from common.training_engine import TrainingEngine
from gpu_book.measuring import choose_device, parser
from gpu_book.summaries import show
from lab.proofs.equivalence import errors_on_this_rank, parameter_errors, proof_sync
from lab.proofs.proof_model import Case
from lab.proofs.ranks import RankError, run_ranks

SIZE, ALL_SECONDS, LIMIT_SECONDS = 2, 40, 25
SENDERS = ("tree", "ring", "halving_doubling")  # these use send and recv
BATCHNORM = "SyncBatchNorm, DDP"


def connect(_rank: int, device: str) -> float:
    """Return the sum of a one from each rank. Collective."""
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    return float(ones)


def check_strategy(rank: int, device: str, name: str) -> dict[str, Any]:
    """Return the largest error of any step, and a digest of the weights after each. Collective."""
    # Some lossy strategies need every gradient, and fsdp the same layers on every rank.
    case = Case(device=device, unused=is_exact(name) and name != "fsdp")
    found = errors_on_this_rank(rank, SIZE, proof_sync(name), case)
    errors = [error for step in found.by_parameter for error in step.values()]
    worst = max(error if math.isfinite(error) else math.inf for error in errors)
    return {"error": worst, "digests": found.digests}


def check_batchnorm(rank: int, device: str) -> dict[str, Any]:
    """Compare SyncBatchNorm under DDP with BatchNorm on the whole batch, in float64. Collective."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    ).double()
    alone = TrainingEngine(copy.deepcopy(model), device)
    both = TrainingEngine(copy.deepcopy(model), device, distributed=True, sync="ddp")
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 8, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 2, (3, 8), generator=generator)
    for engine, own in ((alone, slice(0, 8)), (both, slice(4 * rank, 4 * rank + 4))):
        engine.prepare(torch.optim.SGD(engine.model.parameters(), lr=0.1), nn.CrossEntropyLoss())
        engine.train_epoch([(x[own], y[own]) for x, y in zip(images, labels, strict=True)], epoch=1)
        engine.close()
    # The floor: a convolution's bias before BatchNorm has no gradient but rounding errors.
    errors = parameter_errors(both.model.module, alone.model, floor=1e-3)
    return {"error": max(errors.values()), "digests": []}


def choose_backend(device: str) -> tuple[str, str]:
    """Return the backend that connects two ranks on this device, and why it is not NCCL."""
    if device == "cpu":
        return "gloo", "a CPU has no NCCL"
    run_ranks(SIZE, connect, "cpu")  # imports torch: a slow start is no fault of NCCL
    try:
        run_ranks(SIZE, connect, device, timeout_seconds=60, backend="nccl")
    except RankError as error:
        return "gloo", f"NCCL did not connect them: {reason(error)}"
    return "nccl", ""


def reason(error: RankError) -> str:
    """Return the line of a rank's traceback that names the error."""
    lines = str(error).strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (named or lines)[-1][:300]


def verdict(name: str, by_rank: list[dict[str, Any]]) -> str:
    """Return "" if both ranks are right, else what is wrong."""
    exact = name == BATCHNORM or is_exact(name)
    worst = max(found["error"] for found in by_rank)
    if worst > (Case().tolerance if exact else 1e6):
        return f"differs from one process by {worst:.1e}"
    if by_rank[0]["digests"] != by_rank[1]["digests"]:
        return "the ranks hold different weights"
    return ""


@dataclass(frozen=True)
class Report:
    """What the table shows of the checks ``names``, by their verdicts."""

    device: str
    backend: str
    why_not_nccl: str
    names: tuple[str, ...]

    def show(self, results: dict[str, str]) -> None:
        """Print the verdicts that there are."""
        why = f" ({self.why_not_nccl})" if self.why_not_nccl else ""
        show(
            {"backend": self.backend, "why_not_nccl": self.why_not_nccl, "results": results},
            f"two ranks on {self.device} with {self.backend}{why}: "
            f"{list(results.values()).count('')} of {len(self.names)} right",
            *(f"{name}: {text}" for name, text in results.items() if text),
        )


def check(rank: int, device: str, name: str) -> dict[str, Any]:
    """Make one check on this rank. Collective."""
    if name == BATCHNORM:
        return check_batchnorm(rank, device)
    return check_strategy(rank, device, name)


def check_all(rank: int, report: Report, names: Sequence[str], folder: Path) -> None:
    """Make the checks in turn; each rank writes what it finds to ``folder``. Collective."""
    for name in names:
        try:
            (folder / f"{name}.{rank}").write_text(json.dumps(check(rank, report.device, name)))
        except Exception:
            traceback.print_exc()  # main() repeats this check
        dist.barrier()
        if rank == 0:
            report.show(verdicts(names, folder))


def verdicts(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the verdict of each check that both ranks have finished."""
    paths = {name: [folder / f"{name}.{rank}" for rank in range(SIZE)] for name in names}
    return {
        name: verdict(name, [json.loads(path.read_text()) for path in both])
        for name, both in paths.items()
        if all(path.exists() for path in both)
    }


def main() -> None:
    """Check every strategy and SyncBatchNorm, and print a result after each."""
    arguments = parser(__doc__).parse_args()
    device = str(choose_device(arguments.dry_run))
    backend, why = choose_backend(device)
    names = tuple(name for name in STRATEGIES if name != "none")
    if device != "cpu":  # SyncBatchNorm refuses CPU tensors
        names += (BATCHNORM,)
    report = Report(device, backend, why, names)
    left_out = {}
    if backend == "gloo" and device != "cpu":
        left_out = dict.fromkeys(SENDERS, "not run: Gloo sends no GPU tensors")
    possible = [name for name in names if name not in left_out]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run_ranks(
                *(SIZE, check_all, report, possible, folder),
                timeout_seconds=ALL_SECONDS,
                backend=backend,
            )
        except RankError as error:
            print(error, flush=True)  # the checks that it left come next
        results = left_out | verdicts(possible, folder)
    report.show(results)
    for name in [one for one in possible if one not in results]:
        try:
            found = run_ranks(
                *(SIZE, check, device, name), timeout_seconds=LIMIT_SECONDS, backend=backend
            )
            results[name] = verdict(name, found)
        except RankError as error:
            results[name] = reason(error)
        report.show(results)
    raise SystemExit(1 if any(results[name] for name in possible) else 0)


if __name__ == "__main__":
    main()
