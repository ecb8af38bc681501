"""The flags of ``lab run-cell``. Nothing else is imported before it is called."""

import argparse
from pathlib import Path

from common.config import DEFAULT_MASTER_PORT
from lab.flags import add_command


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``run-cell`` to the subcommands of ``lab``."""
    about = ("one run of lab compare --plan, started on each of its nodes by a scheduler or by hand; lab report puts them "
             "together")
    parser = add_command(commands, "run-cell", run=_run, help=about)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the plan, on a file system that all nodes share")
    parser.add_argument("--run", dest="number", type=int, required=True, help="its number, from 0")
    parser.add_argument("-M", "--master-ip", help="address of rank 0's node")
    parser.add_argument("--master-port", type=int, default=DEFAULT_MASTER_PORT, help="port there")
    parser.add_argument("-N", "--num-nodes", type=int, default=1, help="number of nodes that there are; where the run has fewer, "
                        "the last ones have nothing to do")
    parser.add_argument("-R", "--rank", type=int, default=0, help="this node's place")
    parser.add_argument("--print-nodes", action="store_true", help="run nothing, and print how many nodes the run has")


def _run(args: argparse.Namespace) -> int:
    from common.errors import UserError
    from common.place import Launch
    from lab.jobs.one_run import run_cell
    from lab.jobs.plan import planned_run

    if args.print_nodes:
        print(planned_run(args.folder, args.number)[0].nodes)
        return 0
    if not 0 <= args.rank < args.num_nodes:
        raise UserError(f"--rank: got {args.rank} of --num-nodes {args.num_nodes}; give 0 to {args.num_nodes - 1}")
    return run_cell(args.folder, args.number, Launch(args.rank, args.num_nodes, args.master_ip, args.master_port))
