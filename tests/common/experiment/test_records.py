"""The records of a run that was killed and resumed are those of the undisturbed run.

Each step and each epoch has one line in ``metrics.jsonl``, ``epochs.jsonl`` and the logs, and each
line has the undisturbed run's numbers. Real processes train two epochs of six steps and save every
four steps.
"""

import functools
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import load_checkpoint, save_checkpoint
from tests.helpers import ROOT, TINY, Ended, Started, free_port, make_image_folder, user_environment

STEPS, SAVED = 12, 8
EPOCH_2 = re.compile(r"Epoch 2: train loss \S+ accuracy \S+")
Run = Callable[..., list[Ended]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that trains in the folder ``output`` and returns how each rank ended."""
    images = make_image_folder(tmp_path_factory.mktemp("images"))

    def run(
        output: Path, *flags: object, ranks: int = 1, hurt: tuple[int, str, str] = (-1, "", "")
    ) -> list[Ended]:
        command = [
            sys.executable,
            ROOT / "tests" / "helpers" / "hurt.py",
            *hurt,
            ROOT / "PartTwo" / "main.py",
            *TINY,
            *("--sync", "all_reduce", "--dataset", "folder", "--data-dir", images),
            *("--batch-size", 4, "--epochs", 2, "--checkpoint-every", 4, "--log-every", 5),
            *("--threads", 1, "--timeout", 20, "--output-dir", output, "--run-name", "same"),
            *("--master-ip", "127.0.0.1", "--master-port", free_port(), "--num-nodes", ranks),
            *flags,
        ]
        output.mkdir(exist_ok=True)
        started = [
            Started(
                [str(word) for word in (*command, "--rank", rank)],
                cwd=output,
                env=user_environment(),
                forked=True,
            )
            for rank in range(ranks)
        ]
        return [one.end() for one in started]

    return run


@pytest.fixture(scope="module")
def undisturbed(train: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """Return a function that trains undisturbed, once for each number of ranks.

    It returns the run's folder and what rank 0 printed.
    """

    @functools.cache
    def trained(ranks: int) -> tuple[Path, str]:
        output = tmp_path_factory.mktemp("undisturbed")
        ends = train(output, ranks=ranks)
        assert [end.status for end in ends] == [0] * ranks, ends
        return run_folder(output), ends[0].out

    return trained


def run_folder(output: Path) -> Path:
    return output / "PartTwo-all_reduce" / "same"


def records(run: Path) -> dict[str, list[Any]]:
    """Return the lines of every record by file, without times."""
    found: dict[str, list[Any]] = {}
    for path in (run / "metrics.jsonl", run / "epochs.jsonl"):
        lines = path.read_text().splitlines() if path.exists() else []
        found[path.name] = [
            {key: value for key, value in json.loads(line).items() if "second" not in key}
            for line in lines
        ]
    for path in sorted(run.glob("logs_rank*.txt")):
        lines = path.read_text().splitlines()
        found[path.name] = [line.partition(", Avg Batch")[0] for line in lines]
    return found


def resume(train: Run, output: Path, *, ranks: int, step: int) -> Ended:
    ends = train(output, "--resume", "auto", ranks=ranks)
    assert [end.status for end in ends] == [0] * ranks, ends
    assert (f", step {step}\n" if step else "starting from step 0") in ends[0].out
    return ends[0]


@pytest.mark.parametrize(
    ("ranks", "victim", "moment", "step"),
    [
        (1, 0, "within", SAVED),
        pytest.param(2, 0, "within", SAVED, marks=pytest.mark.slow),
        pytest.param(2, 1, "data", 6, marks=pytest.mark.slow),
        pytest.param(2, 0, "forward", 0, marks=pytest.mark.slow),  # in step 3
    ],
)
def test_after_kill_9_and_resume_the_records_are_the_undisturbed_runs(
    train: Run,
    undisturbed: Callable[[int], Any],
    tmp_path: Path,
    ranks: int,
    victim: int,
    moment: str,
    step: int,
) -> None:
    """Also what rank 0 prints of the resumed epoch, and the number of steps in the summary."""
    reference, printed = undisturbed(ranks)
    ends = train(tmp_path, ranks=ranks, hurt=(victim, moment, "kill"))
    assert ends[victim].status == -signal.SIGKILL, ends
    run = run_folder(tmp_path)
    recorded = [line["step"] for line in records(run)["metrics.jsonl"]]
    assert recorded[:step] == list(range(1, step + 1)), "recorded before the checkpoint"
    resumed = resume(train, tmp_path, ranks=ranks, step=step)
    assert records(run) == records(reference)
    assert len(records(run)["metrics.jsonl"]) == STEPS
    assert EPOCH_2.search(resumed.out)[0] == EPOCH_2.search(printed)[0]
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
    assert not (run / ".lock").exists()


@pytest.mark.slow
def test_a_resume_from_an_older_checkpoint_removes_the_lines_after_it(
    train: Run, undisturbed: Callable[[int], Any], tmp_path: Path
) -> None:
    """The newest checkpoints are damaged, and the last line of the metrics is cut off."""
    reference, _ = undisturbed(1)
    shutil.copytree(reference, run_folder(tmp_path))
    run = run_folder(tmp_path)
    for name in ("Epoch_2.pt", "Epoch_2_Step_12.pt", "Epoch_2_Step_8.pt"):
        (run / "checkpoints" / name).write_bytes(b"damaged")
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-9])
    resume(train, tmp_path, ranks=1, step=6)
    assert records(run) == records(reference)


def test_an_epoch_resumed_at_its_last_step_still_ends(
    train: Run, undisturbed: Callable[[int], Any], tmp_path: Path
) -> None:
    """The run was killed between the checkpoint of the last step and that of the epoch.

    No step is left, but the epoch is validated, recorded and saved.
    """
    reference, printed = undisturbed(1)
    shutil.copytree(reference, run_folder(tmp_path))
    run = run_folder(tmp_path)
    (run / "checkpoints" / "Epoch_2.pt").unlink()
    resumed = resume(train, tmp_path, ranks=1, step=STEPS)
    assert records(run) == records(reference)
    assert EPOCH_2.search(resumed.out)[0] == EPOCH_2.search(printed)[0]
    one, other = (load_checkpoint(at / "checkpoints" / "Epoch_2.pt") for at in (run, reference))
    assert one["loss"] == other["loss"]


@pytest.mark.slow
def test_on_another_number_of_ranks_the_epoch_keeps_its_sums(train: Run, tmp_path: Path) -> None:
    """Two ranks resume what one has begun, and one what two have begun.

    The epoch's loss is the mean over all its steps, also over those before the resume.
    """
    for before, after in ((1, 2), (2, 1)):
        output = tmp_path / f"{before}-{after}"
        train(output, "--shards", 2, ranks=before, hurt=(0, "within", "kill"))
        ends = train(output, "--shards", 2, "--resume", "auto", ranks=after)
        assert [end.status for end in ends] == [0] * after, ends
        found = records(run_folder(output))
        losses = [line["loss"] for line in found["metrics.jsonl"] if line["epoch"] == 2]
        assert len(losses) == 6
        assert found["epochs.jsonl"][-1]["train_loss"] == pytest.approx(sum(losses) / 6)


@pytest.mark.slow
def test_a_checkpoint_without_the_sums_resumes_and_says_what_is_missing(
    train: Run, undisturbed: Callable[[int], Any], tmp_path: Path
) -> None:
    """Older versions wrote none."""
    shutil.copytree(undisturbed(1)[0], run_folder(tmp_path))
    saved = run_folder(tmp_path) / "checkpoints"
    entries = load_checkpoint(saved / f"Epoch_2_Step_{SAVED}.pt")
    del entries["epoch_sums"]
    shutil.rmtree(saved)
    save_checkpoint(saved / f"Epoch_2_Step_{SAVED}.pt", entries)
    resumed = resume(train, tmp_path, ranks=1, step=SAVED)
    missing = ", without its first 2 steps, whose numbers the checkpoint lacks"
    assert re.search(rf"Epoch 2: train loss .*{missing}\n", resumed.out)
    log = (run_folder(tmp_path) / "logs_rank0.txt").read_text().splitlines()
    assert len(log) == 2
    assert log[1].endswith(missing)


def test_a_loss_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    """The step before a checkpoint is checked before it is written, whatever --log-every says."""
    from common.errors import GroupError
    from common.training import prepare_model_for_training, train_model
    from common.training_engine.checkpoint_manager import CheckpointManager

    batches = [
        (torch.full((4, 2), value), torch.zeros(4).long()) for value in (1.0, 1.0, torch.nan)
    ]
    model, criterion, optimizer = prepare_model_for_training(
        torch.nn.Linear(2, 2), "cpu", 0.1, 0.9, 0.0, False
    )
    log, folder = tmp_path / "log.txt", tmp_path / "checkpoints"
    with pytest.raises(GroupError, match=r"not finite in epoch 1, step 3"):
        train_model(
            *(model, "cpu", criterion, optimizer, 1, 1, batches, log, folder, False),
            saver=CheckpointManager(folder, every=1),
            log_every=100,
        )
    assert sorted(path.name for path in folder.iterdir()) == [
        "Epoch_1_Step_1.pt",
        "Epoch_1_Step_2.pt",
    ]
