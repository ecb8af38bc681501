"""The folders of code, recipes and data, in a checkout or an installed package, and of reports."""

from contextlib import suppress
from datetime import datetime
from pathlib import Path

from common.errors import UserError, file_errors

REPOSITORY = Path(__file__).resolve().parents[2]
"""The checkout; if the package is installed, the folder that holds it."""
IN_CHECKOUT = (REPOSITORY / "PartOne" / "main.py").is_file()
RECIPES = REPOSITORY / ("recipes" if IN_CHECKOUT else "common/recipes")
BASE = REPOSITORY if IN_CHECKOUT else Path.cwd()
DATA = BASE / "data"
REPORTS = Path("reports")
"""Where every command writes and looks: in the current folder, also if the package is elsewhere."""


def part_command(part: str) -> list[str]:
    """Return what follows ``python`` to start a part: its file, or without a checkout a module.

    -P keeps out modules of the current folder.
    """
    if IN_CHECKOUT:
        return [str(REPOSITORY / part / "main.py")]
    return ["-P", "-m", "common.cli", part]


def new_folder(parent: Path, kind: str = "") -> Path:
    """Make a new folder ``<kind>-<time>/`` in ``parent``; UserError if it cannot be made."""
    name = f"{kind}-{datetime.now():%Y-%m-%dT%H-%M-%S}".removeprefix("-")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        folder = parent / (name + suffix)
        with (
            suppress(FileExistsError),
            file_errors(
                f"{folder} cannot be made", ": give another --output-dir", passing=FileExistsError
            ),
        ):
            folder.mkdir(parents=True)
            return folder
    raise UserError(f"1000 folders within one second in {parent}: wait a moment")
