"""benchmarks/predictions.py: the scores, what it prints, and what the page of lab whatif keeps."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.predictions import (
    Scored,
    families,
    leave_one_out,
    main,
    score,
    scores,
    validate,
)
from lab.predict.fitting import fit
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import published_path, read_published
from lab.whatif.data import FAMILIES
from tests.helpers import ROOT
from tests.lab.predict.measured_steps import table

TODAY = ROOT / "benchmarks/clusters_today.csv"
RULES = ("perfect_scaling", "no_overlap_line_rate", "overlap_line_rate")


@pytest.fixture(scope="module")
def given():
    """Return the scored rows of the file that comes with the project."""
    return validate(read_published(published_path()))


@pytest.fixture
def rows_of(tmp_path):
    def read(*rows):
        path = tmp_path / "steps.csv"
        path.write_text(table(*rows))
        return read_published(path)

    return read


def test_a_score_is_what_one_computes_by_hand(rows_of):
    measured = [
        {"strategy": "gather_scatter", "measured_step_s": "1"},
        {"strategy": "all_reduce", "measured_step_s": "2"},
        {"strategy": "ddp", "measured_step_s": "4"},
        {"strategy": "ddp", "measured_step_s": "5"},
        {"strategy": "ring", "measured_step_s": "5", "nodes": "8"},
    ]
    rows = rows_of(*measured)
    predicted = [1.1, 1.6, 3.0, 1.2, 5.0]  # errors 0.1, 0.2, 0.25, 0.76, 0
    baselines = dict.fromkeys(RULES, 2.0)  # errors 1, 0, 0.5, 0.6, 0.6
    scored = [
        Scored(row, seconds, 0.9 * seconds, 1.1 * seconds, baselines)
        for row, seconds in zip(rows, predicted, strict=True)
    ]
    assert scored[1].error == pytest.approx(-0.2)
    found = score(scored)
    assert found.rows == 5
    assert found.median_error == pytest.approx(0.2)
    assert found.p90_error == pytest.approx(0.25 + 0.6 * (0.76 - 0.25))
    assert found.inside == pytest.approx(2 / 5)  # 0.99 to 1.21, and 4.5 to 5.5
    perfect = found.baselines[RULES[0]]
    assert (perfect.median_error, perfect.p90_error) == pytest.approx((0.6, 0.84))
    # Of 6 pairs on 4 nodes one compares ddp with itself, and one has the wrong order.
    assert (found.pairs, found.pairs_in_order) == (5, 4 / 5)


def test_the_simple_rules_are_the_envelope_s(rows_of):
    flat = {"strategy": "all_reduce_flat", "batch_per_rank": "16"}
    rooted = {"strategy": "gather_scatter", "rate_gbit": ""}
    found = validate(rows_of(flat, rooted))
    by_ring, by_root = (row.baselines for row in found)
    assert by_ring["perfect_scaling"] == pytest.approx(0.1)
    seconds = 0.1 + 2 * 3 / 4 * 100e6 * 8 / 10e9
    assert by_ring["no_overlap_line_rate"] == pytest.approx(seconds)
    assert by_ring["overlap_line_rate"] == pytest.approx(
        seconds, rel=0.02
    )  # one message, at the end
    seconds = 0.2 + 2 * 3 * 100e6 * 8 / 7e9
    assert by_root["no_overlap_line_rate"] == pytest.approx(seconds, rel=0.001)


def test_a_fit_finds_the_cluster_that_made_the_steps(rows_of):
    before = Beliefs.of(load_priors())
    names = [prior.name for prior in before.priors]
    slow = before.mean.copy()
    slow[names.index("nccl-tcp-vm.most_gbit")] = -1.5
    made = []
    for row in rows_of({"rate_gbit": ""}, {"rate_gbit": "", "nodes": "8"}):
        cell = row.cell(before)
        seconds = float(np.exp(cell.log_steps(before, slow[:, None])[0]))
        made.append(replace(cell, measured_seconds=seconds))
    found = fit(before, made)
    assert found.mean[names.index("nccl-tcp-vm.most_gbit")] == pytest.approx(-1.5, abs=0.5)
    for cell in made:
        seconds = float(np.exp(cell.log_steps(before, found.mean[:, None])[0]))
        assert seconds == pytest.approx(cell.measured_seconds, rel=0.03)


def test_the_given_half_is_predicted_better_than_by_simple_rules(given):
    found = scores(given)
    assert list(found)[:3] == ["all", "gloo", "nccl"]
    assert found["all"].rows == 62
    assert found["all"].median_error < 0.09
    assert found["gloo"].median_error < 0.14
    assert found["nccl"].median_error < 0.08
    assert 0.75 <= found["all"].inside <= 0.9
    for family in ("all", "gloo"):
        for rule in found[family].baselines.values():
            assert found[family].median_error < rule.median_error
    assert (found["all"].pairs, found["all"].pairs_in_order) == (27, 1)


def test_the_command_prints_scores_as_json(capsys):
    main(["--json"])
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"summary", "rows"}
    whole = printed["summary"]["all"]
    assert {"rows", "median_error", "p90_error", "inside", "baselines"} <= set(whole)
    assert set(whole["baselines"]) == set(RULES)
    assert whole["rows"] == len(printed["rows"]) == 62
    assert whole["pairs_in_order"] == 1
    errors = []
    for row in printed["rows"]:
        assert row["error"] == pytest.approx(row["predicted_step_s"] / row["measured_step_s"] - 1)
        assert row["low_s"] < row["high_s"]
        errors.append(abs(row["error"]))
    assert whole["median_error"] == pytest.approx(float(np.median(errors)))
    assert printed["rows"][0]["group"] == "cs744-A"
    assert printed["rows"][0]["rate_gbit"] is None


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("python benchmarks/predictions.py", published_path()),
        ("python benchmarks/predictions.py benchmarks/clusters_today.csv", TODAY),
    ],
)
def test_the_page_has_the_table_of_the_command(command, path):
    """The page's block is held by tests/test_documentation.py; here its numbers."""
    text = (ROOT / "benchmarks/predictions.md").read_text()
    page = text.partition(f"\n{command}\n")[2].partition("\n## ")[0]
    for name, of_group in scores(validate(read_published(path))).items():
        shown = {"gloo": "Gloo", "nccl": "NCCL"}.get(name, name)
        start = f"\n{shown} "
        assert page.count(start) == 1, shown
        cells = page.partition(start)[2].partition("\n")[0].split()
        assert int(cells[0]) == of_group.rows
        percents = [float(cell.rstrip("%")) / 100 for cell in cells[1:7]]
        medians = [rule.median_error for rule in of_group.baselines.values()]
        expected = [of_group.median_error, of_group.p90_error, of_group.inside, *medians]
        assert percents == pytest.approx(expected, abs=0.006)


