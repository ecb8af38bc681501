"""Each right case gets no fault: a false alarm is worse than a miss."""

import pytest

from tests.helpers.audited import mistakes, read_cases, record_case

RIGHT = [one for one in read_cases() if not one.finds]


@pytest.mark.slow
@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.name)
def test_a_right_script_gets_no_fault(case, tmp_path):
    """On one number of ranks; on all, where the runs are compared."""
    sizes = case.sizes if case.together else (case.quick_size,)
    assert not mistakes(case, [record_case(case, size, tmp_path / str(size)) for size in sizes])
