"""Wrong strategies that claim to be exact: found by their losses, in numbers and in real runs."""

import itertools
import shutil
import sys

import pytest

from lab.compare.reporting import report_on
from lab.comparison.record import read_comparison
from lab.report.equality import check
from lab.report.findings import EQUAL, findings
from lab.report.view import blocks
from tests.helpers import ROOT, TINY, Started, free_port, user_environment
from tests.helpers.report_samples import cell, results

WRONG_PART = ROOT / "tests" / "helpers" / "wrong_part_two.py"
RIGHT = (2.56, 2.63, 2.41, 2.94, 3.15)


def losing(sync, *losses, seeds=(0,), **more):
    """Return a cell on 2 nodes whose runs have these losses from step 1 on."""
    return cell(sync, 2, seeds=seeds, repeats=len(seeds), losses=losses, **more)


def block(*cells, **settings):
    whole = results(predict=False)
    whole.cells = list(cells)
    whole.settings = settings
    (found,) = blocks(whole)
    return found


def said(*cells, **settings):
    found = findings(block(*cells, **settings))
    return [finding for finding in found if finding.topic == EQUAL]


def shifted(step, by):
    """Return ``RIGHT`` with another loss at one step, as a share of the loss."""
    return [loss * (1 + by * (number == step)) for number, loss in enumerate(RIGHT, start=1)]


TREE, DDP = losing("tree", *RIGHT), losing("ddp", *RIGHT)


def test_rounding_may_grow_from_step_to_step():
    def who(step, share):
        result = check(block(losing("ring", *shifted(step, share)), TREE, DDP), 2)
        return list(result.wrong), result.equal

    for step, below, above in ((2, 9e-6, 3e-5), (3, 5e-4, 3e-3), (4, 0.05, 0.3)):
        assert who(step, below) == ([], ["tree", "ring", "ddp"])
        assert who(step, above) == (["ring"], ["tree", "ddp"])
    assert who(5, 0.9) == ([], ["tree", "ring", "ddp"])  # rounding has grown beyond any limit


RING, RING_OFF = losing("ring", *RIGHT), losing("ring", *shifted(2, 0.01))
DDP_OFF, TREE_OFF = losing("ddp", *shifted(2, 0.01)), losing("tree", *shifted(3, 0.01))
NEAR = losing("overlapped", *shifted(2, 5e-5))  # more than fp32 on a CPU allows
OTHER_BATCHES = losing("overlapped", *shifted(1, 0.1))
TWICE = [losing(sync, *RIGHT, seeds=(0, 0)) for sync in ("ring", "tree", "ddp")]
TWICE[0].repeats[1].losses[1] = (2, 2.7)
FP16 = losing("ddp", *shifted(2, 0.01), precision="float16 on a GPU")


