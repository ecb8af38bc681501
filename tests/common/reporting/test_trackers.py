"""Dashboards: what a run logs to Weights & Biases (offline) and TensorBoard.

A run without either flag needs neither package.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.reporting.trackers import Trackers
from tests.helpers import (
    ROOT,
    TINY,
    Started,
    free_port,
    make_image_folder,
    only_run_folder,
    run_part,
    user_environment,
)

STEPS, EPOCH_ENDS = [1, 2, 3, 4, 5, 6], [3, 6]


@pytest.fixture(autouse=True)
def _no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test a home folder without a Weights & Biases account.

    matplotlib's files stay in the real home folder.
    """
    monkeypatch.setenv("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def wandb_records(path: Path) -> list[Any]:
    """Return the records of an offline run file.

    After a header of 7 bytes, the file uses LevelDB's log format: chunks in blocks of 32 KiB.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, part, records = path.read_bytes(), 7, b"", []
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        size, kind = (
            int.from_bytes(content[position + 4 : position + 6], "little"),
            content[position + 6],
        )
        part += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            records.append(Record.FromString(part))
            part = b""
    return records


@pytest.mark.slow
def test_a_run_on_two_ranks_fills_both_dashboards_from_rank_0(tmp_path: Path) -> None:
    """Without an account, W&B writes offline to the run folder; each value has its step."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_image_folder(tmp_path / "images")
    ended = run_part(
        "PartThree",
        "--dataset",
        "folder",
        "--data-dir",
        "images",
        "--batch-size",
        8,
        "--epochs",
        2,
        "--validate",
        "--log-wandb",
        "--log-tensorboard",
        "--output-dir",
        "out",
        *TINY,
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
    wanted = {
        "train/loss": (STEPS, [step["loss"] for step in metrics]),
        "train/accuracy": (STEPS, [step["accuracy"] for step in metrics]),
        "train/learning_rate": (STEPS, [step["learning_rate"] for step in metrics]),
        "seconds/step": (STEPS, [step["step_seconds"] for step in metrics]),
        "seconds/backward": (STEPS, [step["backward_seconds"] for step in metrics]),
        "val/loss": (EPOCH_ENDS, [epoch["val_loss"] for epoch in epochs]),
        "val/accuracy": (EPOCH_ENDS, [epoch["val_accuracy"] for epoch in epochs]),
        "epoch/samples_per_second": (EPOCH_ENDS, [epoch["samples_per_second"] for epoch in epochs]),
    }
    for name, (steps, values) in wanted.items():
        scalars = board.Scalars(name)
        assert [scalar.step for scalar in scalars] == steps, name
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=1e-5), name
    assert "val/ema_accuracy" not in board.Tags()["scalars"], "there is no average of the weights"

    [offline] = tmp_path.rglob("offline-run-*")
    assert offline.parent == folder / "wandb"
    [file] = offline.glob("run-*.wandb")
    records = wandb_records(file)
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert run.project == "data-parallel-lab"
    assert run.display_name == f"PartThree-ddp/{folder.name}"
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (settings["epochs"], settings["model"], settings["batch_size"]) == (2, "tiny", 8)
    assert [record.WhichOneof("record_type") for record in records].count("exit") == 1, (
        "closed at the end"
    )
    history = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    for name, (steps, values) in wanted.items():
        assert [entry["_step"] for entry in history if name in entry] == steps, name
        assert [entry[name] for entry in history if name in entry] == pytest.approx(
            values, rel=1e-5
        ), name


WITHOUT = f"""
import runpy, sys
sys.modules["wandb"] = None  # what an import finds where it is not installed
sys.argv[0] = {str(ROOT / "PartThree" / "main.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    """The first part logs step 3, which no checkpoint holds, and is killed before it closes."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def board(first_step: int) -> Trackers:
        return Trackers(
            wandb=False,
            tensorboard=True,
            folder=tmp_path,
            name="run",
            settings={},
            first_step=first_step,
        )

    def shown() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")]

    first = board(1)
    for step in (1, 2, 3):
        first.log({"train/loss": float(step)}, step=step)
        first.sync()  # before a checkpoint
    assert shown() == [(1, 1.0), (2, 2.0), (3, 3.0)], "on the disk, though the board is open"
    second = board(3)
    for step in (3, 4):
        second.log({"train/loss": 10.0 * step}, step=step)
    second.close()
    assert shown() == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    first.close()


def test_a_package_that_is_missing_ends_all_ranks_with_one_line(tmp_path: Path) -> None:
    """All ranks stop before training, although only rank 0 needs the package."""
    (tmp_path / "without.py").write_text(WITHOUT)
    make_image_folder(tmp_path / "images", train_per_class=4, test_per_class=2)
    command = [
        sys.executable,
        str(tmp_path / "without.py"),
        "--dataset",
        "folder",
        "--data-dir",
        "images",
        "--batch-size",
        "4",
        "--log-wandb",
        "--output-dir",
        "out",
        "--threads",
        "1",
        "-M",
        "127.0.0.1",
        "-N",
        "2",
        "--master-port",
        str(free_port()),
    ]
    ranks = [
        Started([*command, "-R", rank], cwd=tmp_path, env=user_environment(), forked=True)
        for rank in "01"
    ]
    ended = [one.end() for one in ranks]
    assert [one.status for one in ended] == [1, 1], ended
    for one in ended:
        assert (
            "--log-wandb needs the package wandb: pip install -e '.[wandb]', or leave the flag out"
            in one.err
        )
        assert "Traceback" not in one.err
    assert not (only_run_folder(tmp_path / "out", "PartThree-ddp") / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("package", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_missing_package_is_named_with_its_extra_and_needed_by_its_flag_only(
    package: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    wanted = {"wandb": False, "tensorboard": False} | {package: True}
    with pytest.raises(
        UserError,
        match=rf"--log-{package} needs the package {package}: pip install -e '\.\[{package}\]'",
    ):
        Trackers(**wanted, folder=tmp_path, name="x", settings={})
    without = Trackers(wandb=False, tensorboard=False, folder=tmp_path, name="x", settings={})
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
    environment: dict[str, str],
    netrc: str | None,
    mode: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an account or WANDB_MODE the run is offline: wandb would prompt for a key.

    With one of them, wandb's own rules apply (mode None).
    """
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (tmp_path / "home" / ".netrc").write_text(netrc)
        (tmp_path / "home" / ".netrc").chmod(0o600)
    asked: list[dict[str, Any]] = []
    stub = types.ModuleType("wandb")
    stub.init = lambda **options: asked.append(options)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    Trackers(wandb=True, tensorboard=False, folder=tmp_path, name="x", settings={"epochs": 3})
    [options] = asked
    assert options["mode"] == mode
    assert options["dir"] == str(tmp_path)
    assert options["config"] == {"epochs": 3}


def test_a_key_that_wandb_refuses_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is a UserError: it reaches all ranks at once, so none waits for rank 0."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "bad")
    with pytest.raises(UserError, match=r"--log-wandb.*WANDB_API_KEY") as error:
        Trackers(wandb=True, tensorboard=False, folder=tmp_path, name="x", settings={})
    assert "WANDB_MODE=offline" in str(error.value)
    assert "\n" not in str(error.value)
