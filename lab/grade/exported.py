"""What an export of Gradescope says of its submissions: who handed in each, and when.

Gradescope writes ``submission_metadata.yml`` beside the folders ``submission_123456``.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from common.errors import UserError, file_errors
from common.utils.atomic_files import read_regular
from common.utils.typed_json import convert
from lab.grade.submissions import EXPORT

_MOST_BYTES = 2**26  # it holds the results of all tests


class Submitter(msgspec.Struct, rename=lambda field: f":{field}"):
    """One of those who handed in; Gradescope leaves empty what it does not know."""

    email: str | None = None
    sid: str | int | None = None
    name: str | None = None

    @property
    def called(self) -> list[str]:
        """What tells this student from others, the surest first."""
        return [str(text) for text in (self.email, self.sid, self.name) if text]


class Exported(msgspec.Struct, rename=lambda field: f":{field}"):
    """A submission of the export."""

    submitters: list[Submitter] = []
    created_at: datetime | None = None


def read_export(submissions: Mapping[str, Sequence[Path]]) -> dict[str, Exported]:
    """Return what the exports say in which these submissions lie, by the submissions' names.

    Raises UserError for a file that Gradescope has not written so.
    """
    files: dict[Path, dict[str, Exported]] = {}
    known: dict[str, Exported] = {}
    for name, paths in submissions.items():
        path = paths[0].absolute()
        file = path.parent / EXPORT
        if file not in files:
            files[file] = _read(file) if file.is_file() else {}
        if path.name in files[file]:
            known[name] = files[file][path.name]
    return known


def _read(path: Path) -> dict[str, Exported]:
    with file_errors(f"{path} cannot be read"):
        text = read_regular(path, most_bytes=_MOST_BYTES)
    try:
        content = msgspec.yaml.decode(text)
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is cut off, or not as Gradescope writes it: {error}") from error
    return convert(content, dict[str, Exported], name=str(path))
