"""``lab predict --fit``: a reader's own measured steps, as tables and as folders of runs."""

import json

import numpy as np
import pytest

from common.errors import UserError
from lab.cli import main
from lab.predict.fitting import fit
from lab.predict.observed import read_observed
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import published_path, read_published
from lab.predict.tables import interval
from tests.lab.predict.measured_runs import run_folder

OWN_STEP = ["--step-time", "2.522s", "--batch", "256", "--model", "vgg11", "--scaling", "strong"]
ON_LINKS = ["--nodes", "4", "--rate", "10gbit", "--backend", "gloo"]
SYNC = ["--sync", "gather_scatter", "all_reduce", "ddp"]
HEAD = "nodes,strategy,global_batch,step_seconds\n"


def predict(capsys, *flags):
    """Return the rows by strategy, and the fit, that the command prints as JSON."""
    assert main(["predict", *OWN_STEP, *ON_LINKS, *SYNC, *map(str, flags), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {row["sync"]: row for row in found["rows"]}, found.get("fit")


def table(folder, text):
    path = folder / "observed.csv"
    path.write_text(text)
    return path


def test_one_measured_step_moves_all_of_its_cluster(tmp_path, capsys):
    before, _ = predict(capsys)
    after, fitted = predict(capsys, "--fit", table(tmp_path, HEAD + "4,all_reduce,256,1.4\n"))
    (step,) = fitted["steps"]
    assert step["measured_step_s"] == 1.4
    assert step["predicted_before_s"] == pytest.approx(
        before["all_reduce"]["prediction"]["step_seconds"]
    )
    assert step["predicted_after_s"] == pytest.approx(1.4, rel=0.05)
    for sync in ("gather_scatter", "ddp"):  # as slow a cluster
        slower = after[sync]["prediction"]["step_seconds"]
        assert slower > before[sync]["prediction"]["step_seconds"]
    width_before, width = (
        rows["all_reduce"]["high_seconds"] / rows["all_reduce"]["low_seconds"]
        for rows in (before, after)
    )
    assert width < width_before
    moved = {prior["prior"]: prior for prior in fitted["priors"]}
    message = moved["gloo-tcp-vm.message_us"]
    assert message["after"] > 1.2 * message["before"]
    assert message["low"] < message["after"] < message["high"]
    assert not any(name.startswith("nccl") for name in moved)


def test_the_text_says_what_moved_and_how_far(tmp_path, capsys):
    path = table(tmp_path, HEAD + "4,all_reduce,256,1.4\n")
    assert main(["predict", *OWN_STEP, *ON_LINKS, *SYNC, "--fit", str(path)]) == 0
    said = capsys.readouterr().out
    assert "all_reduce on 4 nodes: measured 1.4 s" in said
    assert "as you measured" in said


def test_folders_of_runs_and_tables_say_the_same(tmp_path, capsys):
    rows, fitted = predict(capsys, "--fit", run_folder(tmp_path / "run"))
    (step,) = fitted["steps"]
    assert (step["nodes"], step["ranks_per_node"], step["sync"]) == (4, 1, "all_reduce")
    same, _ = predict(capsys, "--fit", table(tmp_path, HEAD + "4,all_reduce,256,1.3\n"))
    assert rows == same
    (two,) = read_observed([run_folder(tmp_path / "two", nodes=(0, 0, 1, 1))])
    assert (two.nodes, two.ranks_per_node) == (2, 2)


def test_a_folder_of_runs_has_each_of_them(tmp_path):
    for name, seconds in (("first", 1.3), ("second", 1.4)):
        run_folder(tmp_path / "PartTwo-all_reduce" / name, step_seconds=seconds)
    (tmp_path / "PartTwo-all_reduce" / "unfinished").mkdir()
    steps = read_observed([tmp_path / "PartTwo-all_reduce"])
    assert [step.step_seconds for step in steps] == [1.3, 1.4]


def test_the_settings_of_a_run_are_those_of_its_step(tmp_path, capsys):
    predicted = {}
    settings = {
        "default": {},
        "buckets": {"bucket_mb": 1},
        "batchnorm": {"sync_batchnorm": "on"},
        "accumulation": {"accumulation_steps": 4},
    }
    for name, config in settings.items():
        folder = run_folder(tmp_path / name, sync="ddp", **config)
        _, fitted = predict(capsys, "--fit", folder)
        predicted[name] = fitted["steps"][0]["predicted_before_s"]
    assert predicted["buckets"] > predicted["default"]  # more messages
    assert predicted["batchnorm"] > 1.1 * predicted["default"]  # 16 messages that layers wait for
    assert predicted["accumulation"] > predicted["default"]  # less backward hides messages
    flags = ["--fit", table(tmp_path, HEAD + "4,ddp,256,1.3\n"), "--bucket-mb", 1]
    _, fitted = predict(capsys, *flags)
    assert fitted["steps"][0]["predicted_before_s"] == pytest.approx(predicted["buckets"])


def test_a_row_may_have_a_rate_and_ranks_of_its_own(tmp_path):
    text = "nodes,ranks_per_node,strategy,global_batch,step_seconds,rate\n"
    text += "2,8,ddp,512,0.4,25\n2,8,ddp,512,0.3,100gbit\n4,,ddp,512,0.3,\n"
    first, second, third = read_observed([table(tmp_path, text)])
    assert (first.ranks_per_node, first.rate_bits, second.rate_bits) == (8, 25e9, 100e9)
    assert (third.ranks_per_node, third.rate_bits) == (1, None)


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ("4,all_reduce,256,0.3\n", "compute for"),
        ("4,all_reduce,256,1.0\n4,all_reduce,256,2.0\n", "are the same run"),
        ("1,all_reduce,256,2.5\n", "on one node"),
        ("4,allreduce,256,1.0\n", "did you mean all_reduce"),
        ("4,all_reduce,256,soon\n", "step_seconds: got 'soon'"),
        ("4.5,all_reduce,256,1.0\n", "give a whole number"),
        ("4,all_reduce,256\n", "step_seconds: got ''"),
        ("4,all_reduce,256,1,5\n", "5 values for 4 columns"),
        ("4,all_reduce,256,100\n", "no Gloo over TCP on virtual machines explains"),
        ("4,all_reduce,2,1.0\n", "too few samples"),
        ("200000,all_reduce,256,1.0\n", "give 2 to 100,000"),
        ("4,none,256,0.7\n", "sends nothing"),
        ("", "has no rows"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, rows, part):
    path = table(tmp_path, HEAD + rows)
    with pytest.raises(UserError, match=part):
        main_raising([*OWN_STEP, *ON_LINKS, "--fit", str(path)])


def main_raising(flags):
    """Run the command, whose errors reach the caller."""
    from lab.cli import build_parser

    args = build_parser().parse_args(["predict", *flags])
    return args.run(args)


def test_other_files_and_folders_are_named(tmp_path, capsys):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    cases = {
        other: "has no column nodes",
        tmp_path / "empty": "has no finished run",
        tmp_path / "missing.csv": "cannot be read",
        run_folder(tmp_path / "resnet", model="resnet50"): "it trained resnet50",
        run_folder(tmp_path / "untimed", step_seconds=None): "no timed step",
        run_folder(tmp_path / "alone", nodes=(0, 0)): "on one node",
        run_folder(tmp_path / "uneven", nodes=(0, 0, 1)): "as many ranks on each node",
        run_folder(tmp_path / "foreign", sync="psgd"): "sync: got 'psgd'",
    }
    for path, part in cases.items():
        assert main(["predict", *OWN_STEP, *ON_LINKS, "--fit", str(path)]) == 2
        assert part in capsys.readouterr().err
    fit_alone = ["predict", "--fit", str(table(tmp_path, HEAD + "4,ddp,256,1\n"))]
    assert main(fit_alone) == 2
    assert "add --rate" in capsys.readouterr().err


def test_one_step_of_a_setting_halves_the_error_of_the_others():
    """On the published steps, to which no prior is fitted."""
    rows = read_published(published_path())
    known = Beliefs.of(load_priors())

    def setting(row):
        own = (row.one_rank_step_s, row.one_rank_batch, row.grad_megabytes)
        return row.group, row.model, row.software, row.transport, *own

    before, after, inside = [], [], []
    for given in rows:
        others = [row for row in rows if row is not given and setting(row) == setting(given)]
        if not others:
            continue
        learned = fit(known, [given.cell(known)])
        for row in others:
            blind = row.cell(known)
            before.append(blind.predicted(blind.scenario) / row.measured_step_s - 1)
            cell = row.cell(learned)
            after.append(cell.predicted(cell.scenario) / row.measured_step_s - 1)
            drawn = cell.scenario.drawn()
            low, high = interval(cell.predicted(drawn) * drawn.remainder)
            inside.append(low <= row.measured_step_s <= high)
    assert np.median(np.abs(after)) < 0.05
    assert np.median(np.abs(after)) < 0.65 * np.median(np.abs(before))
    assert 0.75 <= np.mean(inside) <= 0.95
