"""Each faulty script of tests/audit_cases/ gets its own finding, on each number of ranks."""

from pathlib import Path

import pytest

from tests.helpers.audited import Case, mistakes, read_cases, record_case

CASES = read_cases()


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in CASES if one.finds], ids=lambda case: case.name)
def test_finds_exactly_what_is_wrong(case: Case, tmp_path: Path) -> None:
    """On one number of ranks; the right scripts are in test_right_scripts.py."""
    assert not mistakes(case, [record_case(case, case.quick_size, tmp_path)])


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_finds_the_same_on_every_number_of_ranks(case: Case, tmp_path: Path) -> None:
    """On each number of ranks by itself, and in all runs together, as ``lab audit`` does."""
    recordings = [record_case(case, size, tmp_path / str(size)) for size in case.sizes]
    for recording in () if case.together else recordings:
        assert not mistakes(case, [recording]), f"on {recording.size} ranks"
    assert not mistakes(case, recordings)
