"""Train in the four ways on the embedded digits and compare them in a table: ``make demo``.

Each way starts by its own command, as on real nodes. A distributed way runs as two ranks on this
machine.
"""

import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.distributed.spawn import rank_commands, run_local_ranks
from common.utils.paths import IN_CHECKOUT, REPORTS, part_command
from common.utils.progress import duration
from common.utils.system import free_port
from common.utils.typed_json import read_json

WAYS = (
    ("PartOne", "none", 1),
    ("PartTwo", "gather_scatter", 2),
    ("PartTwo", "all_reduce", 2),
    ("PartThree", "ddp", 2),
)
SETTINGS = ("--dataset", "digits", "--batch-size", "64", "--epochs", "2")
_LIMIT_SECONDS = 300
_HEADINGS = ("way", "ranks", "step, s", "exposed comm., s", "accuracy", "equal weights")

console = Console(highlight=False)


def main() -> int:
    """Run the four ways, print the table and return 0 if all of them ended well."""
    began = time.perf_counter()
    results = []
    for part, sync, ranks in WAYS:
        settings = [*(("--sync", sync) if part == "PartTwo" else ()), *SETTINGS]
        shown = f"{part}/main.py" if IN_CHECKOUT else shlex.join(part_command(part))
        plural = "es" if ranks > 1 else ""
        group = " --master-ip 127.0.0.1 --num-nodes 2 --rank 0 and 1" if ranks > 1 else ""
        console.print(
            f"\n[bold]{part}, {sync}, {ranks} process{plural}[/bold]: python {shown} "
            f"{' '.join(settings)}{group}",
            soft_wrap=True,
        )
        summary = run_way([*part_command(part), *settings], ranks)
        if summary is None:
            console.print(f"{part} with {sync} failed: see its message above")
            return 1
        results.append(summary)
    show(results)
    console.print(
        f"\nThe demo took {duration(time.perf_counter() - began)}. With --dataset cifar10 the same "
        "four commands train on CIFAR-10; README.md shows how to start them on real nodes.",
        soft_wrap=True,
    )
    return 0


def run_way(command: list[str], ranks: int) -> dict[str, Any] | None:
    """Run one way on ``ranks`` local processes and return its summary; None if a process failed."""
    with tempfile.TemporaryFile() as errors:
        exits = run_local_ranks(
            rank_commands(command, ranks, port=free_port(address="127.0.0.1")),
            outputs=[None, *[errors] * (ranks - 1)],
            limit_seconds=_LIMIT_SECONDS,
        )
        if exits.timed_out:
            console.print(f"stopped after {_LIMIT_SECONDS} s, the limit of a run")
        elif exits.failed:
            errors.seek(0)
            console.print(errors.read().decode(errors="replace"), markup=False)
    if any(exits.statuses):
        return None
    newest = max(REPORTS.glob("*/*/summary.json"), key=lambda path: path.stat().st_mtime)
    return read_json(newest, dict[str, Any])


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a table of the ways, and the paths of their reports."""
    table = Table(title="VGG-11 in four ways, on scikit-learn's digits", box=SIMPLE_HEAD, padding=0)
    for heading in _HEADINGS:
        table.add_column(
            heading, justify="left" if heading == _HEADINGS[0] else "right", no_wrap=True
        )
    for result in results:
        equal = "only one"
        if result["nodes"] > 1:
            equal = "yes" if result["ranks_hold_equal_weights"] else "NO"
        table.add_row(
            f"{result['part']}: {result['sync']}",
            str(result["nodes"]),
            f"{result['step_seconds'] or 0.0:.3f}",
            f"{result['section_seconds']['sync']:.3f}"
            if result["nodes"] > 1 and result["section_seconds"]
            else "none",
            f"{100 * (result['test_accuracy'] or 0.0):.1f} %",
            equal,
        )
    console.print()
    console.print(table)
    for result in results:
        console.print(str(Path(result["folder"]) / "report.txt"), soft_wrap=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