def test_nodes_of_today_are_predicted_as_well_as_those_of_before():
    """By priors of one adapter without GPUDirect, 3 of these 10 were inside, up to 17 times off."""
    found = scores(validate(read_published(TODAY)))["all"]
    assert found.rows == 10
    assert found.inside >= 0.75
    assert found.median_error <= 0.08


def test_a_file_of_one_s_own_and_odd_names_of_groups(tmp_path, capsys):
    path = tmp_path / "steps.csv"
    path.write_text(table({"group": "all"}, {"group": "[red]mine[/]"}))
    main([str(path)])
    printed = capsys.readouterr().out
    assert "group all" in printed
    assert "[red]mine[/]" in printed
    assert "priors.toml" in printed


def test_a_file_that_is_none_ends_with_a_message(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "none.csv")])
    assert ended.value.code == 2
    assert "none.csv cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "said"),
    [("mine.csv", "leave out"), ("--json", "not allowed"), ("--leave-one-out", "not allowed")],
)
def test_words_that_write_would_ignore_are_refused(word, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--write", word])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_group_left_out_is_predicted_by_the_others_alone():
    """The group's own steps, ten times as long, move its own errors and not its predictions."""
    group = "cos568-B"
    few = (group, "cs744-A", "cs744-D")
    rows = [row for row in read_published(published_path()) if row.group in few]
    slower = [
        replace(row, measured_step_s=10 * row.measured_step_s) if row.group == group else row
        for row in rows
    ]
    as_measured, as_changed = (
        [pair for pair in leave_one_out(given) if pair[0].row.group == group]
        for given in (rows, slower)
    )
    for (unfitted, fitted), (_, changed) in zip(as_measured, as_changed, strict=True):
        assert fitted.predicted == changed.predicted
        assert fitted.predicted != unfitted.predicted
        assert changed.error == pytest.approx((fitted.error + 1) / 10 - 1)


def test_the_page_has_the_scores_of_the_published_steps():
    """After a change of formulas, priors or published.csv: benchmarks/predictions.py --write."""
    kept = json.loads(FAMILIES.read_text())
    for family, expected in zip(kept, families(), strict=True):
        texts = ("backend", "label")
        assert [family.pop(name) for name in texts] == [expected.pop(name) for name in texts]
        assert family == pytest.approx(expected, rel=1e-6)  # another processor's last digits
