"""The flags of ``lab audit``."""

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from common.utils.system import usable_cores
from lab.audit.command import AuditCommand, with_python
from lab.flags import add_command

_RANKS_PER_CORE = 4
_TEXT_FLAGS = ("--rank0", "--like", "--json", "--html", "--keep")
_PROGRAM = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|mpirun|srun|env|bash|sh)")


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
    _add_flags_of_the_run(parser)
    _add_flags_of_the_output(parser)
    parser.add_argument(
        "--like",
        metavar="RIGHT",
        help="also list what the script does differently from a right one: that script, which runs "
        "like the audited one; in quotes, with arguments of its own or as a whole command; or the "
        "folder in which --keep left its records",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end each run after this time (default: 300; less if the ranks stand still, or do "
        "nothing for 60 s after the first steps)",
    )


def _add_flags_of_the_run(parser: argparse.ArgumentParser) -> None:
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
        help="end the script after so many optimiser steps (default: it runs to its end, with "
        "short epochs where it is slow, and is ended if it still trains after 24 s, or with "
        "--clocks after 96 s)",
    )
    parser.add_argument(
        "--clocks",
        action="store_true",
        help="also check how the script measures its time (and watch more of a slow one)",
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


def _add_flags_of_the_output(parser: argparse.ArgumentParser) -> None:
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


def require_dashes(given: Sequence[str]) -> None:
    """Raise UserError if a command follows lab audit without --, and say what to type.

    given : the words after ``lab audit``.
    """
    if "--" in given:
        return
    for place, word in enumerate(given):
        is_value = place > 0 and given[place - 1] in _TEXT_FLAGS
        if not is_value and (word.endswith(".py") or _PROGRAM.fullmatch(word)):
            typed = _whole_command(given[:place], given[place:])
            raise UserError(f"the script's command goes after --. Type: {typed}")


def _whole_command(flags: Sequence[str], words: Sequence[str]) -> str:
    """Return the command line to type, with what is missing in it as a sentence."""
    command = AuditCommand(tuple(with_python(words)))
    typed = " ".join(["lab audit", *map(shlex.quote, flags), "--", command.text])
    if command.tells_rank:
        return typed
    return (
        f"{typed}. Add the script's flags, with {{rank}}, {{nodes}}, {{master}} and {{port}} for "
        "the values, or write torchrun in place of python"
    )


def check_flags(args: argparse.Namespace, command: AuditCommand) -> None:
    """Raise UserError for flags that cannot work, before anything runs. Sorts ``args.ranks``."""
    _check_ranks(args)
    for flag, value in (
        ("--steps", args.steps),
        ("--global-batch", args.global_batch),
        ("--timeout", args.timeout),
    ):
        if value is not None and not value > 0:  # as NaN is not
            raise UserError(f"{flag}: got {value}; give more than 0")
    _check_program(command.words)
    if args.rate is not None and args.isolate is not None:
        raise UserError("--rate and --isolate exclude each other: give one of them")
    if args.rate is not None and not command.one_process_a_rank:
        raise UserError(
            "--rate starts one process on each emulated node: give {rank} in the command, for "
            "example torchrun --nnodes {nodes} --node-rank {rank} --master-addr {master} "
            "--master-port {port} train.py"
        )
    _check_output(args)


def _check_program(words: Sequence[str]) -> None:
    program = words[0]
    if shutil.which(program) is not None:
        return
    if program.endswith(".py"):
        raise UserError(f"{program} is no program. Type: {_whole_command([], words)}")
    beside = Path(sys.executable).with_name(program)
    if beside.is_file():
        raise UserError(f"{program} is not on the PATH: activate its environment, or give {beside}")
    raise UserError(
        f"{program} cannot be started: there is no such program. Give the command as in a shell, "
        "for example python main.py; use `sh -c '...'` for a shell's own syntax"
    )


def _check_ranks(args: argparse.Namespace) -> None:
    args.ranks = sorted(set(args.ranks))
    fewest = args.ranks[0]
    if fewest < 2:
        raise UserError(f"--ranks: got {fewest}; one rank exchanges nothing: give 2 or more")
    cores = usable_cores()
    most = args.ranks[-1]
    if most > _RANKS_PER_CORE * cores:
        raise UserError(
            f"--ranks: got {most}; this machine has {cores} cores: give at most "
            f"{_RANKS_PER_CORE * cores}"
        )


def _check_output(args: argparse.Namespace) -> None:
    for flag, path in (("--json", args.json), ("--html", args.html)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise UserError(f"{flag}: {path} cannot be written: give a file in an existing folder")
    keep = args.keep
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UserError(f"--keep: {keep} is not an empty folder: give a new one")
