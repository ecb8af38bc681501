"""The flags and the handler of ``lab whatif``."""

import argparse
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.utils.paths import REPORTS
from lab.flags import add_command

if TYPE_CHECKING:  # slow to import, and --help imports this file
    from lab.comparison.record import Comparison

WHATIF_FLAGS: dict[str, dict[str, Any]] = {
    "--open": {"action": "store_true", "help": "also open the page in a browser"},
    "--out": {
        "type": Path,
        "default": REPORTS / "whatif.html",
        "metavar": "FILE",
        "help": "write the page to this file",
    },
    "--calibration": {
        "type": Path,
        "metavar": "FILE",
        "help": "a file written by lab calibrate (default: this machine's, or else the one that "
        "comes with the project)",
    },
    "--runs": {
        "type": Path,
        "nargs": "+",
        "default": [],
        "metavar": "REPORT",
        "help": "also show your measured steps: folders of comparisons or runs, results.json, or "
        "a table as for lab predict --fit",
    },
}


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab whatif``."""
    add_command(
        commands,
        "whatif",
        run=main_whatif,
        flags=WHATIF_FLAGS,
        help="write a page on which you change cluster and training, and see what a step would "
        "take; it is one file, needs no network, and shows predictions beside measurements",
    )


def main_whatif(args: argparse.Namespace) -> int:
    """Write the page, open it if asked to, and return the exit status.

    Raises UserError if a file cannot be read or written.
    """
    from lab.terminal import say
    from lab.whatif.own_steps import read_own
    from lab.whatif.page import write_page

    own = read_own(args.runs)
    size = write_page(args.out, calibration_file=args.calibration, own=own)
    say(f"{args.out}: {size / 1e3:,.0f} kB. Open it in a browser; it needs no other file")
    if args.open and not webbrowser.open(args.out.resolve().as_uri()):
        say("no browser was found here: copy the file to a machine that has one")
    return 0


def write_beside_report(folder: Path, comparison: "Comparison") -> str | None:
    """Write the page with a comparison's steps into its folder, and return the file's name.

    None, after a sentence, if it cannot be written: the report does without it.
    """
    from lab.terminal import say
    from lab.whatif.own_steps import steps_of_comparison
    from lab.whatif.page import write_page

    name = "whatif.html"
    try:
        own = steps_of_comparison(comparison, folder.resolve().name)
        write_page(folder / name, calibration_file=None, own=own)
    except UserError as error:
        say(f"{name} was not written: {error}")
        return None
    return name
