"""``--distributed`` ends with the ranks' own message and status, not with torchrun's report."""

import re
from pathlib import Path

from tests.helpers import run_part


def test_a_failure_ends_with_the_message_of_the_ranks(tmp_path: Path) -> None:
    (ended,) = run_part(
        "PartTwo",
        *("--distributed", "--world-size", 2, "--dataset", "digits", "--batch-size", 1),
        *("--output-dir", tmp_path),
        cwd=tmp_path,
        cold=True,
    )
    assert ended.status == 1, ended
    *told, last = ended.err.strip().splitlines()
    # torchrun may end the second rank before it prints
    assert told, ended.err
    assert all("--batch-size: got 1 for 2 ranks" in line for line in told), ended.err
    assert re.fullmatch(r"rank [01] ended first, with status 1; its message is above", last)
