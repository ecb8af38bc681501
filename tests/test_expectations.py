"""Compare what users see with the files in tests/expectations.

After an intended change, run ``make expectations`` and read the diff in git.
"""

import difflib
import json

import pytest

from common.checkpoint import load_checkpoint
from common.models import MODELS, build_model
from common.training import prepare_model_for_training
from tests.helpers import run_part
from tests.helpers.expectations import CHECKPOINT, FOLDER, KINDS, RESUMABLE, VERSION


@pytest.mark.parametrize("name", KINDS)
def test_what_users_see_is_as_recorded(name):
    expected = (FOLDER / name).read_text()
    if expected.startswith("Python ") and not expected.startswith(VERSION):
        pytest.skip(
            f"recorded with {expected.splitlines()[0]}, and this is {VERSION.strip()}: argparse "
            "words help otherwise"
        )
    now = KINDS[name]()
    difference = difflib.unified_diff(expected.split("\n"), now.split("\n"), "recorded", "now", n=1)
    assert now == expected, "If it is meant: make expectations\n" + "\n".join(difference)


def test_every_file_of_expectations_is_compared():
    assert {path.name for path in FOLDER.iterdir()} == {*KINDS, CHECKPOINT.name}


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path, monkeypatch):
    """The assignment's function loads and verifies an old checkpoint, and a run resumes from it."""
    entries = load_checkpoint(CHECKPOINT)
    assert (entries["epoch"], entries["step"]) == (1, 3)
    monkeypatch.setitem(MODELS, "tiny", "tests.helpers.tiny_model:tiny")
    model, _, optimizer = prepare_model_for_training(
        build_model("tiny", 10), "cpu", 0.1, 0.9, 0.0, True, str(CHECKPOINT)
    )
    for name, tensor in model.state_dict().items():
        assert tensor.equal(entries["model_state_dict"][name]), name
    assert optimizer.state
    assert all(state["momentum_buffer"].norm() > 0 for state in optimizer.state.values())

    [ended] = run_part(
        "PartOne", *RESUMABLE, "--resume", CHECKPOINT, "--output-dir", tmp_path, cwd=tmp_path
    )
    assert ended.status == 0, ended.err
    run = tmp_path / "PartOne-none" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["resumed_from"] == str(CHECKPOINT)
    assert load_checkpoint(run / "checkpoints" / "Epoch_2.pt")["step"] == 6
