"""After a kill and a resume, metrics.jsonl, epochs.jsonl and the logs are those of one run.

Real processes train two epochs of six steps and save every four steps.
"""

import functools
import re
import shutil
import signal
from pathlib import Path

import pytest

from common.checkpoint import load_checkpoint
from tests.helpers import TINY, make_image_folder
from tests.helpers.records import json_lines, json_of
from tests.helpers.stage import NOBODY, start_hurt_ranks

STEPS, SAVED = 12, 8
EPOCH_2 = re.compile(r"Epoch 2: train loss \S+ accuracy \S+")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that trains in the folder ``output`` and returns how each rank ended."""
    images = make_image_folder(tmp_path_factory.mktemp("images"))

    def run(output, *flags, ranks=1, hurt=(NOBODY, "", "")):
        output.mkdir(exist_ok=True)
        settings = [
            *(*TINY, "--sync", "all_reduce", "--dataset", "folder", "--data-dir", images),
            *("--batch-size", 4, "--epochs", 2, "--checkpoint-every", 4, "--log-every", 5),
            *("--threads", 1, "--timeout", 20, "--output-dir", output, "--run-name", "same"),
        ]
        started = start_hurt_ranks(ranks, hurt, *settings, *flags, cwd=output)
        return [one.end() for one in started]

    return run


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory):
    """Return a function of the number of ranks: the undisturbed run's folder and output."""

    @functools.cache
    def trained(ranks):
        output = tmp_path_factory.mktemp("undisturbed")
        ends = train(output, ranks=ranks)
        assert [end.status for end in ends] == [0] * ranks, ends
        return run_folder(output), ends[0].out

    return trained


def run_folder(output):
    return output / "PartTwo-all_reduce" / "same"


def records(run):
    """Return the lines of every record by file, without times."""
    found = {}
    for path in (run / "metrics.jsonl", run / "epochs.jsonl"):
        found[path.name] = json_lines(path, times=False) if path.exists() else []
    for path in sorted(run.glob("logs_rank*.txt")):
        lines = path.read_text().splitlines()
        found[path.name] = [line.partition(", Avg Batch")[0] for line in lines]
    return found


def resume(train, output, *, ranks, step):
    """Resume at ``step``; 0: from the beginning."""
    ends = train(output, "--resume", "auto", ranks=ranks)
    assert [end.status for end in ends] == [0] * ranks, ends
    words = f", step {step}" if step else "starting from step 0"
    assert words in ends[0].out
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
    train, undisturbed, tmp_path, ranks, victim, moment, step
):
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
    assert json_of(run, "summary")["steps"] == STEPS
    assert not (run / ".lock").exists()


@pytest.mark.parametrize(
    ("damaged", "step"),
    [
        # The run was killed between the checkpoint of the last step and that of the epoch: no step
        # is left, but the epoch is validated, recorded and saved.
        (("Epoch_2.pt",), STEPS),
        pytest.param(
            ("Epoch_2.pt", "Epoch_2_Step_12.pt", "Epoch_2_Step_8.pt"), 6, marks=pytest.mark.slow
        ),
    ],
)
def test_a_resume_from_an_older_checkpoint_removes_the_lines_after_it(
    train, undisturbed, tmp_path, damaged, step
):
    """The newest checkpoints are damaged; if steps are left, the last line is cut off, too."""
    reference, printed = undisturbed(1)
    run = Path(shutil.copytree(reference, run_folder(tmp_path)))
    for name in damaged:
        (run / "checkpoints" / name).write_bytes(b"damaged")
    if step < STEPS:
        metrics = run / "metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes()[:-9])
    resumed = resume(train, tmp_path, ranks=1, step=step)
    assert records(run) == records(reference)
    assert EPOCH_2.search(resumed.out)[0] == EPOCH_2.search(printed)[0]
    one, other = (load_checkpoint(at / "checkpoints" / "Epoch_2.pt") for at in (run, reference))
    assert one["loss"] == other["loss"]


@pytest.mark.slow
def test_on_another_number_of_ranks_the_epoch_keeps_its_sums(train, tmp_path):
    """The epoch's loss is the mean over all its steps, also over those before the resume."""
    for before, after in ((1, 2), (2, 1)):
        output = tmp_path / f"{before}-{after}"
        train(output, "--shards", 2, ranks=before, hurt=(0, "within", "kill"))
        ends = train(output, "--shards", 2, "--resume", "auto", ranks=after)
        assert [end.status for end in ends] == [0] * after, ends
        found = records(run_folder(output))
        losses = [line["loss"] for line in found["metrics.jsonl"] if line["epoch"] == 2]
        assert len(losses) == 6
        assert found["epochs.jsonl"][-1]["train_loss"] == pytest.approx(sum(losses) / 6)
