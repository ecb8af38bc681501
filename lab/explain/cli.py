"""The flags of ``lab explain``."""

import argparse

from lab.flags import add_command


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab explain``."""
    parser = add_command(
        commands,
        "explain",
        run="lab.explain.output:main_explain",
        help="find known errors in the output of a failed run; the likely cause comes first, with "
        "what to do",
    )
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="files with the output of the ranks, ideally of all, or folders; - is standard input",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
