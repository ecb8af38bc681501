"""The ``lab`` command: compare strategies, report on runs, calibrate, predict, make clusters, find what is wrong.

Each subcommand imports what it needs when it is called, so that ``lab --help`` and ``lab predict`` answer at once.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from common.config import DEFAULT_GLOBAL_BATCH_SIZE, DEFAULT_MASTER_PORT, REPOSITORY
from common.data import DATASETS
from common.errors import GroupError, UserError
from common.models import MODELS
from common.sync import STRATEGIES, is_exact
from lab.cluster.flags import add_flags as add_cluster_flags
from lab.flags import add_command
from lab.jobs.flags import add_flags as add_job_flags
from lab.ssh.flags import add_flags as add_ssh_flags

ASSIGNMENT = ["gather_scatter", "all_reduce", "ddp"]
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """argparse without the page of usage before each error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the flags)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    flags: list[str] = []
    if "--" in given:
        given, flags = given[:given.index("--")], given[given.index("--") + 1:]
    try:
        args = build_parser().parse_args(given)
        args.flags, args.typed = flags, shlex.join(["lab", *given, *(["--", *flags] if flags else [])])
        if flags and not getattr(args, "passes_flags", False):
            raise UserError(f"-- {' '.join(flags)}: only lab compare, lab launch, lab cluster run and lab cluster shell "
                            "take what follows --")
        return args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except GroupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The subcommands and their flags."""
    parser = _Parser(prog="lab", description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_compare(commands)
    _add_report(commands)
    _add_calibrate(commands)
    _add_predict(commands)
    add_cluster_flags(commands)
    add_ssh_flags(commands)
    add_job_flags(commands)
    _add_doctor(commands)
    _add_explain(commands)
    return parser


def _add_compare(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "compare", run=_compare,
                         help="train with each strategy on each number of nodes, in turns, and write reports/compare-<time>/ "
                              "with tables, figures and report.html; what follows -- goes to every run")
    parser.set_defaults(passes_flags=True)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2], help="numbers of ranks; 1 is PartOne")
    parser.add_argument("--sync", nargs="+", default=ASSIGNMENT, help=f"{', '.join(STRATEGIES)}; 'all', or 'exact'")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them, left out")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each cell")
    parser.add_argument("--dataset", default="cifar10", choices=list(DATASETS), help="what is trained on")
    parser.add_argument("--model", default="vgg11", choices=list(MODELS), help="what is trained")
    parser.add_argument("--batch-size", type=int, default=DEFAULT_GLOBAL_BATCH_SIZE, help="global batch; with --scaling weak "
                        "that of one node")
    parser.add_argument("--scaling", choices=["strong", "weak"], default="strong", help="whether the global batch or that of a "
                        "node stays the same")
    parser.add_argument("--seed", type=int, default=0, help="of every run; with --seeds the first one")
    parser.add_argument("--until-accuracy", type=float, help="train until a test accuracy (a fraction), in place of --steps")
    parser.add_argument("--seeds", type=int, default=3, help="of --until-accuracy: trainings of each cell, each with a seed of "
                        "its own")
    parser.add_argument("--epochs", type=int, default=20, help="of --until-accuracy: at most so many")
    parser.add_argument("--rate", nargs="+", default=[], help="of the links of emulated nodes, e.g. 200mbit 1gbit; each cell "
                        "runs at each of them (default: over loopback)")
    parser.add_argument("--compute", default="real", help="'real', or whose times layers take by sleeping: 'measured' on this "
                        "machine by lab calibrate, a name in reports/profiles/, or a FILE.json")
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "reports", help="receives compare-<time>/")
    parser.add_argument("--new", action="store_true", help="begin anew, also where the same comparison was interrupted")
    parser.add_argument("--no-predict", action="store_true", help="don't calibrate the machine and predict the step times "
                        "first")
    parser.add_argument("--plan", action="store_true", help="run nothing: write down the runs by number, for jobs on other "
                        "machines, and say how to start them")


def _add_report(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "report", run=_report,
                         help="the same report from the folders of runs that were started by hand, or anew from a comparison's "
                              "folder")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs (reports/<part>-<sync>/<time>), or of "
                        "one comparison")
    parser.add_argument("--scaling", choices=["strong", "weak"], default="strong", help="weak: batches that grow with the nodes "
                        "are comparable")
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "reports", help="receives report-<time>/")


def _add_calibrate(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "calibrate", run=_calibrate,
                         help="measure latency, bandwidth, summation and compute time for predictions, of this machine, or with "
                              "--master-ip --num-nodes --rank of several, started on each")
    parser.add_argument("--ranks", type=int, help="processes on this machine (default: one a core, 2 to 8)")
    parser.add_argument("--model", default="vgg11", choices=list(MODELS), help="whose steps are timed")
    parser.add_argument("--quick", action="store_true", help="a third of the time, with wider intervals")
    parser.add_argument("--output", type=Path, help="the file (default: reports/calibration.json, and what each layer takes in "
                        "reports/profiles/measured-MODEL.json)")
    parser.add_argument("--profile", help="measure what each layer takes, for --compute, and nothing else: "
                        "reports/profiles/PROFILE.json, or a file that ends in .json")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of --profile")
    parser.add_argument("-M", "--master-ip", help="address of rank 0's node")
    parser.add_argument("--master-port", type=int, default=DEFAULT_MASTER_PORT, help="port there")
    parser.add_argument("-N", "--num-nodes", type=int, help="number of nodes")
    parser.add_argument("-R", "--rank", type=int, help="this node's place")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for another rank")


def _add_predict(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "predict", run=_predict,
                         help="the step time of each strategy on nodes that nobody has, and where each stops scaling")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of nodes, up to 100,000")
    parser.add_argument("--rate", help="of each link, e.g. 1gbit (default: as calibrated)")
    parser.add_argument("--latency", help="of a message, e.g. 0.2ms (default: as calibrated)")
    parser.add_argument("--sync", nargs="+", default=["all"], help=f"{', '.join(STRATEGIES)}; or 'all'")
    parser.add_argument("--batch-size", type=int, default=DEFAULT_GLOBAL_BATCH_SIZE, help="as of lab compare")
    parser.add_argument("--scaling", choices=["strong", "weak"], default="strong", help="as of lab compare")
    parser.add_argument("--bucket-mb", type=float, help="as of the parts; so are the next three")
    parser.add_argument("--topk-ratio", type=float)
    parser.add_argument("--powersgd-rank", type=int)
    parser.add_argument("--averaging-period", type=int)
    parser.add_argument("--calibration", type=Path, help="a file of lab calibrate (default: this machine's, else the one that "
                        "comes with the project)")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="also draw step time and efficiency from one node to "
                        "100,000; .svg and .pdf will do, too")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "doctor", run=_doctor,
                         help="before a run: versions, cores, dataset, disk, network, and with --master-ip --num-nodes --rank "
                              "on every node at once, each pair of nodes; status 1 where something would fail")
    parser.add_argument("-M", "--master-ip", help="address of rank 0's node")
    parser.add_argument("--master-port", type=int, default=DEFAULT_MASTER_PORT, help="port there")
    parser.add_argument("-N", "--num-nodes", "--world-size", type=int, help="number of nodes, which meet and try every pair")
    parser.add_argument("-R", "--rank", type=int, help="this node's place")
    parser.add_argument("--dataset", default="cifar10", choices=list(DATASETS), help="what is to be trained on")
    parser.add_argument("--data-dir", type=Path, default=REPOSITORY / "data", help="where it lies")
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "reports", help="where the runs write")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the other nodes")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_explain(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "explain", run=_explain,
                         help="after a failure: the known errors in the output of one or several ranks, the likely cause first, "
                              "with what to do")
    parser.add_argument("logs", nargs="+", metavar="LOG", help="outputs of ranks, read as one; - is standard input")


def strategies(names: Sequence[str]) -> tuple[str, ...]:
    """Return the strategies that ``--sync`` names, each once, in the dict's order; 'all' and 'exact' stand for several."""
    chosen = set(names) - {"all", "exact"}
    if "all" in names or "exact" in names:
        chosen |= {name for name in STRATEGIES if "all" in names or is_exact(name)}
    unknown = sorted(chosen - set(STRATEGIES))
    return (*(name for name in STRATEGIES if name in chosen), *unknown)


