"""Measure how long ``--help`` takes, compared with an interpreter that does nothing.

    python benchmarks/startup.py

``python PartOne/main.py --help`` and ``python -c pass`` take turns, each in its own process. One
run of each comes first, to warm the disk cache and write the bytecode. The time is the wall time
from starting the process to its end.
"""

import argparse
import subprocess
import sys
import time

from loader import REPOSITORY, describe_machine, spread, whole_number

COMMANDS = {
    "python PartOne/main.py --help": [
        sys.executable,
        str(REPOSITORY / "PartOne" / "main.py"),
        "--help",
    ],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def seconds_of(command: list[str]) -> float:
    """Return the wall seconds that ``command`` takes; raise CalledProcessError if it fails."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=whole_number, default=15, help="runs of each command (default: 15)"
    )
    runs = parser.parse_args().runs
    print(describe_machine())
    print(
        f"settings: {runs} runs of each in turns after one to warm up; median (minimum to maximum)"
    )
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(runs + 1):
        for name, command in COMMANDS.items():
            taken = seconds_of(command)
            if run:
                seconds[name].append(taken)
    print(f"\n{'command':<34}seconds")
    for name, values in seconds.items():
        print(f"{name:<34}{spread(values, '.3f')}")


if __name__ == "__main__":
    main()
