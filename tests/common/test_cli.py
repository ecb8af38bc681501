"""What the command line says about errors."""

import shlex

import pytest

from common.cli import _explain, main
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


def test_the_commands_that_start_ranks_can_be_copied_from_a_folder_with_a_blank(capsys):
    path = "/my lab/PartTwo/main.py"
    choices = ("gather_scatter",)
    assert main("PartTwo", path=path, description="", sync_choices=choices, arguments=[]) == 2
    commands = [shlex.split(line) for line in capsys.readouterr().err.splitlines() if path in line]
    assert [words[:2] for words in commands] == [["python", path]] * 3 + [
        ["torchrun", "--nproc-per-node"]
    ]
    assert commands[-1][-1] == path
