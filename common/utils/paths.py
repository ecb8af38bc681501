"""Where the project lies, and new folders for what it writes."""

from datetime import datetime
from pathlib import Path

from common.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]


def new_folder(reports: Path, kind: str) -> Path:
    """Make ``<kind>-<time>/`` in ``reports``, one of its own for each call; UserError where it cannot be made."""
    name = f"{kind}-{datetime.now():%Y-%m-%dT%H-%M-%S}"
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        folder = reports / (name + suffix)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"{folder} cannot be made ({error.strerror}): give another --output-dir"
            ) from error
    raise UserError(f"1000 folders within one second in {reports}: wait a moment")
