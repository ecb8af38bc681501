"""Tables of measured steps: CSV files of a reader, and published.csv. Imports no torch.

``read_rows`` reads a file. A ``StepRow`` returns its values, each checked.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, file_errors
from common.say import count, listed
from common.sync import STRATEGIES
from common.utils.atomic_files import read_regular
from common.utils.registry import choices_text

_MOST_BYTES = 10_000_000
_LARGEST = 1_000_000_000  # of any number


@dataclass(frozen=True)
class StepRow:
    """The texts of a row by column, and where it stands.

    Each method raises UserError if the value cannot be.
    """

    columns: Mapping[str, str]
    where: str

    def text(self, name: str) -> str:
        """Return the text of a column; "" if the file lacks the column."""
        text = self.columns.get(name, "")
        if not text.isprintable():
            raise UserError(f"{self.where}: {name}: got {text!r}, give a text that can be printed")
        return text

    def number(self, name: str) -> float:
        """Return the positive number of a column."""
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < _LARGEST:
            raise UserError(
                f"{self.where}: {name}: got {text!r}, give a number above 0 and below {_LARGEST:,}"
            )
        return value

    def whole(self, name: str, *, most: int = _LARGEST) -> int:
        """Return the whole number of a column."""
        value = self.number(name)
        if value != int(value) or value > most:
            raise UserError(
                f"{self.where}: {name}: got {value:g}, give a whole number, at most {most:,}"
            )
        return int(value)

    def strategy(self) -> str:
        """Return the column "strategy", the name of one."""
        name = self.text("strategy")
        if name not in STRATEGIES:
            raise UserError(
                f"{self.where}: strategy: got {name!r}, {choices_text(name, STRATEGIES)}"
            )
        return name


def read_rows(path: Path, needed: Sequence[str]) -> list[StepRow]:
    """Return the rows of a table with these columns. Lines that begin with # do not count.

    Raises UserError if the file is no such table.
    """
    with file_errors(f"{path} cannot be read", ": give a table of measured steps (.csv)"):
        text = read_regular(path, most_bytes=_MOST_BYTES).decode("utf-8-sig")
    lines = [line for line in io.StringIO(text, newline=None) if not line.startswith("#")]
    reader = csv.DictReader(lines, restval="", skipinitialspace=True)
    rows = []
    try:
        _check_header(path, reader.fieldnames or (), needed)
        for number, values in enumerate(reader, 1):
            rows.append(_row({**values}, f"{path}, row {number}"))
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file ({error})") from error
    rows = [row for row in rows if any(row.columns.values())]  # a spreadsheet leaves empty lines
    if not rows:
        raise UserError(f"{path} has no rows: give one measured step or more")
    return rows


def _check_header(path: Path, header: Sequence[str], needed: Sequence[str]) -> None:
    if not any(header):
        raise UserError(f"{path} is empty: give a table of measured steps")
    missing = [name for name in needed if name not in header]
    if not missing:
        return
    advice = f"give a table with the columns {', '.join(needed)}"
    if len(missing) == len(needed):
        for separator in (";", "\t"):
            if separator in "".join(header):
                advice = f"columns are separated by {separator!r}, save the file with commas"
    raise UserError(f"{path} has no column {listed(missing)}: {advice}")


def _row(values: Mapping[str | None, Any], where: str) -> StepRow:
    more = values.get(None)  # where csv puts the values that no column has
    if more is not None:
        columns = len(values) - 1
        raise UserError(
            f"{where} has {columns + len(more)} values for {count(columns, 'column')}: write "
            "decimals with a point, and a text with a comma in quotation marks"
        )
    return StepRow({name or "": text.strip() for name, text in values.items()}, where)
