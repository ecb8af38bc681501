"""The flags of ``lab explain``."""

import argparse

from lab.flags import add_command


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab explain``."""
    parser = add_command(
        commands,
        "explain",
        run="lab.explain.output:main_explain",
        help="after a failure: the known errors in the output of one or several ranks, the likely "
        "cause first, with what to do",
    )
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="outputs of ranks, read as one; - is standard input"
    )
