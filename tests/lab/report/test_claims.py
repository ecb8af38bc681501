"""What a report says of strategies that claim to be exact: from what their runs recorded, alone."""

import json
import subprocess
import sys

import pytest

from common.errors import UserError
from common.profiling.records import GradientClaim
from lab.compare.reporting import report_on
from lab.comparison.record import read_comparison, write_comparison
from lab.report.findings import EQUAL, findings
from lab.report.view import blocks
from tests.helpers import ROOT, TINY, Started, free_port, user_environment
from tests.helpers.report_samples import cell, results

WRONG_PART = ROOT / "tests" / "helpers" / "wrong_part_two.py"
SUM = [[1.0, 1.0]] * 2
MEAN = [[0.5, 0.5]] * 2


def comparison(*cells, **settings):
    whole = results(predict=False)
    whole.cells = list(cells)
    whole.timelines = {}
    whole.settings |= settings
    return whole


def block(*cells, **settings):
    (found,) = blocks(comparison(*cells, **settings))
    return found


def claims_of(found):
    """Return what is known of each strategy on 2 nodes."""
    return {row.sync: row.claim for row in found.at(2)}


def wrong_in(claims):
    """Return the pattern of each strategy that gave something else than the mean."""
    seen = {sync: claim.seen for sync, claim in claims.items() if claim.seen}
    return {sync: one.judgement.pattern for sync, one in seen.items() if not one.judgement.right}


def claiming(sync, *claims, **more):
    """Return a cell on 2 nodes with a repeat for each claim."""
    entry = cell(sync, 2, repeats=len(claims), **more)
    for run, recorded in zip(entry.repeats, claims, strict=True):
        run.claim = recorded
    return entry


def weights(rows, residue=2e-8):
    return GradientClaim(step=1, weights=rows, residue=residue)


UNKNOWN = GradientClaim(step=1, why_not="all gradients of step 1 are zero")


@pytest.mark.parametrize(
    ("claims", "pattern"),
    [
        ([weights(SUM)], "sum"),
        ([weights([[0.25, 0.25]] * 2)], "twice"),
        ([weights([[1 / 3, 1 / 3]] * 2)], "literal"),
        ([weights([[1, 0], [0, 1]])], "own"),
        ([weights([[0.5, 0.5], None], residue=0.3)], "no sum"),
        ([weights(MEAN, residue=0.3)], "no sum"),  # the sums explain nothing
        ([weights(MEAN), weights(SUM)], "sum"),  # one wrong repeat is enough
        ([UNKNOWN, weights(SUM)], "sum"),
    ],
)
def test_weights_that_are_not_the_mean_are_named(claims, pattern):
    entry = claiming("ring", *claims)
    found = claims_of(block(entry, cell("ddp", 2)))
    assert wrong_in(found) == {"ring": pattern}
    assert (found["ddp"].right, found["ring"].wrong) == (True, True)
    said = [finding for finding in findings(block(entry)) if finding.topic == EQUAL]
    assert said[0].wrong
    assert found["ring"].seen.judgement.sentence in said[0].text
    assert found["ring"].seen.judgement.finding in said[0].evidence


@pytest.mark.parametrize(
    ("claims", "settings", "reason"),
    [
        ([None], {}, "the runs are of an earlier version"),
        ([weights(MEAN), None], {}, "the runs are of an earlier version"),
        ([weights(MEAN), UNKNOWN], {}, UNKNOWN.why_not),
        ([None], {"compute": "laptop"}, "emulated compute has no gradients"),
    ],
)
def test_what_is_not_recorded_is_not_checked_and_never_right(claims, settings, reason):
    found = block(claiming("ring", *claims), **settings)
    claim = claims_of(found)["ring"]
    assert not claim.right
    assert not claim.wrong
    assert reason in claim.why_not
    [said] = [finding for finding in findings(found) if finding.topic == EQUAL]
    assert said.caution
    assert reason in said.text


def test_only_exact_strategies_promise_the_mean_and_equal_weights():
    for sync, contradicted in (("ring", True), ("topk", False)):
        apart = claiming(sync, weights(MEAN))
        apart.repeats[0].equal_weights = False
        claim = claims_of(block(apart))[sync]
        assert claim.wrong == contradicted
        assert not claim.right
        assert not claim.why_not


def test_an_older_file_is_not_checked(tmp_path):
    path = tmp_path / "results.json"
    write_comparison(path, comparison(claiming("ring", weights(MEAN))))
    assert read_comparison(path).cells[0].repeats[0].claim == weights(MEAN)
    entries = json.loads(path.read_text())
    for repeat in entries["cells"][0]["repeats"]:
        del repeat["claim"]
        repeat["one_process"] = {"agrees": True}
    path.write_text(json.dumps(entries))
    claim = claims_of(*blocks(read_comparison(path)))["ring"]
    assert (claim.seen, claim.right, bool(claim.why_not)) == (None, False, True)


@pytest.mark.parametrize("rows", [[[0.5, 0.5]], [[0.5], [0.5]], [[0.5] * 3] * 3])
def test_weights_of_other_ranks_are_refused(tmp_path, rows):
    path = tmp_path / "results.json"
    with pytest.raises(UserError, match="claim"):
        write_comparison(path, comparison(claiming("ring", weights(rows))))
    assert not path.exists()


def test_a_report_imports_nothing_that_trains():
    names = "claims, findings, html, latex, tables, terminal, verdict"
    program = (
        f"from lab.report import {names}\nfrom lab.report.drawings import figure_pages\n"
        "import sys\nprint([name for name in sys.modules if name == 'torch' or "
        "name.startswith(('common.training', 'common.experiment', 'common.run_setup'))])"
    )
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def run_together(folder, script, *syncs):
    """Run these strategies on two ranks at the same time, and return the runs' folders."""
    started = []
    flags = ["--dataset", "digits", "--batch-size", 64, *TINY, "--max-steps", 2, "--threads", 1]
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


def test_a_report_on_real_runs_names_what_wrong_strategies_do(tmp_path, capsys):
    """Only all_reduce and gather_scatter are right; WRONG_PART says what the others do."""
    wrong = {
        "ring": "twice",  # 4, which on two ranks is 2 twice
        "tree": "sum",
        "halving_doubling": "some have it",
        "reduce_broadcast": "own",
    }
    runs = run_together(tmp_path, WRONG_PART, *wrong, "all_reduce")
    runs += run_together(tmp_path, ROOT / "PartTwo" / "main.py", "gather_scatter")
    assert report_on(runs, reports=tmp_path / "reports", scaling="strong") == 0
    [path] = (tmp_path / "reports").glob("report-*/results.json")
    printed = capsys.readouterr().out
    assert printed.count("yes: WRONG") == 4
    found = claims_of(*blocks(read_comparison(path)))
    assert wrong_in(found) == wrong
    unequal = {sync for sync, claim in found.items() if claim.unequal_ranks}
    assert unequal == {"halving_doubling", "reduce_broadcast"}
    assert {sync for sync, claim in found.items() if claim.right} == {
        *("all_reduce", "gather_scatter")
    }
    assert not any(claim.why_not for claim in found.values())
    assert printed.endswith(f"\nreport: {path.parent / 'report.html'}\n")
