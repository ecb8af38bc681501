"""The run folder: its lines of steps and epochs, and which ranks write a log file into it."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from common.profiling.step_timer import SECTIONS
from common.reporting.rank_stats import peak_gpu_memory_bytes
from common.reporting.run_files import EpochLine, StepLine
from common.reporting.run_folder import RunFolder
from common.training import train_model
from common.training_engine import EpochReport, StepRecord
from common.utils.typed_json import read_lines


@pytest.mark.parametrize("rank", [63, 64])
def test_only_the_first_64_ranks_write_a_log(rank: int, tmp_path: Path) -> None:
    """Otherwise 1,000 machines would append to 1,000 files on one shared disk."""
    folder = RunFolder(tmp_path / "run")
    model = torch.nn.Linear(2, 2)
    batches = [(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_model(
        model,
        torch.device("cpu"),
        torch.nn.CrossEntropyLoss(),
        optimizer,
        1,
        1,
        batches,
        folder.log(rank),
        tmp_path / "checkpoints",
        False,
        rank=rank,
    )
    written = {path.name for path in folder.path.iterdir()}
    assert written == ({"logs_rank63.txt"} if rank == 63 else set())
    assert folder.log(64) == Path(os.devnull)


def step_record(step: int) -> StepRecord:
    seconds = dict.fromkeys(SECTIONS, 0.1 * step)
    return StepRecord(
        1, step, 8, 2.0 / step, 0.5, 3.0, 0.01, seconds, 0.7 * step, wait_seconds=0.05
    )


def epoch_report(epoch: int) -> EpochReport:
    numbers = {"train_loss": 2.0, "val_loss": math.nan, "ema_val_loss": math.nan}
    numbers |= {"train_accuracy": 0.5, "val_accuracy": math.nan, "ema_val_accuracy": math.nan}
    return EpochReport(
        epoch=epoch, learning_rate=0.01, samples_per_second=1e3, seconds=2.0, **numbers
    )


def test_lines_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    steps = [step_record(step) for step in (1, 2)]
    folder.append_metrics(steps)
    folder.append_epoch(epoch_report(1))
    assert folder.earlier_steps() == steps
    [first, _] = read_lines(tmp_path / "metrics.jsonl", StepLine)
    assert (first.step, first.local_samples, first.sync_seconds) == (1, 8, 0.1)
    assert first.step_seconds == 0.7, "the whole step, with 0.2 s outside its sections"
    [line] = read_lines(tmp_path / "epochs.jsonl", EpochLine)
    assert (line.epoch, line.train_loss, line.val_loss, line.seconds) == (1, 2.0, None, 2.0)


def test_a_line_without_a_step_time_has_the_sum_of_its_sections(tmp_path: Path) -> None:
    """Earlier versions wrote such lines, and a resumed run reads them."""
    folder = RunFolder(tmp_path)
    folder.append_metrics([step_record(2)])
    metrics = tmp_path / "metrics.jsonl"
    line = json.loads(metrics.read_text())
    del line["step_seconds"]
    metrics.write_text(json.dumps(line) + "\n")
    assert folder.earlier_steps()[0].step_seconds == pytest.approx(5 * 0.2)


def test_emulated_steps_have_no_loss(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    nothing = StepRecord(
        1, 1, 8, math.nan, math.nan, math.nan, 0.01, dict.fromkeys(SECTIONS, 0.0), 0.0
    )
    folder.append_metrics([nothing])
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
    assert math.isnan(folder.earlier_steps()[0].loss)


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ('{"epoch": 1, "st', "line 2 is cut off or not JSON"),
        ("\0\0", "line 2 is cut off or not JSON"),
        ('{"step": 2}', "line 2: loss is missing"),
        ('{"step": 2, "loss": "x"}', "line 2: loss: got 'x', expected a number or null"),
        ('{"step": 2, "loss": 1, "update_seconds": -1}', "line 2: update_seconds: got -1"),
        ("[2]", "line 2: got [2], expected an object"),
    ],
)
def test_a_resume_removes_damaged_lines_with_a_warning(
    damaged: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are whole: the training goes on. Later lines and a cut last one go silently."""
    folder, metrics = RunFolder(tmp_path), tmp_path / "metrics.jsonl"
    folder.append_metrics([step_record(1)])
    with metrics.open("a") as file:
        file.write(f"{damaged}\n")
    folder.append_metrics([step_record(3), step_record(4)])
    folder.append_epoch(epoch_report(1))
    with metrics.open("a") as file:
        file.write('{"step": 5')
    folder.cut(step=3, epoch=1)
    said = capsys.readouterr().out
    assert f"warning: {metrics}, {why}" in said
    assert "this line is removed from the records" in said
    assert folder.earlier_steps() == [step_record(1), step_record(3)]
    assert len(read_lines(tmp_path / "epochs.jsonl", EpochLine)) == 1
    folder.cut(step=3, epoch=0)
    assert capsys.readouterr().out == ""
    assert read_lines(tmp_path / "epochs.jsonl", EpochLine) == []


def test_the_peak_of_gpu_memory_is_that_of_the_ranks_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {torch.device("cuda", 0): 10, torch.device("cuda", 1): 20}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", taken.__getitem__)
    assert peak_gpu_memory_bytes(torch.device("cuda", 1)) == 20
    assert peak_gpu_memory_bytes(torch.device("cpu")) is None
