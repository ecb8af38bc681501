"""Each faulty case gets its own finding, on each number of ranks; docs/audited_mistakes.md."""

import os
from dataclasses import replace

import pytest

from lab.audit.cases import Script, apply_edit
from tests.helpers.audited import mistakes, read_cases, record_case

CASES, OTHER_PYTHON = read_cases(), os.environ.get("AUDIT_PYTHON")
IN_OTHER_TORCH = """
    bypassed_spawn clip_norm_torch clock_wrong_divisor collectives_missing_on_rank_1
    ddp_bypassed_module literal_4_own_optimizer notice_batchnorm right_accumulation right_ddp_bf16
    right_ddp_comm_hook right_ddp_lbfgs right_ddp_zero_redundancy right_foreach_adam_groups
    right_gather_scatter right_own_optimizer right_workers samples_no_sampler_ddp
    some_ddp_frozen_then_thawed sum_all_reduce weights_averaged_each_step
"""
"""Cases for an environment with another torch: they reach each part of the probe."""


def parameters(cases):
    """Run a test once for each case."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@pytest.mark.slow
@parameters([one for one in CASES if one.finds])
def test_finds_exactly_what_is_wrong(case, tmp_path):
    """On one number of ranks; the right scripts are in test_right_scripts.py."""
    assert not mistakes(case, [record_case(case, case.quick_size, tmp_path)])


@pytest.mark.long
@parameters(CASES)
def test_finds_the_same_on_every_number_of_ranks(case, tmp_path):
    """On each number of ranks by itself, and in all runs together, as ``lab audit`` does."""
    recordings = [record_case(case, size, tmp_path / str(size)) for size in case.sizes]
    for recording in () if case.together else recordings:
        assert not mistakes(case, [recording]), f"on {recording.size} ranks"
    assert not mistakes(case, recordings)


@pytest.mark.long
@pytest.mark.skipif(
    OTHER_PYTHON is None,
    reason="set AUDIT_PYTHON to the path of an interpreter with another torch, 2.0 or newer",
)
@parameters([{one.name: one for one in CASES}[name] for name in IN_OTHER_TORCH.split()])
def test_finds_the_same_with_another_torch(case, tmp_path):
    """``lab`` runs here; the script runs in the other interpreter, on 2 ranks."""
    command = f"{OTHER_PYTHON} {case.command.partition(' ')[2]}"
    assert not mistakes(case, [record_case(replace(case, command=command), 2, tmp_path)])


@pytest.mark.parametrize(
    ("edit", "times"),
    [
        ("-c", 0),  # no such line
        ("-a", 2),  # twice
        ("-b\n+a\n...\n-a", 2),  # also in the base of the edit's other place
        ("+c", 4),  # nowhere
        (" a\n a", 0),
    ],
)
def test_the_old_lines_of_an_edit_stand_exactly_once_in_its_base(edit, times):
    case = Script("edited", body="a\nb\na\n", edit=edit)
    with pytest.raises(ValueError, match=f"edited: {times} times, not once, in its base"):
        apply_edit(case)
