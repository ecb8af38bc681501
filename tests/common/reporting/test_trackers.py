"""Dashboards: what a run logs to Weights & Biases (offline) and TensorBoard.

A run without either flag needs neither package.
"""

import json
import math
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from common.errors import UserError
from common.reporting.trackers import Trackers
from tests.helpers import TINY, make_image_folder, only_run_folder, run_part

STEPS, EPOCH_ENDS = [1, 2, 3, 4, 5, 6], [3, 6]


@pytest.fixture(autouse=True)
def _no_account(tmp_path, monkeypatch):
    """Give the test a home folder without a Weights & Biases account.

    matplotlib's files stay in the real home folder.
    """
    monkeypatch.setenv("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def trackers(folder, **asked):
    """Return the dashboards of a run in ``folder`` that are asked for."""
    options = {"wandb": False, "tensorboard": False, "settings": {"epochs": 3}} | asked
    return Trackers(folder=folder, name="run", **options)


@pytest.mark.slow
def test_a_run_on_two_ranks_fills_both_dashboards_from_rank_0(tmp_path):
    """Without an account, W&B writes offline to the run folder; each value has its step.

    Both dashboards get the same numbers from ``Trackers.log``.
    """
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_image_folder(tmp_path / "images")
    ended = run_part(
        "PartThree",
        *("--dataset", "folder", "--data-dir", "images", "--batch-size", 8, "--epochs", 2, *TINY),
        *("--validate", "--log-wandb", "--log-tensorboard", "--output-dir", "out"),
        ranks=2,
        cwd=tmp_path,
    )
    assert [one.status for one in ended] == [0, 0], ended
    assert ended[1].out.startswith("rank 1 of 2: finished after 6 steps ")
    assert "wandb" not in ended[1].err
    folder = only_run_folder(tmp_path / "out", "PartThree-ddp")
    metrics, epochs = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "epochs.jsonl")
    )
    assert len(metrics) == 6
    assert len(epochs) == 2

    [event_file] = tmp_path.rglob("events.out.tfevents.*")
    assert event_file.parent == folder / "tensorboard"
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    wanted = [(f"train/{name}", name, metrics) for name in ("loss", "accuracy", "learning_rate")]
    wanted += [(f"seconds/{name}", f"{name}_seconds", metrics) for name in ("step", "backward")]
    wanted += [(f"val/{name}", f"val_{name}", epochs) for name in ("loss", "accuracy")]
    wanted += [("epoch/samples_per_second", "samples_per_second", epochs)]
    for name, key, lines in wanted:
        scalars = board.Scalars(name)
        assert [scalar.step for scalar in scalars] == (STEPS if lines is metrics else EPOCH_ENDS)
        values = [scalar.value for scalar in scalars]
        assert values == pytest.approx([line[key] for line in lines], rel=1e-5), name
    assert "val/ema_accuracy" not in board.Tags()["scalars"], "there is no average of the weights"

    [offline] = tmp_path.rglob("offline-run-*")
    assert offline.parent == folder / "wandb"


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    """The first part logs step 3, which no checkpoint holds, and is killed before it closes."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def shown():
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")]

    first = trackers(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        first.log({"train/loss": float(step)}, step=step)
    assert shown() == [(1, 1.0), (2, 2.0), (3, 3.0)], "on the disk, though the board is open"
    second = trackers(tmp_path, tensorboard=True, first_step=3)
    for step in (3, 4):
        second.log({"train/loss": 10.0 * step}, step=step)
    second.close()
    assert shown() == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    first.close()


@pytest.mark.parametrize(
    ("package", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_missing_package_is_named_with_its_extra_and_needed_by_its_flag_only(
    package, module, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"--log-{package} .*pip install -e '\.\[{package}\]'"):
        trackers(tmp_path, **{package: True})
    without = trackers(tmp_path)
    without.log({"train/loss": 1.0}, step=1)
    without.close()
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [
        ({}, None, "offline"),
        ({}, "machine api.wandb.ai login user password key\n", None),
        ({}, "machine example.com login user password key\n", "offline"),
        ({}, "machine\nnonsense {\n", "offline"),
        ({"WANDB_API_KEY": "k" * 40}, None, None),
        ({"WANDB_MODE": "disabled"}, None, None),
    ],
)
def test_an_account_or_a_wish_decides_whether_wandb_goes_online(
    environment, netrc, mode, tmp_path, monkeypatch
):
    """Without an account or WANDB_MODE the run is offline: wandb would prompt for a key.

    With one of them, wandb's own rules apply (mode None).
    """
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (tmp_path / "home" / ".netrc").write_text(netrc)
        (tmp_path / "home" / ".netrc").chmod(0o600)
    stub = Mock()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    board = trackers(tmp_path, wandb=True)
    board.log({"train/loss": 1.5, "val/ema_loss": math.nan}, step=7)
    board.close()
    options = stub.init.call_args.kwargs
    assert stub.init.return_value.mock_calls == [
        call.log({"train/loss": 1.5}, step=7),
        call.finish(),
    ]
    wanted = {"project": "data-parallel-lab", "name": "run", "mode": mode, "dir": str(tmp_path)}
    assert (wanted | {"config": {"epochs": 3}}).items() <= options.items()
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    for experiment, project in ((None, "theirs"), ("mine", "mine")):
        trackers(tmp_path, wandb=True, wandb_project=experiment)
        assert stub.init.call_args.kwargs["project"] == project


def test_a_key_that_wandb_refuses_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    """The error is a UserError: it reaches all ranks at once, so none waits for rank 0."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "bad")
    with pytest.raises(UserError, match=r"--log-wandb.*WANDB_API_KEY.*=offline") as error:
        trackers(tmp_path, wandb=True)
    assert "\n" not in str(error.value)
