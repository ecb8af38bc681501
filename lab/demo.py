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

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.distributed.spawn import rank_commands, run_local_ranks
from common.runs import RunSummary, read_run
from common.say import minutes_text, percent
from common.utils.paths import IN_CHECKOUT, REPORTS, part_command
from common.utils.system import free_port

WAYS = (
    ("PartOne", "none", 1),
    ("PartTwo", "gather_scatter", 2),
    ("PartTwo", "all_reduce", 2),
    ("PartThree", "ddp", 2),
)
SETTINGS = ("--dataset", "digits", "--batch-size", "64", "--epochs", "2")
_HEADINGS = ("way", "ranks", "step, s", "exposed comm., s", "accuracy", "equal weights")

console = Console(highlight=False)


def main() -> int:
    """Run the four ways, print the table and return 0 if all of them ended well."""
    began = time.perf_counter()
    results = []
    for part, sync, ranks in WAYS:
        settings = [*SETTINGS]
        if part == "PartTwo":
            settings = ["--sync", sync, *settings]
        _announce(part, sync, ranks, settings)
        summary = run_way([*part_command(part), *settings], ranks)
        if summary is None:
            console.print(f"{part} with {sync} failed: see its message above")
            return 1
        results.append(summary)
    show(results)
    console.print(
        f"\nThe demo took {minutes_text(time.perf_counter() - began)}. With --dataset cifar10 the "
        "same four commands train on CIFAR-10; README.md shows how to start them on real nodes.",
        soft_wrap=True,
    )
    return 0


def _announce(part: str, sync: str, ranks: int, settings: Sequence[str]) -> None:
    """Print what runs next, with the command that a user would type."""
    script = shlex.join(part_command(part))
    if IN_CHECKOUT:
        script = f"{part}/main.py"
    processes = "1 process"
    command = f"python {script} {' '.join(settings)}"
    if ranks > 1:
        processes = f"{ranks} processes"
        command += " --master-ip 127.0.0.1 --num-nodes 2 --rank 0 and 1"
    console.print(
        f"\n[bold]{part}, {sync}, {processes}[/bold]: {command}",
        soft_wrap=True,
    )


def run_way(command: list[str], ranks: int) -> RunSummary | None:
    """Run one way on ``ranks`` local processes and return its summary; None if a process failed."""
    with tempfile.TemporaryFile() as errors:
        exits = run_local_ranks(
            rank_commands(command, ranks, port=free_port(address="127.0.0.1")),
            outputs=[None, *[errors] * (ranks - 1)],
        )
        if exits.failed:
            errors.seek(0)
            console.print(errors.read().decode(errors="replace"), markup=False)
    if any(exits.statuses):
        return None
    newest = max(REPORTS.glob("*/*/summary.json"), key=lambda path: path.stat().st_mtime)
    return read_run(newest.parent).summary


def show(results: Sequence[RunSummary]) -> None:
    """Print a table of the ways, and the paths of their reports."""
    table = Table(title="VGG-11 in four ways, on scikit-learn's digits", box=SIMPLE_HEAD, padding=0)
    first, *others = _HEADINGS
    table.add_column(first, justify="left", no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        exposed = "none"
        equal = "only one"
        if result.nodes > 1:
            equal = "yes" if result.ranks_hold_equal_weights else "NO"
            if result.section_seconds is not None:
                exposed = f"{result.section_seconds['sync']:.3f}"
        table.add_row(
            f"{result.part}: {result.sync}",
            str(result.nodes),
            f"{result.step_seconds or 0.0:.3f}",
            exposed,
            f"{percent(result.test_accuracy or 0.0, 1)}",
            equal,
        )
    console.print()
    console.print(table)
    for result in results:
        console.print(str(Path(result.folder) / "report.txt"), soft_wrap=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
