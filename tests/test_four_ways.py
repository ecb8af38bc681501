"""docs/examples/four_ways.py ends with the weights of the parts; each diff does what it says.

Two epochs of the handwritten digits: twelve steps of 256 images, the sixth and the last of 157, so
that two ranks' shares differ in size.
"""

import runpy
import subprocess
import sys

import numpy as np
import pytest
from numpy.linalg import norm
from torch import nn

from common.checkpoint import load_checkpoint
from common.models import MODELS
from common.profiling.comm_trace import MessageRecorder
from tests.helpers import ROOT, TINY, run_ranks, start_part, start_ranks
from tests.helpers.documentation import Page

SCRIPT = ROOT / "docs/examples/four_ways.py"
DIFFS = ["accumulation", "amp", "ema"]
MOST_LINES, MOST_LINES_OF_A_DIFF = 90, 20
BY_HAND_AND_DDP = ["gather_scatter", "all_reduce", "ddp"]
STEPS = 12
RUN = (*TINY, "--dataset", "digits", "--epochs", 2, "--schedule", "constant")
PARTS = {
    "PartOne": ("PartOne", 1, "--ema"),
    "gather_scatter": ("PartTwo", 2, "--sync", "gather_scatter"),
    "all_reduce": ("PartTwo", 2, "--sync", "all_reduce"),
    "ddp": ("PartThree", 2, "--sync", "ddp"),
    "accumulation": ("PartTwo", 2, "--sync", "all_reduce", "--accumulation-steps", 4),
}


def without_batchnorm(classes):
    """Return a model whose gradient for a batch is the mean of those for its parts."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return the last checkpoint of each of ``PARTS``."""
    folders = {name: tmp_path_factory.mktemp(name) for name in PARTS}
    started = []
    for name, (part, ranks, *more) in PARTS.items():
        words = [*RUN, *more, "--checkpoint", "last.pt"]
        if ranks == 1:
            started.append(start_part(part, *words, "--threads", 1, cwd=folders[name]))
        else:
            started += start_ranks(part, ranks, *words, cwd=folders[name])
    for program in started:
        ended = program.end()
        assert ended.status == 0, ended.err
    return {name: load_checkpoint(folder / "last.pt") for name, folder in folders.items()}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Return the script, and one with each diff applied, by the diff's name."""
    found = {"": SCRIPT}
    for name in DIFFS:
        clone = tmp_path_factory.mktemp(name)
        found[name] = clone / "docs/examples/four_ways.py"
        found[name].parent.mkdir(parents=True)
        found[name].write_text(SCRIPT.read_text())
        change = SCRIPT.with_name(f"{name}.diff")
        subprocess.run(["git", "apply", str(change)], cwd=clone, check=True)
    return found


def outcome(rank, script, sync, model):
    """Run the script as this rank with ``model`` in place of VGG-11.

    Returns its weights, those of the moving average if there is one, and the bytes of its
    all_reduces.
    """
    MODELS["vgg11"] = model
    words = ["--sync", sync, "--dataset", "digits", "--epochs", 2, "--rank", rank]
    sys.argv = [str(script), *map(str, words)]
    with MessageRecorder() as recorder:
        names = runpy.run_path(str(script), run_name="__main__")
    reduced = sum(one.bytes for one in recorder.messages if one.kind == "all_reduce")
    average = arrays(names["average"]) if "average" in names else None
    return arrays(names["network"].state_dict()), average, reduced


def arrays(state):
    """Return a model's state in a form that can be sent from a process that ends."""
    return {name: value.numpy() for name, value in state.items()}


def run_script(script, sync, model="tests.helpers.tiny_model:tiny"):
    """Return the outcome of rank 0, whose weights equal those of the others."""
    ranks = 1 if sync == "none" else 2
    first, *others = run_ranks(ranks, outcome, script, sync, model)
    for other in others:
        assert distance(first[0], other[0]) == 0
    return first


def distance(state, reference):
    """Return the largest difference of a parameter, relative to the parameter's norm."""
    names = [name for name in reference if "running" not in name and "num_batches" not in name]
    assert set(names) <= set(state)
    return max(
        norm(state[name] - np.asarray(reference[name])) / norm(reference[name]) for name in names
    )


@pytest.mark.parametrize("sync", BY_HAND_AND_DDP)
def test_two_ranks_end_with_the_weights_of_the_part(sync, scripts, checkpoints):
    weights, _, _ = run_script(scripts[""], sync)
    assert distance(weights, checkpoints[sync]["model_state_dict"]) < 1e-6
    # Each rank has its own BatchNorm: one process on the whole batch ends elsewhere.
    assert distance(weights, checkpoints["PartOne"]["model_state_dict"]) > 1e-4


def test_one_process_ends_with_the_weights_of_part_one(scripts, checkpoints):
    weights, _, _ = run_script(scripts[""], "none")
    assert distance(weights, checkpoints["PartOne"]["model_state_dict"]) < 1e-6


@pytest.mark.parametrize("sync", BY_HAND_AND_DDP)
def test_accumulation_equals_the_whole_batch_and_sends_no_more(sync, scripts):
    model = "tests.test_four_ways:without_batchnorm"
    whole, _, reduced = run_script(scripts[""], sync, model)
    accumulated, _, reduced_by_four = run_script(scripts["accumulation"], sync, model)
    assert 0 < distance(accumulated, whole) < 1e-5
    assert reduced_by_four == reduced
    gradients = sum(4 * value.size for value in whole.values())
    assert reduced == (0 if sync == "gather_scatter" else STEPS * gradients)


def test_accumulation_equals_the_engines_with_batchnorm(scripts, checkpoints):
    weights, _, _ = run_script(scripts["accumulation"], "all_reduce")
    assert distance(weights, checkpoints["accumulation"]["model_state_dict"]) < 1e-6
    assert distance(weights, checkpoints["all_reduce"]["model_state_dict"]) > 1e-4


def test_the_moving_average_is_the_engines(scripts, checkpoints):
    """With BatchNorm's statistics; the weights are those without an average."""
    weights, average, _ = run_script(scripts["ema"], "none")
    expected = checkpoints["PartOne"]
    assert distance(weights, expected["model_state_dict"]) < 1e-6
    assert distance(average, expected["ema_state_dict"]) < 1e-6
    assert distance(average, expected["model_state_dict"]) > 1e-3
    statistics = [name for name in average if "running" in name]
    assert len(statistics) == 2
    for name in statistics:
        assert average[name] == pytest.approx(expected["ema_state_dict"][name].numpy(), rel=1e-5)


def test_mixed_precision_stays_near(scripts, checkpoints):
    weights, _, _ = run_script(scripts["amp"], "all_reduce")
    away = distance(weights, checkpoints["all_reduce"]["model_state_dict"])
    assert 1e-6 < away < 0.05
    assert {value.dtype.name for value in weights.values()} == {"float32", "int64"}


def test_the_page_and_its_differences_are_short_and_shown():
    assert len(SCRIPT.read_text().splitlines()) <= MOST_LINES
    shown = Page(ROOT / "docs/four_ways.md").text
    for name in DIFFS:
        change = SCRIPT.with_name(f"{name}.diff").read_text()
        changed = [
            line
            for line in change.splitlines()
            if line[0] in "+-" and line[:3] not in ("+++", "---")
        ]
        assert len(changed) <= MOST_LINES_OF_A_DIFF
        hunks = change[change.index("@@") :]
        assert f"```diff\n{hunks}```" in shown, name
