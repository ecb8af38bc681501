"""Use a GPU that is lent for minutes: one call runs one stage, and every result is kept.

    python benchmarks/gpu.py --stage 1 --out DIR
    python benchmarks/gpu.py --stage 1 --out DIR --dry-run

It runs from a checkout, without installation, with the Python that has torch. Each step is a
process of its own with a limit; one that fails or hangs does not affect the next. ``DIR`` gets
results.json, written whole after each step, the output in stage.log, and a sample of a timeline:
a few small files, since a lent machine gives back little. A table comes last. --dry-run does the
same on the CPU, with digits and two steps, or says why a step needs a GPU.

The stages, in order of value, are in gpu_book/plan.py; benchmarks/README.md has the calls.
"""

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from gpu_book.packages import missing_packages
from gpu_book.plan import CALL_SECONDS, STAGES, Call
from gpu_book.runner import REPOSITORY, run_steps, table

_CPU_LIMITS = 4
"""How many times as long a step, and the call, may take in a dry run: other work shares the CPU."""


def main() -> int:
    """Run one stage; return 1 if a step failed or was killed, 2 if it cannot start.

    It cannot start if packages are missing or the flags do not fit.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", required=True, choices=STAGES, help="what to run")
    parser.add_argument("--out", required=True, type=Path, help="new or empty folder for results")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    parser.add_argument(
        "--budget-seconds", type=float, default=CALL_SECONDS, help="time of the whole call"
    )
    parser.add_argument("--only", default="", help="run only the steps whose name contains this")
    parser.add_argument(
        "--data", type=Path, default=REPOSITORY / "data", help="folder of the datasets"
    )
    parser.add_argument("--from", dest="source", type=Path, help="stage data: folder of this part")
    parser.add_argument("--part", type=int, default=1, help="stage data: number of this part")
    parser.add_argument("--of", dest="parts", type=int, default=1, help="stage data: parts")
    parser.add_argument("--unpack", default="", help="stage data: script among the gathered files")
    arguments = parser.parse_args()
    tests = ["pytest"] if arguments.stage == "1" else []
    if missing := missing_packages(REPOSITORY / "pyproject.toml", *tests):
        print(missing, file=sys.stderr)
        return 2
    if arguments.stage == "data" and (arguments.source is None or not arguments.source.is_dir()):
        parser.error(f"--stage data copies a folder, got --from {arguments.source}: give one")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if any(arguments.out.iterdir()):
        parser.error(f"--out {arguments.out} holds files already: give a new or an empty folder")
    with tempfile.TemporaryDirectory(prefix="gpu-book-") as name:
        return run_stage(arguments, Path(name))


def run_stage(arguments: argparse.Namespace, work: Path) -> int:
    """Run the stage's steps, with their runs in the folder ``work``; return the exit status."""
    call = Call(
        arguments.dry_run,
        work,
        arguments.data.resolve(),
        arguments.source.resolve() if arguments.source else None,
        arguments.part,
        arguments.parts,
        arguments.unpack,
    )
    slower = _CPU_LIMITS if arguments.dry_run else 1
    steps = [
        replace(step, limit_seconds=slower * step.limit_seconds)
        for step in STAGES[arguments.stage](call)
        if arguments.only in step.name
    ]
    header = {
        "stage": arguments.stage,
        "dry_run": arguments.dry_run,
        "budget_seconds": arguments.budget_seconds,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    records = run_steps(
        steps, arguments.out, header=header, budget_seconds=slower * arguments.budget_seconds
    )
    for timeline in work.glob("*/*/timeline.json"):
        shutil.copy(timeline, arguments.out)
    print(table(records))
    return int(any(record.status in ("failed", "killed") for record in records))


if __name__ == "__main__":
    sys.exit(main())
