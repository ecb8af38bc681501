"""The flags of ``lab audit``."""

import argparse
import os
from pathlib import Path

from common.errors import UserError
from common.utils.system import usable_cores
from lab.audit.command import AuditCommand
from lab.flags import add_command

STEPS, CLOCK_STEPS = 6, 40
"""Optimiser steps to watch; with --clocks, as many as the assignment's report of times needs."""
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
    parser.add_argument(
        "--replay",
        action="store_true",
        help="also compute the first steps again in one process and compare the weights",
    )
    parser.add_argument("--rank0", metavar="COMMAND", help="rank 0's command, if it differs")
    _add_network(parser)
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
        default=300.0,
        metavar="SECONDS",
        help="end each run after this time",
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
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


def check_flags(args: argparse.Namespace, command: AuditCommand) -> None:
    """Raise UserError for flags that cannot work, before anything runs. Sorts ``args.ranks``."""
    cores = usable_cores()
    for size in args.ranks:
        if size < 2:
            raise UserError(f"--ranks: got {size}; one rank exchanges nothing: give 2 or more")
        if size > _RANKS_PER_CORE * cores:
            raise UserError(
                f"--ranks: got {size}; this machine has {cores} cores: give at most "
                f"{_RANKS_PER_CORE * cores}"
            )
    args.ranks = sorted(set(args.ranks))
    for flag in ("steps", "global_batch", "timeout"):
        if (value := getattr(args, flag)) is not None and not value > 0:
            raise UserError(f"--{flag.replace('_', '-')}: got {value:g}; give more than 0")
    _check_network(args, command)
    _check_paths(args)


def _check_network(args: argparse.Namespace, command: AuditCommand) -> None:
    if args.rate is not None and args.isolate is not None:
        raise UserError("--rate and --isolate exclude each other: give one of them")
    if args.rate is not None and not command.one_process_a_rank:
        raise UserError(
            "--rate starts one process on each emulated node: give {rank} in the command, for "
            "example torchrun --nnodes {nodes} --node-rank {rank} --master-addr {master} "
            "--master-port {port} train.py"
        )


def _check_paths(args: argparse.Namespace) -> None:
    for flag, path in (("--json", args.json), ("--html", args.html)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise UserError(f"{flag}: {path} cannot be written: give a file in an existing folder")
    keep = args.keep
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UserError(f"--keep: {keep} is not an empty folder: give a new one")
