"""Compare emulated steps with the event model, for nodes whose links are shaped on this machine.

    lab calibrate                     # or lab calibrate --profile NAME: the time of each layer
    python benchmarks/emulation.py    # 4 and 8 nodes, 200 Mbit/s and 1 Gbit/s: about 25 minutes

Each number of nodes and each rate is a separate comparison (lab/compare/runner.py) on its own
cluster, with one network namespace per node. It first measures messages on the cluster: alpha1 with
1 KB and alpha0 with 2 MB. Then it runs every strategy, and the layers sleep as long as the profile
says.

- measured: the median over the steps after the warm-up and the mean over the ranks; with --repeats
  the median over the repeats.
- model: t(M) = max(alpha1, ideal x 1.06 + alpha0) for each operation, c_k = max(r_k, c_k-1) +
  t(M_k). r_k and the rest of the step come from the profile. Nothing in the model is fitted to the
  steps that it is compared with.
- aim: how far measured / model may be from 1. The last lines show overlapped / ddp; on 4 nodes at 1
  Gbit/s overlapped should take no longer than ddp.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader import REPOSITORY, describe_machine, whole_number

sys.path.insert(0, str(REPOSITORY))

from lab.compare.executors import Executors
from lab.compare.runner import open_comparison, run_comparison
from lab.compare.settings import Settings

AIMS = {
    "ddp": 0.05,
    "overlapped": 0.05,
    "all_reduce": 0.06,
    "gather_scatter": 0.03,
    "all_reduce_flat": 0.12,
    "gather_scatter_flat": 0.12,
    "ring": 0.10,
}
SHOWN = ("all_reduce", "overlapped", "ddp")


def measure(nodes: int, rate: str, arguments: argparse.Namespace, reports: Path) -> dict[str, Any]:
    """Run one comparison and return its results."""
    settings = Settings(
        nodes=(nodes,),
        sync=tuple(arguments.sync),
        rates=(rate,),
        compute=arguments.compute,
        steps=arguments.steps,
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        dataset=arguments.dataset,
        batch_size=arguments.batch_size,
    )

    executors = Executors(nodes, settings.rates)
    folder, results = open_comparison(settings, reports=reports, anew=True)
    run_comparison(settings, folder, results, executors, predicts=True)
    return results


def report(results: Mapping[str, Any]) -> list[str]:
    """Return one line per strategy."""
    lines = []
    for cell in results["cells"]:
        if cell["median"] is None:
            lines.append(
                f"{cell['nodes']:>5}  {cell['rate']:<8}  {cell['sync']:<20}  FAILED: "
                f"{cell['message']}"
            )
            continue
        measured, model = (
            cell["median"]["step"],
            results["prediction"]["cells"][cell["id"]]["step_seconds"],
        )
        aim = AIMS.get(cell["sync"])
        verdict = (
            ""
            if aim is None
            else f"{aim:4.0%}  {'met' if abs(measured / model - 1) <= aim else 'MISSED'}"
        )
        lines.append(
            f"{cell['nodes']:>5}  {cell['rate']:<8}  {cell['sync']:<20}  {measured:8.3f}  "
            f"{cell['median']['sync']:8.3f}  {model:8.3f}  {measured / model:6.3f}  {verdict}"
        )
    return lines


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the step of one rank, with the strategies below each other."""
    from lab.plot_style import style
    from lab.report.drawings.timeline_figure import draw_timeline
    from lab.report.view import rate_text

    cells = {
        cell["id"]: cell
        for cell in results["cells"]
        if cell["id"] in results["timelines"] and cell["sync"] in SHOWN
    }
    first = next(iter(cells.values()))
    with style():
        figure = draw_timeline(
            [
                (cell["sync"], step, step["ranks"][1])
                for name, cell in cells.items()
                if (step := results["timelines"][name])
            ],
            narrow=False,
            emulated=True,
            heading=f"rank 1 of {first['nodes']} nodes at {rate_text(first['rate'])}",
        )
        figure.savefig(path, dpi=150)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes",
        type=whole_number,
        nargs="+",
        default=[4, 8],
        help="numbers of nodes (default: 4 8)",
    )
    parser.add_argument(
        "--rate",
        nargs="+",
        default=["200mbit", "1gbit"],
        help="rates of the links (default: 200mbit 1gbit)",
    )
    parser.add_argument(
        "--sync", nargs="+", default=list(AIMS), help=f"strategies (default: {' '.join(AIMS)})"
    )
    parser.add_argument(
        "--compute",
        default="measured",
        help="profile with the times of the layers, as in a run (default: measured)",
    )
    parser.add_argument("--steps", type=whole_number, default=7, help="measured steps (default: 7)")
    parser.add_argument(
        "--warmup", type=whole_number, default=2, help="warm-up steps before them (default: 2)"
    )
    parser.add_argument(
        "--repeats", type=whole_number, default=1, help="runs of each cell (default: 1)"
    )
    parser.add_argument(
        "--batch-size", type=whole_number, default=256, help="global batch size (default: 256)"
    )
    parser.add_argument(
        "--dataset",
        default="digits",
        help="dataset whose images are loaded; nothing is computed on them (default: digits)",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        help="write a PNG of one rank's step (first number of nodes, last rate)",
    )
    arguments = parser.parse_args()
    print(describe_machine())
    lines, steps, shown = [], {}, {}
    with tempfile.TemporaryDirectory() as reports:
        for rate in arguments.rate:
            for nodes in arguments.nodes:
                results = measure(nodes, rate, arguments, Path(reports))
                lines += report(results)
                shown = results if nodes == arguments.nodes[0] else shown
                steps |= {
                    (nodes, rate, cell["sync"]): cell["median"]["step"]
                    for cell in results["cells"]
                    if cell["median"]
                }
    print(
        f"\n{'nodes':>5}  {'rate':<8}  {'strategy':<20}  {'step, s':>8}  {'sync, s':>8}  "
        f"{'model, s':>8}  {'ratio':>6}   aim"
    )
    print("\n".join(lines))
    if arguments.figure is not None:
        draw(arguments.figure, shown)
    for nodes, rate, sync in steps:
        if sync == "overlapped" and (nodes, rate, "ddp") in steps:
            print(
                f"overlapped / ddp on {nodes} nodes at {rate}: "
                f"{steps[nodes, rate, sync] / steps[nodes, rate, 'ddp']:.3f}"
            )


if __name__ == "__main__":
    main()