def _compare(args: argparse.Namespace) -> int:
    from lab.cells import Settings
    from lab.commands import compare_and_report, plan_runs

    seeds = tuple(range(args.seed, args.seed + args.seeds)) if args.until_accuracy is not None else (args.seed,)
    settings = Settings(
        nodes=tuple(args.nodes), sync=strategies(args.sync), steps=args.steps, warmup=args.warmup, repeats=args.repeats,
        dataset=args.dataset, model=args.model, batch_size=args.batch_size, scaling=args.scaling, seeds=seeds,
        until_accuracy=args.until_accuracy, epochs=args.epochs, flags=tuple(args.flags), rates=tuple(args.rate),
        compute=args.compute)
    if args.plan:
        return plan_runs(settings, reports=args.output_dir, anew=args.new, predicts=not args.no_predict, command=args.typed)
    return compare_and_report(settings, reports=args.output_dir, anew=args.new, predicts=not args.no_predict,
                              command=args.typed)


def _report(args: argparse.Namespace) -> int:
    from lab.commands import report_on

    return report_on(args.runs, reports=args.output_dir, scaling=args.scaling)


def _calibrate(args: argparse.Namespace) -> int:
    from lab.commands import calibrate_machine

    return calibrate_machine(args)


def _predict(args: argparse.Namespace) -> int:
    from lab.predict import main_predict

    return main_predict(args)


def _doctor(args: argparse.Namespace) -> int:
    from lab.doctor.command import main_doctor

    return main_doctor(args)


def _explain(args: argparse.Namespace) -> int:
    from lab.explain import main_explain

    return main_explain(args)


if __name__ == "__main__":
    sys.exit(main())
