"""Stand in for PartX/main.py in tests of what starts it: write a run's files quickly, or fail.

    fake_part.py ... --output-dir D --run-name R [--rank K] [--fail SYNC] [--wait-for FILE]
    FLAGS="--fail SYNC ..." fake_part.py lab ...

The second form runs ``lab ...``, which starts this file with FLAGS in place of the parts. Its
report page contains only the names of the finished cells.
"""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

SECTIONS = {
    "data": 0.01,
    "forward": 0.2,
    "backward": 0.5,
    "sync": 0.1,
    "update": 0.02,
    "step": 0.83,
    "wait": 0.04,
    "wire": 0.06,
}


def main(arguments):
    """Do what the flags ask for and return the exit status."""
    given = dict(pairwise(arguments))
    sync, rank, size = (
        given.get("--sync", "none"),
        int(given.get("--rank", 0)),
        int(given.get("--num-nodes", 1)),
    )
    folder = Path(given["--output-dir"]) / f"Part-{sync}" / given["--run-name"]
    if marker := given.get("--wait-for"):
        Path(f"{marker}-{os.getpid()}").touch()
        while not Path(marker).exists():
            time.sleep(0.02)  # between two checks
    if given.get("--fail") == sync and rank == size - 1:
        print("ValueError: the test wants it", file=sys.stderr)
        return 1
    if given.get("--fail") == sync:  # the other ranks notice that a rank has failed
        time.sleep(0.3)  # so that they end after the rank that failed
        print("error (rank 0): all_reduce broke: another rank has ended", file=sys.stderr)
        return 1
    if rank == 0:
        _write(folder, given, size)
    return 0


def waiting(marker):
    """Return the process ids of the fake parts that have waited for this file."""
    return {int(path.name.rsplit("-", 1)[1]) for path in marker.parent.glob(f"{marker.name}-*")}


def lab(arguments):
    """Run ``lab`` with this file in place of the parts and return the exit status."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from lab import cli
    from lab.compare import cells, jobs, reporting, runner

    real = cells.node_command

    def command(run):
        return [__file__, *real(run)[1:], *os.environ.get("FLAGS", "").split()]

    def write_page(folder, comparison, **_options):
        (folder / "report.html").write_text(
            " ".join(cell.id for cell in comparison.cells if cell.status == "done")
        )
        (folder / "table.md").touch()

    runner.node_command = jobs.node_command = command
    reporting.write_report = write_page
    cli.write_beside_report = None
    cells.part_of = lambda sync: "Part"
    return cli.main(arguments)


def rank_row(rank, **changes):
    """Return what a rank measured, with these changes."""
    row = {
        "rank": rank,
        "host": "here",
        "threads": 1,
        "seconds": SECTIONS,
        "peak_memory_bytes": 1_000_000_000,
        "bytes_sent": 10.0 + rank,
        "messages": 3.0,
    }
    return row | changes


def rank_rows(step=1.0, *, ranks=2, sent=(5.0, 1.0, 3.0)):
    """Return the rows of ranks; a step of rank r takes ``step`` + r seconds."""
    return [
        rank_row(
            rank,
            seconds=SECTIONS | {"step": step + rank},
            peak_memory_bytes=100 + rank,
            bytes_sent=sent[rank],
        )
        for rank in range(ranks)
    ]


def _write(folder, given, size):
    folder.mkdir(parents=True)
    files = {
        "config.json": {
            "sync": given.get("--sync", "none"),
            "world_size": size,
            "batch_size": int(given.get("--batch-size", 256)),
            "seed": int(given.get("--seed", 0)),
        },
        "ranks.json": {
            "format": 1,
            "sync": given.get("--sync", "none"),
            "world_size": size,
            "first_step": 2,
            "steps": 4,
            "ranks": [rank_row(rank) for rank in range(size)],
        },
        "summary.json": {"test_accuracy": None, "ranks_hold_equal_weights": True},
        "timeline.json": {"format": 1, "step": 6, "sync": given.get("--sync", "none"), "ranks": []},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 2.0 / step}) + "\n" for step in range(1, 7))
    )


if __name__ == "__main__":
    sys.exit(lab(sys.argv[2:]) if sys.argv[1] == "lab" else main(sys.argv[1:]))