@pytest.mark.parametrize(
    ("cells", "precision", "wrong", "untested"),
    [
        # the type of the forward pass sets the limit; on a GPU TF32 does
        ((TREE, RING, NEAR), "fp32", {"overlapped": 2}, []),
        ((TREE, RING, NEAR), "fp32 on a GPU", {}, []),
        ((TREE, RING, NEAR), "bfloat16", {}, []),
        ((TREE, RING, NEAR), None, {}, []),  # of an earlier version
        ((RING, TREE, FP16), "fp32 on a GPU", {}, ["ddp"]),
        # the majority is right even without ddp
        ((RING, TREE, DDP_OFF), "fp32", {"ddp": 2}, []),
        # two wrong ones that differ from each other are both named
        (
            (RING_OFF, TREE_OFF, losing("all_reduce", *RIGHT), DDP),
            "fp32",
            {"ring": 2, "tree": 3},
            [],
        ),
        (TWICE, "fp32", {"ring": 2}, []),  # one repeat that deviates is enough
        # one with other batches does not stop the test of the others
        ((RING_OFF, TREE, DDP, OTHER_BATCHES), "fp32", {"ring": 2}, ["overlapped"]),
        ((losing("topk", *RIGHT),), "fp32", {}, []),  # claims nothing
    ],
)
def test_who_is_wrong(cells, precision, wrong, untested):
    for entry in cells:
        for run in entry.repeats:
            if entry is not FP16:
                run.precision = precision
    result = check(block(*cells), 2)
    assert {sync: deviation.step for sync, deviation in result.wrong.items()} == wrong
    assert list(result.untested) == untested


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (
            (losing("ring", *shifted(2, 0.017 / 2.63)), TREE, DDP),
            "On 2 nodes ring is not equal to the others from step 2 on: the loss differs by "
            "0.017; rounding would give less than 3e-5 at that step. It claims to be exact, but "
            "does not compute the mean gradient.",
        ),
        ((RING_OFF, DDP), "ring is not equal to ddp, PyTorch's own, from step 2 on"),
        (
            (RING_OFF, TREE),
            "On 2 nodes ring and tree do not compute the same from step 2 on: the loss differs by "
            "0.026; rounding would give less than 3e-5 at that step. At least one of them is "
            "wrong; a comparison with ddp shows which. docs/examples/check_strategy.py tests",
        ),
        ((losing("ring", 2.56, None, None), TREE, DDP), "the loss differs and is not finite"),
    ],
)
def test_what_is_said_of_a_wrong_one(cells, text):
    wrong, *others = said(*cells)
    assert wrong.wrong
    assert text in wrong.text
    assert not any(other.wrong for other in others)


def test_only_exact_strategies_promise_equal_weights():
    for sync, doubtful in (("ring", {"ring"}), ("topk", set())):
        apart = losing(sync, *RIGHT)
        apart.repeats[0].equal_weights = False
        assert check(block(apart, DDP), 2).doubtful == doubtful


START = "the losses differ at step 1, before any gradient is exchanged: initial weights or batches"
NO_LOSSES = (losing("ring", None, None), losing("ddp", None, None))


@pytest.mark.parametrize(
    ("cells", "settings", "reason"),
    [
        ((RING,), {}, "no other strategy that claims to be exact was measured"),
        (
            (RING, losing("ddp", *RIGHT, seeds=(1,))),
            {},
            "number types or seeds differ (fp32, seed 0; fp32, seed 1)",
        ),
        ((RING, losing("ddp", *shifted(1, 0.01))), {}, START),
        (NO_LOSSES, {"compute": "laptop"}, "emulated compute has no losses"),
        ((losing("ring"), losing("ddp")), {}, "the losses of the first steps were not recorded"),
    ],
)
def test_what_cannot_be_compared_says_why(cells, settings, reason):
    [finding] = said(*cells, **settings)
    assert finding.caution
    assert "the mean gradient: " + reason in finding.text


