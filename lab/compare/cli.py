"""The flags and handlers of ``lab compare``, ``lab report`` and ``lab run-cell``.

A handler imports what it needs when it is called, so that ``--help`` answers at once.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.data import DATASETS
from common.models import MODELS
from common.sync import STRATEGIES, is_exact
from common.utils.environment import DEFAULT_MASTER_PORT
from common.utils.paths import REPORTS
from lab.compare.settings import Settings
from lab.flags import add_command

COMPARE_FLAGS: dict[str, dict[str, Any]] = {
    "--nodes": {
        "type": int,
        "nargs": "+",
        "default": [1, 2],
        "help": "numbers of ranks; 1 is PartOne",
    },
    "--sync": {
        "nargs": "+",
        "default": ["gather_scatter", "all_reduce", "ddp"],
        "help": f"{', '.join(STRATEGIES)}; 'all', or 'exact'",
    },
    "--steps": {"type": int, "default": Settings.steps, "help": "measured steps of each run"},
    "--warmup": {"type": int, "default": Settings.warmup, "help": "steps before them, left out"},
    "--repeats": {"type": int, "default": Settings.repeats, "help": "runs of each cell"},
    "--dataset": {
        "default": Settings.dataset,
        "choices": list(DATASETS),
        "help": "what is trained on",
    },
    "--model": {"default": Settings.model, "choices": list(MODELS), "help": "what is trained"},
    "--batch-size": {
        "type": int,
        "default": Settings.batch_size,
        "help": "global batch; with --scaling weak that of one node",
    },
    "--scaling": {
        "choices": ["strong", "weak"],
        "default": Settings.scaling,
        "help": "whether the global batch or that of a node stays the same",
    },
    "--seed": {"type": int, "default": 0, "help": "of every run; with --seeds the first one"},
    "--until-accuracy": {
        "type": float,
        "help": "train until a test accuracy (a fraction), in place of --steps",
    },
    "--seeds": {
        "type": int,
        "default": 3,
        "help": "of --until-accuracy: trainings of each cell, each with a seed of its own",
    },
    "--epochs": {
        "type": int,
        "default": Settings.epochs,
        "help": "of --until-accuracy: at most so many",
    },
    "--rate": {
        "nargs": "+",
        "default": [],
        "help": "of the links of emulated nodes, e.g. 200mbit 1gbit; each cell "
        "runs at each of them (default: over loopback)",
    },
    "--compute": {
        "default": Settings.compute,
        "help": "'real', or whose times layers take by sleeping: 'measured' on this "
        "machine by lab calibrate, a name in reports/profiles/, or a FILE.json",
    },
    "--output-dir": {"type": Path, "default": REPORTS, "help": "receives compare-<time>/"},
    "--new": {
        "action": "store_true",
        "help": "begin anew, also where the same comparison was interrupted",
    },
    "--no-predict": {
        "action": "store_true",
        "help": "don't calibrate the machine and predict the step times first",
    },
    "--plan": {
        "action": "store_true",
        "help": "run nothing: write down the runs by number, for jobs on other "
        "machines, and say how to start them",
    },
}
"""The flags of ``lab compare``, with their arguments of ``add_argument``."""


def add_compare(commands: argparse._SubParsersAction) -> None:
    """Add ``lab compare``."""
    parser = add_command(
        commands,
        "compare",
        run=_compare,
        passes_flags=True,
        help="train with each strategy on each number of nodes, in turns, and write "
        "reports/compare-<time>/ with tables, figures and report.html; what follows -- goes to "
        "every run",
    )
    for flag, options in COMPARE_FLAGS.items():
        parser.add_argument(flag, **options)


def add_report(commands: argparse._SubParsersAction) -> None:
    """Add ``lab report``."""
    parser = add_command(
        commands,
        "report",
        run=_report,
        help="the same report from the folders of runs that were started by hand, or anew from a "
        "comparison's folder",
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folders of runs (reports/<part>-<sync>/<time>), or of one comparison",
    )
    parser.add_argument(
        "--scaling",
        choices=["strong", "weak"],
        default="strong",
        help="weak: batches that grow with the nodes are comparable",
    )
    parser.add_argument("--output-dir", type=Path, default=REPORTS, help="receives report-<time>/")


def add_run_cell(commands: argparse._SubParsersAction) -> None:
    """Add ``lab run-cell``."""
    parser = add_command(
        commands,
        "run-cell",
        run=_run_cell,
        help="one run of lab compare --plan, started on each of its nodes by a scheduler or by "
        "hand; lab report puts them together",
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="of the plan, on a file system that all nodes share",
    )
    parser.add_argument("--run", dest="number", type=int, required=True, help="its number, from 0")
    parser.add_argument("-M", "--master-ip", help="address of rank 0's node")
    parser.add_argument("--master-port", type=int, default=DEFAULT_MASTER_PORT, help="port there")
    parser.add_argument(
        "-N",
        "--num-nodes",
        type=int,
        default=1,
        help="number of nodes that there are; where the run has fewer, "
        "the last ones have nothing to do",
    )
    parser.add_argument("-R", "--rank", type=int, default=0, help="this node's place")
    parser.add_argument(
        "--print-nodes",
        action="store_true",
        help="run nothing, and print how many nodes the run has",
    )


def strategies(names: Sequence[str]) -> tuple[str, ...]:
    """Return the strategies that ``--sync`` names, each once, in the order of ``STRATEGIES``.

    'all' and 'exact' name several strategies.
    """
    known = [
        name
        for name in STRATEGIES
        if name in names or "all" in names or ("exact" in names and is_exact(name))
    ]
    return (*known, *sorted(set(names) - {"all", "exact", *STRATEGIES}))


def _compare(args: argparse.Namespace) -> int:
    from lab.compare.reporting import compare_and_report, plan_and_describe

    seeds = args.seeds if args.until_accuracy is not None else 1
    settings = Settings(
        nodes=tuple(args.nodes),
        sync=strategies(args.sync),
        steps=args.steps,
        warmup=args.warmup,
        repeats=args.repeats,
        dataset=args.dataset,
        model=args.model,
        batch_size=args.batch_size,
        scaling=args.scaling,
        seeds=tuple(range(args.seed, args.seed + seeds)),
        until_accuracy=args.until_accuracy,
        epochs=args.epochs,
        flags=tuple(args.flags),
        rates=tuple(args.rate),
        compute=args.compute,
    )
    do = plan_and_describe if args.plan else compare_and_report
    return do(
        settings,
        reports=args.output_dir,
        anew=args.new,
        predicts=not args.no_predict,
        command=args.typed,
    )


def _report(args: argparse.Namespace) -> int:
    from lab.compare.reporting import report_on

    return report_on(args.runs, reports=args.output_dir, scaling=args.scaling)


def _run_cell(args: argparse.Namespace) -> int:
    from common.distributed.launch_env import LaunchSpec
    from common.errors import UserError
    from lab.compare.job_plan import planned_run
    from lab.compare.job_run import run_cell

    if args.print_nodes:
        print(planned_run(args.folder, args.number)[0].nodes)
        return 0
    if not 0 <= args.rank < args.num_nodes:
        raise UserError(
            f"--rank: got {args.rank} of --num-nodes {args.num_nodes}; give 0 to "
            f"{args.num_nodes - 1}"
        )
    return run_cell(
        args.folder,
        args.number,
        LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port),
    )
