"""The flags of ``lab audit``."""

import argparse
import os
import shutil
from pathlib import Path

from common.errors import UserError
from common.utils.system import usable_cores
from lab.audit.command import AuditCommand
from lab.flags import add_command

# Optimiser steps to watch; with --clocks, as many as the assignment's report of times needs.
STEPS, CLOCK_STEPS = 6, 40
_RANKS_PER_CORE = 4


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``audit`` to the commands of ``lab``."""
    parser = add_command(
        commands,
        "audit",
        run="lab.audit.audit:main_audit",
        passes_flags=True,
        help="check that a training script is the data-parallel training that it claims to be; "
        "runs the command after -- on a few ranks of this machine and watches it from within. In "
        "the command, {rank} is replaced by the rank, {nodes} by the number of ranks, {master} and "
        "{port} by rank 0's address and a free port. Exit status: 0 right, 1 faults found, 2 could "
        "not be audited, or cannot tell",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2, 3],
        metavar="N",
        help="numbers of ranks to try; 2 alone hides a literal divisor of 2",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="optimiser steps to watch (default: 6, with --clocks 40); two more follow if another "
        "epoch begins, to see its order",
    )
    parser.add_argument(
        "--clocks",
        action="store_true",
        help="also check how the script measures its time (watches more steps, see --steps)",
    )
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="check that all ranks together train on N samples a step",
    )
    parser.add_argument("--rank0", metavar="COMMAND", help="rank 0's command, if it differs")
    parser.add_argument(
        "--rate", help="run each rank on an emulated node with a link of this rate, e.g. 1gbit"
    )
    parser.add_argument(
        "--isolate",
        nargs="*",
        metavar="NAME",
        help="run the ranks in a private network with the interface (eth1 by default), addresses "
        "or host names that the script needs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the result as an HTML page"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the audit's records and the script's output",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end each run after this time (default: 300; less if the ranks stand still, or do "
        "nothing for 60 s after the first steps)",
    )


def check_flags(args: argparse.Namespace, command: AuditCommand) -> None:
    """Raise UserError for flags that cannot work, before anything runs. Sorts ``args.ranks``."""
    args.ranks = sorted(set(args.ranks))
    most, keep = _RANKS_PER_CORE * usable_cores(), args.keep
    problems = [
        (
            args.ranks[0] < 2,
            f"--ranks: got {args.ranks[0]}; one rank exchanges nothing: give 2 or more",
        ),
        (
            args.ranks[-1] > most,
            f"--ranks: got {args.ranks[-1]}; this machine has {usable_cores()} cores: give at most "
            f"{most}",
        ),
        *(
            (value is not None and not value > 0, f"{flag}: got {value}; give more than 0")
            for flag, value in (
                ("--steps", args.steps),
                ("--global-batch", args.global_batch),
                ("--timeout", args.timeout),
            )
        ),
        (
            shutil.which(command.words[0]) is None,
            f"{command.words[0]} cannot be started: there is no such program. Give the command as "
            "in a shell, for example python main.py; use `sh -c '...'` for a shell's own syntax",
        ),
        (
            args.rate is not None and args.isolate is not None,
            "--rate and --isolate exclude each other: give one of them",
        ),
        (
            args.rate is not None and not command.one_process_a_rank,
            "--rate starts one process on each emulated node: give {rank} in the command, for "
            "example torchrun --nnodes {nodes} --node-rank {rank} --master-addr {master} "
            "--master-port {port} train.py",
        ),
        *(
            (
                path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)),
                f"{flag}: {path} cannot be written: give a file in an existing folder",
            )
            for flag, path in (("--json", args.json), ("--html", args.html))
        ),
        (
            keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())),
            f"--keep: {keep} is not an empty folder: give a new one",
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise UserError(message)
