"""The flags and handlers of ``lab compare``, ``lab report`` and ``lab run-cell``.

A handler imports what it needs when it is called, so that ``--help`` answers at once.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.data import DATASETS
from common.models import MODELS
from common.sync import STRATEGIES, is_exact
from common.utils.environment import DEFAULT_MASTER_PORT
from common.utils.paths import REPORTS
from lab.compare.settings import Settings
from lab.flags import add_command

if TYPE_CHECKING:  # slow to import, and --help imports this file
    from lab.compare.reporting import Companion

# The flags of each command, with their arguments of ``add_argument``.
COMPARE_FLAGS: dict[str, dict[str, Any]] = {
    "--nodes": {
        "type": int,
        "nargs": "+",
        "default": [1, 2],
        "help": "numbers of ranks to compare; 1 is PartOne. With --ranks-per-node numbers of "
        "nodes, of which 1 is still PartOne, one rank",
    },
    "--ranks": {
        "type": int,
        "nargs": "+",
        "help": "the same as --nodes, where each rank has a node or all share this machine",
    },
    "--ranks-per-node": {
        "type": int,
        "default": Settings.ranks_per_node,
        "metavar": "K",
        "help": "with --rate: ranks on each emulated node, which share its link",
    },
    "--sync": {
        "nargs": "+",
        "default": ["gather_scatter", "all_reduce", "ddp"],
        "help": f"strategies: {', '.join(STRATEGIES)}; or 'all', or 'exact'; 'ddp-auto' and "
        "'ddp-9' are ddp with that --bucket-mb",
    },
    "--steps": {"type": int, "default": Settings.steps, "help": "timed steps of each run"},
    "--warmup": {
        "type": int,
        "default": Settings.warmup,
        "help": "steps of each run before the timed ones",
    },
    "--repeats": {
        "type": int,
        "default": Settings.repeats,
        "help": "runs of each strategy on each number of ranks",
    },
    "--dataset": {
        "default": Settings.dataset,
        "choices": list(DATASETS),
        "help": "dataset to train on",
    },
    "--model": {"default": Settings.model, "choices": list(MODELS), "help": "model to train"},
    "--batch-size": {
        "type": int,
        "default": Settings.batch_size,
        "help": "global batch; with --scaling weak that of one rank",
    },
    "--scaling": {
        "choices": ["strong", "weak"],
        "default": Settings.scaling,
        "help": "strong: the global batch stays the same; weak: the batch of a rank does",
    },
    "--seed": {
        "type": int,
        "default": 0,
        "help": "seed of every run; with --seeds, the first seed",
    },
    "--until-accuracy": {
        "type": float,
        "help": "train until this test accuracy, e.g. 0.6, instead of for --steps",
    },
    "--seeds": {
        "type": int,
        "default": 3,
        "help": "with --until-accuracy: runs of each strategy, each with another seed",
    },
    "--epochs": {
        "type": int,
        "default": Settings.epochs,
        "help": "with --until-accuracy: largest number of epochs",
    },
    "--rate": {
        "nargs": "+",
        "default": [],
        "help": "emulate nodes with links of these rates, e.g. 200mbit 1gbit "
        "(default: ranks over loopback)",
    },
    "--compute": {
        "default": Settings.compute,
        "help": "'real', or emulate it: layers sleep for the times of a profile. 'measured' is the "
        "profile that lab calibrate made on this machine; else a name in reports/profiles/ or a "
        "FILE.json",
    },
    "--output-dir": {
        "type": Path,
        "default": REPORTS,
        "help": "write compare-<time>/ to this folder",
    },
    "--new": {
        "action": "store_true",
        "help": "start from the beginning, even if the same comparison was interrupted",
    },
    "--no-predict": {
        "action": "store_true",
        "help": "do not calibrate the machine and predict the step times first",
    },
    "--plan": {
        "action": "store_true",
        "help": "run nothing: plan numbered runs for other machines, e.g. as Slurm jobs, and print "
        "how to start them",
    },
}
REPORT_FLAGS: dict[str, dict[str, Any]] = {
    "runs": {
        "type": Path,
        "nargs": "+",
        "metavar": "RUN",
        "help": "folders of runs (reports/<part>-<sync>/<time>), or the folder of one comparison",
    },
    "--scaling": {
        "choices": ["strong", "weak"],
        "default": "strong",
        "help": "strong: compare runs of equal global batches; weak: of equal batches of a rank",
    },
    "--output-dir": {
        "type": Path,
        "default": REPORTS,
        "help": "write report-<time>/ to this folder",
    },
    "--format": {
        "choices": ["html", "latex"],
        "default": "html",
        "help": "latex: also write the tables and figures as report.tex",
    },
}
RUN_CELL_FLAGS: dict[str, dict[str, Any]] = {
    "folder": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "folder of the plan, on a file system that all nodes share",
    },
    "--run": {
        "dest": "number",
        "type": int,
        "required": True,
        "help": "number of the run, from 0",
    },
    "-M --master-ip": {"help": "address of rank 0's node"},
    "--master-port": {
        "type": int,
        "default": DEFAULT_MASTER_PORT,
        "help": "port on rank 0's node",
    },
    "-N --num-nodes": {
        "type": int,
        "default": 1,
        "help": "number of nodes; if the run has fewer, the last ones do nothing",
    },
    "-R --rank": {"type": int, "default": 0, "help": "rank of this node"},
    "--print-nodes": {
        "action": "store_true",
        "help": "run nothing; print how many nodes the run needs",
    },
}


def add_compare(commands: argparse._SubParsersAction, companion: "Companion") -> None:
    """Add ``lab compare``; ``companion`` : see ``Companion``."""
    parser = add_command(
        commands,
        "compare",
        run=_compare,
        flags=COMPARE_FLAGS,
        passes_flags=True,
        help="compare strategies: train with each one on each number of ranks, and report which is "
        "fastest and why, and whether ranks get the mean gradient; flags after -- go to every run",
    )
    parser.set_defaults(companion=companion)


def add_report(commands: argparse._SubParsersAction, companion: "Companion") -> None:
    """Add ``lab report``; ``companion`` : see ``Companion``."""
    parser = add_command(
        commands,
        "report",
        run=_report,
        flags=REPORT_FLAGS,
        help="write the report of lab compare for runs that were started by hand, or again for an "
        "earlier comparison",
    )
    parser.set_defaults(companion=companion)


def add_run_cell(commands: argparse._SubParsersAction) -> None:
    """Add ``lab run-cell``."""
    add_command(
        commands,
        "run-cell",
        run=_run_cell,
        flags=RUN_CELL_FLAGS,
        help="run this node's part of one run of lab compare --plan; start it on each node, by a "
        "scheduler or by hand; lab report collects the runs",
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
    from common.errors import UserError
    from lab.compare.reporting import compare_and_report, plan_and_describe

    if args.plan and args.ranks_per_node > 1:
        raise UserError(
            f"--plan starts one rank on each node, so --ranks-per-node {args.ranks_per_node} needs "
            "emulated nodes: leave out one of the two"
        )
    if args.ranks is not None and args.ranks_per_node > 1:
        raise UserError(
            f"--ranks beside --ranks-per-node {args.ranks_per_node}: give --nodes, the numbers of "
            "nodes"
        )
    seeds = args.seeds if args.until_accuracy is not None else 1
    settings = Settings(
        nodes=tuple(args.ranks or args.nodes),
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
        rates=tuple(args.rate) or (None,),
        compute=args.compute,
        ranks_per_node=args.ranks_per_node,
    )
    asked = {
        "reports": args.output_dir,
        "anew": args.new,
        "predicts": not args.no_predict,
        "command": args.typed,
    }
    if args.plan:
        return plan_and_describe(settings, **asked)
    return compare_and_report(settings, **asked, companion=args.companion)


def _report(args: argparse.Namespace) -> int:
    from lab.compare.reporting import report_on

    return report_on(
        args.runs,
        reports=args.output_dir,
        scaling=args.scaling,
        form=args.format,
        companion=args.companion,
    )


def _run_cell(args: argparse.Namespace) -> int:
    from common.distributed.launch_env import LaunchSpec
    from common.errors import UserError
    from lab.compare.jobs import planned_run, run_cell

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