def run_together(folder, script, *syncs):
    """Run these strategies on two ranks at the same time, and return the runs' folders."""
    started = []
    flags = ["--dataset", "digits", "--batch-size", 64, *TINY, "--max-steps", 5, "--threads", 1]
    flags += ["--measure-only", "--untimed-steps", 1, "--output-dir", folder, "--num-nodes", 2]
    for sync in syncs:
        group = ["--sync", sync, "--master-ip", "127.0.0.1", "--master-port", free_port()]
        for rank in (0, 1):
            words = [sys.executable, *map(str, [script, *flags, *group, "--rank", rank])]
            started.append(Started(words, cwd=folder, env=user_environment(), forked=True))
    for one in started:
        ended = one.end()
        assert ended.status == 0, ended.err
    return [next((folder / f"PartTwo-{sync}").iterdir()) for sync in syncs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Only all_reduce and gather_scatter are right; WRONG_PART says what the others do."""
    folder = tmp_path_factory.mktemp("runs")
    wrong = ("ring", "tree", "halving_doubling", "reduce_broadcast", "all_reduce")
    found = run_together(folder, WRONG_PART, *wrong)
    found += run_together(folder, ROOT / "PartTwo" / "main.py", "gather_scatter")
    return dict(zip((*wrong, "gather_scatter"), found, strict=True))


def reported(folders, tmp_path):
    assert report_on(folders, reports=tmp_path / "reports", scaling="strong") == 0
    [path] = (tmp_path / "reports").glob("report-*/results.json")
    return read_comparison(path), path


def test_a_report_on_real_runs_names_the_wrong_strategies(runs, tmp_path, capsys):
    wrong = {"ring", "tree", "halving_doubling", "reduce_broadcast"}
    results, path = reported(list(runs.values()), tmp_path)
    printed = capsys.readouterr().out
    assert all(f"{sync} is not equal to " in printed.replace("\n", " ") for sync in wrong)
    assert printed.count("yes: WRONG") == 4
    result = check(*blocks(results), 2)
    assert set(result.wrong) == wrong
    assert set(result.unequal_ranks) == {"halving_doubling", "reduce_broadcast"}
    assert set(result.equal) == {"all_reduce", "gather_scatter"}
    assert results.settings["steps"] == 4
    assert printed.endswith(f"\nreport: {path.parent / 'report.html'}\n")


@pytest.mark.parametrize(
    ("syncs", "mistakes", "confirmed"),
    [
        (["ring"], {"ring": "are 0.50 of the mean: divided by 4 on 2 ranks?"}, []),
        (["tree"], {"tree": "are 2.00 of the mean: divided by 1 on 2 ranks?"}, []),
        (["reduce_broadcast"], {"reduce_broadcast": "each rank steps with its own"}, []),
        (["ring", "all_reduce"], {"ring": "0.50 of"}, ["all_reduce"]),
        (["ring", "tree"], {"ring": "0.50 of", "tree": "2.00 of"}, []),  # no right one to compare
        (["gather_scatter"], {}, ["gather_scatter"]),
    ],
)
def test_one_process_tells_the_wrong_one_and_its_factor(runs, tmp_path, syncs, mistakes, confirmed):
    results, _ = reported([runs[sync] for sync in syncs], tmp_path)
    result = check(*blocks(results), 2)
    assert result.wrong.keys() == result.mistakes.keys() == mistakes.keys()
    assert all(text in result.mistakes[sync] for sync, text in mistakes.items())
    assert result.confirmed == result.equal == confirmed


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        ("environment.json", '"step_code": "', '"step_code": "0', "it ran other code, or another"),
        ("environment.json", '"gpus": []', '"gpus": ["a GPU"]', "it computed on a GPU"),
        ("config.json", '"fp32"', '"bfloat16"', "it computed in bfloat16"),
        ("config.json", '"seed": 0', '"seed": 1', "the loss of step 1 is "),  # other weights
        ("config.json", '"clip_norm": null', '"clip_norm": 1', "it clips its gradients"),
        ("metrics.jsonl", '"step":1,', '"step":9,', "its losses of steps 1 and 2"),
    ],
)
def test_a_run_that_cannot_be_computed_again_is_not_called_wrong(
    runs, tmp_path, capsys, file, old, new, why
):
    folder = shutil.copytree(runs["ring"], tmp_path / "copy")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    results, _ = reported([folder], tmp_path)
    assert not check(*blocks(results), 2).doubtful
    printed = capsys.readouterr().out.replace("\n", " ")
    assert f"; in one process neither: {why}" in printed
    assert "docs/examples/check_strategy.py" in printed
    assert "`lab audit`" in printed


def test_right_strategies_stay_silent_on_three_ranks_where_sums_round():
    """Rounding as measured between nine right strategies on digits, in all orders."""
    measured = {
        "all_reduce": (2.5101, 2.3717836, 4.7442608, 4.6916825),
        "ring": (2.5101, 2.3717834, 4.7441124, 4.6874955),
        "ddp": (2.5101, 2.3717833, 4.7442602, 4.6914303),
    }
    for order in itertools.permutations(measured):
        result = check(block(*(losing(sync, *measured[sync]) for sync in order)), 2)
        assert not result.doubtful
        assert set(result.equal) == set(measured)
