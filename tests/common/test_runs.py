"""A run's folder is read as a whole, and each file that cannot be read is named."""

import json
import os

import pytest

from common.errors import UserError
from common.runs import mean_seconds, read_config, read_epochs, read_run, read_steps, read_timeline

SECONDS = {
    **{"data": 0.1, "forward": 0.2, "backward": 0.4, "sync": 0.2, "update": 0.1, "step": 1.0},
    **{"wait": 0.05, "wire": 0.15},
}
CONFIG = {
    **{"sync": "ring", "world_size": 2, "batch_size": 64, "seed": 3, "model": "vgg11"},
    **{"learning_rate": 0.02, "compute": "real"},
}


def rank_row(rank, **changes):
    row = {"rank": rank, "host": "abc"[rank], "threads": 1, "seconds": SECONDS}
    return row | {"peak_memory_bytes": 1, "bytes_sent": None, "messages": None} | changes


def write_run(folder, **files):
    """Write what a run leaves; files : other contents, by the names without their endings."""
    contents = {
        "config": CONFIG,
        "environment": {"cpu": "c", "usable_cores": 2},
        "summary": {"step_seconds": 1.0, "test_accuracy": 0.5},
        "ranks": {"ranks": [rank_row(0), rank_row(1)]},
    }
    folder.mkdir()
    for name, content in (contents | files).items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    lines = [{"step": number, "loss": 1 / number} for number in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "epochs.jsonl").write_text('{"epoch": 1, "seconds": 2.5, "val_accuracy": 0.4}\n')
    return folder


def test_a_run_has_what_its_files_have(tmp_path):
    folder = write_run(tmp_path / "run")
    os.utime(folder / "config.json", (0, 86400))
    run = read_run(folder)
    assert (run.config.sync, run.config.world_size, run.config.seed) == ("ring", 2, 3)
    assert run.settings == CONFIG, "also what no reader computes with"
    assert run.started.timestamp() == 86400
    assert run.machine.usable_cores == 2
    assert run.environment["cpu"] == "c"
    assert (run.summary.step_seconds, run.summary.test_accuracy) == (1.0, 0.5)
    assert mean_seconds(run.ranks.ranks).sync == pytest.approx(0.2)
    assert [step.loss for step in read_steps(folder)] == [1.0, 0.5]
    assert [epoch.seconds for epoch in read_epochs(folder)] == [2.5]
    assert read_timeline(folder) is None


def test_an_older_run_is_read_without_what_it_lacks(tmp_path):
    folder = write_run(tmp_path / "run", environment=None, summary={})
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert run.environment == {}
    assert run.machine.usable_cores is None
    assert run.summary.step_seconds is None
    assert run.summary.ranks_hold_equal_weights
    assert run.ranks.claim is None
    assert run.ranks.ranks_of_nodes() == {"a": 1, "b": 1}, "by hosts, without numbers of nodes"


def test_ranks_of_one_node_are_counted_by_its_number(tmp_path):
    rows = [rank_row(rank, host="same", node=node) for rank, node in enumerate((0, 0, 1))]
    run = read_run(write_run(tmp_path / "run", ranks={"ranks": rows}))
    assert run.ranks.ranks_of_nodes() == {0: 2, 1: 1}


@pytest.mark.parametrize("name", ["config.json", "summary.json", "ranks.json"])
@pytest.mark.parametrize("content", [None, "", "[1]", '{"world_'])
def test_a_file_that_is_missing_or_broken_is_named(tmp_path, name, content):
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(UserError) as raised:
        read_run(folder)
    assert str(raised.value).startswith(str(folder / name))
    assert "has not finished, or its folder was not copied completely" in str(raised.value)


def test_a_run_that_has_not_finished_has_settings_and_steps(tmp_path):
    folder = write_run(tmp_path / "run", summary=None, ranks=None)
    config, settings = read_config(folder)
    assert (config.sync, settings["learning_rate"]) == ("ring", 0.02)
    assert [step.step for step in read_steps(folder)] == [1, 2]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config": CONFIG | {"odd": [[1]]}}, "config.json['odd']"),
        ({"environment": {"usable_cores": []}}, "usable_cores: Expected int"),
        ({"ranks": {"ranks": [rank_row(1), rank_row(0)]}}, "expected 0 to 1 in order"),
        ({"summary": {"test_accuracy": 2}}, "test_accuracy: Expected float <= 1"),
        ({"config": {}}, "Object missing required field world_size"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, files, said):
    with pytest.raises(UserError, match=said.replace("[", r"\[").replace("]", r"\]")):
        read_run(write_run(tmp_path / "run", **files))
