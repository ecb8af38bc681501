"""README.md of this folder lists every test in this folder, and only tests that exist."""

import re
from pathlib import Path

from tests.helpers import ROOT

PAGE = Path(__file__).parent / "README.md"


def functions_in(path):
    """Return the file's test functions as pytest names them, relative to the tests folder."""
    return {
        f"{path.relative_to(ROOT / 'tests')}::{name}"
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }


def test_the_table_and_the_tests_are_the_same():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "::" in line]
    named = {name for row in rows for name in re.findall(r"`([\w/]+\.py::test_\w+)`", row)}
    here = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        if path != Path(__file__)
        for name in functions_in(path)
    }
    assert here - named == set(), "not in the table"
    known = here | {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in functions_in(path)
    }
    assert named - known == set(), "not among the tests"
    assert all(len(row.split("|")) == 6 for row in rows), "fault, expected, observed, test"
