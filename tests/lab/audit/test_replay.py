"""``lab audit --replay``: the first steps computed again in one process."""

from pathlib import Path
from typing import Any

import pytest

from lab.audit.audit import replay_of
from lab.audit.recording import read_recording
from lab.audit.runner import RunSettings, run_audit_size
from tests.helpers.audited import FOLDER, read_case, start_forked


def replayed(name: str, folder: Path) -> dict[str, Any]:
    """Return the record of the replay of a case on two ranks."""
    records, cwd = folder / "records", folder / "cwd"
    records.mkdir()
    cwd.mkdir()
    settings = RunSettings(replay=True, limit_seconds=60, cwd=cwd)
    run_audit_size(
        read_case(FOLDER / f"{name}.py").command, 2, records, settings, start=start_forked
    )
    found = replay_of([read_recording(records, asked_size=2)])
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["right_ddp", "right_clip_norm_after"])
def test_a_right_script_gives_the_same_weights_again(name: str, tmp_path: Path) -> None:
    found = replayed(name, tmp_path)
    assert found["why_not"] is None
    assert [step for step, _, _ in found["steps"]] == [0, 1, 2, 3]
    assert all(difference < 1e-5 for _, difference, _ in found["steps"])


@pytest.mark.slow
def test_a_wrong_script_does_not(tmp_path: Path) -> None:
    found = replayed("sum_all_reduce", tmp_path)
    assert found["steps"][0][1] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [("right_gan", "several optimisers"), ("right_ddp_zero_redundancy", "cannot be built again")],
)
def test_says_why_a_script_cannot_be_computed_again(name: str, why: str, tmp_path: Path) -> None:
    found = replayed(name, tmp_path)
    assert found["steps"] == []
    assert why in found["why_not"]
