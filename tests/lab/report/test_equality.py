"""Wrong strategies that claim to be exact: found by their losses, in numbers and in real runs."""

import itertools
import json
import sys

import pytest

from lab.compare.reporting import report_on
from lab.report.equality import check
from lab.report.findings.equal_results import equal_results
from lab.report.view import blocks
from tests.helpers import ROOT, TINY, Started, free_port, user_environment
from tests.helpers.report_samples import cell

WRONG_PART = ROOT / "tests" / "helpers" / "wrong_part_two.py"
RIGHT = (2.56, 2.63, 2.41, 2.94, 3.15)


def losing(sync, *losses, seeds=(0,)):
    """Return a cell on 2 nodes whose runs have these losses from step 1 on."""
    entry = cell(sync, 2, seeds=seeds, repeats=len(seeds))
    for repeat in entry["repeats"]:
        repeat["losses"] = [[step, loss] for step, loss in enumerate(losses, start=1)]
    return entry


def block(*cells, gpus=(), **settings):
    (found,) = blocks(
        {"cells": list(cells), "settings": settings, "environment": {"gpus": list(gpus)}}
    )
    return found


def shifted(step, by):
    """Return ``RIGHT`` with another loss at one step, as a share of the loss."""
    return [
        loss * (1 + by) if number == step else loss for number, loss in enumerate(RIGHT, start=1)
    ]


def test_one_that_differs_after_the_first_update_is_wrong():
    found = block(
        losing("ring", *shifted(2, 0.017 / 2.63)), losing("tree", *RIGHT), losing("ddp", *RIGHT)
    )
    [wrong, equal, *_] = equal_results(found)
    assert wrong.wrong
    assert wrong.text == (
        "On 2 nodes ring is not equal to the others from step 2 on: the loss differs by 0.017; "
        "rounding would give less than 3e-5. It claims to be exact, but does not compute the "
        "mean gradient."
    )
    assert equal.text.startswith("On 2 nodes tree and ddp compute the same: ")
    assert not equal.wrong


@pytest.mark.parametrize(
    ("step", "share", "is_wrong"),
    [
        (2, 2e-7, False),
        (2, 9e-6, False),
        (2, 3e-5, True),
        (3, 5e-4, False),
        (3, 3e-3, True),
        (4, 0.05, False),
        (4, 0.3, True),
        (5, 0.9, False),  # rounding has grown beyond any limit
    ],
)
def test_rounding_may_grow_from_step_to_step(step, share, is_wrong):
    others = [losing(sync, *RIGHT) for sync in ("tree", "ddp")]
    result = check(block(losing("ring", *shifted(step, share)), *others), 2)
    assert list(result.wrong) == (["ring"] if is_wrong else [])
    assert len(result.equal) == (2 if is_wrong else 3)


def test_the_type_of_the_forward_pass_sets_the_limit():
    cells = [losing(sync, *RIGHT) for sync in ("tree", "ring")]
    cells.append(losing("overlapped", *shifted(2, 5e-5)))
    assert list(check(block(*cells), 2).wrong) == ["overlapped"]
    assert not check(block(*cells, gpus=("a GPU",)), 2).wrong, "TF32 on a GPU"
    assert not check(block(*cells, flags=["--amp"]), 2).wrong
    assert not check(block(*cells, amp=True, amp_dtype="bf16"), 2).wrong


def test_on_a_gpu_ddp_computes_in_fp16_and_is_not_compared_with_fp32():
    cells = [losing("ring", *RIGHT), losing("tree", *RIGHT), losing("ddp", *shifted(2, 0.01))]
    result = check(block(*cells, gpus=("a GPU",)), 2)
    assert not result.wrong
    assert result.untested == {"ddp": "the number types differ (fp16 and fp32 on a GPU)"}
    assert list(check(block(*cells, gpus=("a GPU",), flags=["--no-amp"]), 2).wrong) == ["ddp"]
    assert not check(block(*cells, gpus=("a GPU",), flags=["--use_amp"]), 2).untested


def test_of_two_that_differ_ddp_is_the_reference():
    with_ddp = block(losing("ring", *shifted(2, 0.01)), losing("ddp", *RIGHT))
    [finding] = equal_results(with_ddp)
    assert "ring is not equal to ddp, PyTorch's own, from step 2 on" in finding.text
    without = block(losing("ring", *shifted(2, 0.01)), losing("tree", *RIGHT))
    [finding] = equal_results(without)
    assert finding.wrong
    assert "ring and tree do not compute the same from step 2 on" in finding.text
    assert "At least one of them is wrong; a comparison with ddp shows which." in finding.text


def test_the_majority_is_right_even_without_ddp():
    wrong = losing("ddp", *shifted(2, 0.01))
    result = check(block(losing("ring", *RIGHT), losing("tree", *RIGHT), wrong), 2)
    assert (list(result.wrong), result.equal) == (["ddp"], ["tree", "ring"])


def test_two_wrong_ones_that_differ_from_each_other_are_both_named():
    cells = [losing("ring", *shifted(2, 0.01)), losing("tree", *shifted(3, 0.01))]
    cells += [losing("all_reduce", *RIGHT), losing("ddp", *RIGHT)]
    wrong = check(block(*cells), 2).wrong
    assert {sync: deviation.step for sync, deviation in wrong.items()} == {"ring": 2, "tree": 3}


