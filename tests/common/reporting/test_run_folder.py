"""The run folder: its lines of steps and epochs."""

import json
import math

import pytest
import torch

from common.profiling.records import EpochReport, StepRecord
from common.reporting.rank_stats import peak_gpu_memory_bytes
from common.reporting.run_folder import RunFolder
from common.utils.typed_json import read_lines


def step_record(step):
    numbers = {"local_samples": 8, "sync_seconds": 0.1, "step_seconds": 0.7, "wait_seconds": 0.05}
    return StepRecord(epoch=1, step=step, loss=2.0 / step, accuracy=0.5, local_loss=3.0, **numbers)


def epoch_report(epoch):
    return EpochReport(epoch=epoch, train_loss=2.0, val_accuracy=math.nan, seconds=2.0)


def test_lines_are_read_back_and_what_was_not_measured_is_null_in_the_file(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append([step_record(1), step_record(2)])
    folder.append([epoch_report(1)])
    assert folder.earlier_steps() == [step_record(1), step_record(2)]
    epoch = json.loads((tmp_path / "epochs.jsonl").read_text())
    assert (epoch["epoch"], epoch["train_loss"], epoch["val_loss"]) == (1, 2.0, None)
    folder.append([StepRecord(step=3, loss=math.nan)])
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["loss"] is None
    assert math.isnan(folder.earlier_steps()[-1].loss)


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ('{"epoch": 1, "st', "line 2 is cut off or not JSON"),
        ('{"step": 2}', "line 2: Object missing required field loss"),
        ('{"step": 2, "loss": "x"}', "line 2: loss: Expected float | null"),
    ],
)
def test_a_resume_removes_damaged_lines_with_a_warning(damaged, why, tmp_path, capsys):
    """The weights are whole: the training goes on. Later lines and a cut last one go silently."""
    folder, metrics = RunFolder(tmp_path), tmp_path / "metrics.jsonl"
    folder.append([step_record(1)])
    with metrics.open("a") as file:
        file.write(f"{damaged}\n")
    folder.append([step_record(3), step_record(4)])
    folder.append([epoch_report(1)])
    with metrics.open("a") as file:
        file.write('{"step": 5')
    folder.cut(step=3, epoch=1)
    said = capsys.readouterr().out
    assert f"warning: {metrics}, {why}" in said
    assert "this line is removed from the records" in said
    assert folder.earlier_steps() == [step_record(1), step_record(3)]
    assert len(read_lines(tmp_path / "epochs.jsonl", EpochReport)) == 1
    folder.cut(step=3, epoch=0)
    assert capsys.readouterr().out == ""
    assert read_lines(tmp_path / "epochs.jsonl", EpochReport) == []


def test_the_peak_of_gpu_memory_is_that_of_the_ranks_own_gpu(monkeypatch):
    taken = {torch.device("cuda", 0): 10, torch.device("cuda", 1): 20}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", taken.__getitem__)
    assert peak_gpu_memory_bytes(torch.device("cuda", 1)) == 20
    assert peak_gpu_memory_bytes(torch.device("cpu")) is None
