"""The ``lab`` command and its subcommands.

Each subcommand imports what it needs when it is called, so that ``lab --help`` and ``lab predict``
answer at once.
"""

import argparse
import gc
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from common.config.parser import FlagParser
from common.errors import INTERRUPTED, GroupError, UserError, explain
from common.utils.environment import read_settings
from common.utils.streams import standard_streams
from common.utils.typed_json import calm
from lab.audit.cli import add_flags as add_audit
from lab.audit.cli import require_dashes
from lab.calibrate.cli import add_flags as add_calibrate
from lab.cluster.cli import add_cluster
from lab.compare.cli import add_compare, add_report, add_run_cell
from lab.doctor.cli import add_flags as add_doctor
from lab.explain.cli import add_flags as add_explain
from lab.grade.cli import add_flags as add_grade
from lab.learn.cli import add_flags as add_learn
from lab.predict.cli import add_flags as add_predict
from lab.ssh.cli import add_collect, add_launch
from lab.whatif.cli import add_flags as add_whatif
from lab.whatif.cli import write_beside_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    0 done, 1 failed, 2 wrong input (or no command: the help is printed), 130 interrupted. Raises
    SystemExit after a help, and if the output cannot be written.
    """
    with standard_streams():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    flags = given[end + 1 :]
    gc.set_threshold(100_000, 50, 100)  # else collections take a fifth of importing torch
    try:
        if given[:1] == ["audit"]:
            require_dashes(given[1:])
        args = build_parser().parse_args(given[:end])
        args.flags = flags
        read_settings()
        args.typed = shlex.join(["lab", *given])
        if flags and not args.passes_flags:
            raise UserError(
                f"-- {' '.join(flags)}: this command takes nothing after --. lab audit, lab "
                "compare, lab launch, lab cluster run and lab cluster shell do"
            )
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if (explained := explain(error)) is None:
            raise
        print(calm(f"error: {explained}"), file=sys.stderr)  # it may quote another host
        return 1 if isinstance(error, GroupError) else 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands and their flags."""
    parser = FlagParser(
        prog="lab",
        description="Learn data-parallel training, audit and mark training scripts, compare "
        "strategies, report on runs, measure this machine, predict step times in tables and on a "
        "page, emulate clusters, and find out why a run failed. lab COMMAND --help shows the flags "
        "of a command.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(
        required=True, title="commands", metavar="COMMAND", parser_class=FlagParser
    )
    for add in (
        add_learn,
        add_audit,
        add_grade,
        partial(add_compare, companion=write_beside_report),
        partial(add_report, companion=write_beside_report),
        add_calibrate,
        add_predict,
        add_whatif,
        add_cluster,
        add_launch,
        add_collect,
        add_run_cell,
        add_doctor,
        add_explain,
    ):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
