"""What the command line says about errors."""

import pytest

from common.cli import _explain
from common.errors import GroupError, UserError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("no"), "out of memory: give a smaller --batch-size"),
        (RuntimeError("CUDA out of memory"), "out of memory: give a smaller --batch-size"),
        (GroupError("rank 2 stopped: out of memory"), "rank 2 stopped: out of memory"),
        (FileNotFoundError(2, "No such file", "a\nb"), "a b: No such file"),
        (UserError("x" * 10_000), "x" * 100 + "…" + "x" * 100),
        (FileNotFoundError("of no file"), None),
        (ValueError("of the program itself"), None),
    ],
)
def test_what_the_command_line_says_about_an_error(error, said):
    explained = _explain(error)
    assert (explained is None) == (said is None)
    assert said is None or (explained or "").startswith(said)