def test_a_loss_that_is_not_finite_is_wrong():
    cells = [losing("ring", 2.56, None, None), losing("tree", *RIGHT), losing("ddp", *RIGHT)]
    wrong = next(equal_results(block(*cells)))
    assert "the loss differs and is not finite" in wrong.text


def test_one_repeat_that_deviates_is_enough():
    cells = [losing(sync, *RIGHT, seeds=(0, 0)) for sync in ("ring", "tree", "ddp")]
    cells[0]["repeats"][1]["losses"][1][1] = 2.7
    assert list(check(block(*cells), 2).wrong) == ["ring"]


def test_ranks_with_different_weights_are_wrong():
    cells = [losing(sync, *RIGHT) for sync in ("ring", "ddp")]
    cells[0]["repeats"][0]["equal_weights"] = False
    wrong = next(finding for finding in equal_results(block(*cells)) if finding.wrong)
    assert "the ranks of ring ended with different weights, although ring claims" in wrong.text
    lossy = losing("topk", *RIGHT)
    lossy["repeats"][0]["equal_weights"] = False
    assert not check(block(lossy, cells[1]), 2).doubtful, "topk claims nothing"


@pytest.mark.parametrize(
    ("cells", "settings", "reason"),
    [
        ([losing("ring", *RIGHT)], {}, "no other strategy that claims to be exact was measured"),
        (
            [losing("ring", *RIGHT), losing("ddp", *RIGHT, seeds=(1,))],
            {},
            "the seeds differ (0 and 1)",
        ),
        (
            [losing("ring", *RIGHT), losing("ddp", *shifted(1, 0.01))],
            {},
            "the losses differ at step 1, before any gradient is exchanged: initial weights or "
            "batches are not the same",
        ),
        (
            [losing("ring", None, None), losing("ddp", None, None)],
            {"compute": "laptop"},
            "emulated compute has no losses",
        ),
        ([losing("ring"), losing("ddp")], {}, "the losses of the first steps were not recorded"),
    ],
)
def test_what_cannot_be_compared_says_why(cells, settings, reason):
    found = list(equal_results(block(*cells, **settings)))
    assert all(finding.caution and not finding.wrong for finding in found)
    assert "not comparable: " + reason in " ".join(finding.text for finding in found)
    assert len(found) == 1


def test_one_with_other_batches_does_not_stop_the_test_of_the_others():
    cells = [losing("ring", *shifted(2, 0.01)), losing("tree", *RIGHT), losing("ddp", *RIGHT)]
    result = check(block(*cells, losing("overlapped", *shifted(1, 0.1))), 2)
    assert list(result.wrong) == ["ring"]
    assert list(result.untested) == ["overlapped"]


def test_lossy_strategies_are_not_tested():
    assert list(equal_results(block(losing("topk", *RIGHT)))) == []


# --- real runs ---


def run_together(folder, script, *syncs):
    """Run these strategies on two ranks at the same time, and return the runs' folders."""
    started = []
    for sync in syncs:
        group = ["--master-ip", "127.0.0.1", "--master-port", free_port(), "--num-nodes", 2]
        flags = ["--dataset", "digits", "--batch-size", 64, *TINY, "--max-steps", 5, "--threads", 1]
        flags += ["--measure-only", "--untimed-steps", 1, "--output-dir", folder, *group]
        started += [
            Started(
                [sys.executable, *map(str, [script, "--sync", sync, *flags, "--rank", rank])],
                cwd=folder,
                env=user_environment(),
                forked=True,
            )
            for rank in (0, 1)
        ]
    for one in started:
        ended = one.end()
        assert ended.status == 0, ended.err
    return [next((folder / f"PartTwo-{sync}").iterdir()) for sync in syncs]


def test_a_report_on_real_runs_names_the_wrong_strategies(tmp_path, capsys):
    """ring divides by a literal 4, tree does not divide, rank 1 of halving_doubling keeps its own.

    The other two are right.
    """
    runs = run_together(tmp_path, WRONG_PART, "ring", "tree", "halving_doubling", "all_reduce")
    runs += run_together(tmp_path, ROOT / "PartTwo" / "main.py", "gather_scatter")
    assert report_on(runs, reports=tmp_path / "reports", scaling="strong") == 0
    printed = capsys.readouterr().out
    for sync in ("ring", "tree", "halving_doubling"):
        assert f"{sync} is not equal to the others from step 2 on" in printed.replace("\n", " ")
        assert any(
            line.split()[0] == sync and "yes: WRONG" in line
            for line in printed.splitlines()
            if line.strip()
        )
    [path] = (tmp_path / "reports").glob("report-*/results.json")
    results = json.loads(path.read_text())
    (found,) = blocks(results)
    result = check(found, 2)
    assert set(result.wrong) == {"ring", "tree", "halving_doubling"}
    assert result.unequal_ranks == ["halving_doubling"]
    assert set(result.equal) == {"all_reduce", "gather_scatter"}
    assert results["settings"]["steps"] == 4
    last = printed.rstrip().splitlines()[-1]
    assert last == f"report: {path.parent / 'report.html'}"


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
