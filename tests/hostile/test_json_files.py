"""Hostile JSON files: every reader refuses them with one message, or what it accepts can be used.

Each generated case starts from a good file, so that it reaches deep into the reader.
"""

import io
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from msgspec import to_builtins
from rich.console import Console

from common.emulation.compute_profile import Layer, Profile, SectionTime, load_profile
from common.errors import UserError
from common.utils.typed_json import write_json
from lab.cli import main
from lab.compare.imported_runs import collect
from lab.compare.jobs import merge_results, planned_run
from lab.compare.runner import open_comparison
from lab.compare.settings import Settings
from lab.comparison.record import read_comparison, write_comparison
from lab.predict.calibration_file import describe, load_calibration, reference_path
from lab.predict.printing import summarize
from lab.predict.scenario import Scenario
from lab.predict.tables import message_plans, predict_table, scaling_limits_of
from lab.report import html, tables, timeline, view
from lab.report.terminal import print_answer
from tests.helpers.hostile import CASES, altered, changed, damaged, run_cases, untouched
from tests.lab.compare.test_results import write_run

SAMPLE = Path(__file__).parents[2] / "reports/samples/compare-digits-1gbit/results.json"
GOOD = json.loads(reference_path().read_text())
PLANS = message_plans(["none", "gather_scatter", "ring", "ddp"])
SECOND = SectionTime(0.1, 0.01)
PROFILE = Profile(
    name="p",
    machine="m",
    device="cpu",
    threads=1,
    made="2026-01-01T00:00:00",
    model="vgg11",
    image=(32, 32),
    layers=(Layer("conv", SECOND, SECOND, ("weight", "bias")), Layer("relu", SECOND, SECOND)),
    update_seconds=0.1,
    steps=((16.0, 0.5, 0.6),),
)


def hostile(content):
    """Return a strategy: bytes of the good content altered, or damaged."""
    whole = json.dumps(content).encode()
    return altered(content).map(lambda value: json.dumps(value).encode()) | damaged(whole)


def check_reader(tmp_path, cases, name, content, use):
    """Write each case to a file, and let ``use`` read and use it; nothing may be written."""
    path = tmp_path / name
    path.write_text(json.dumps(content))
    use(path)  # the good file is accepted, and what is slow to import is there

    def check(case):
        path.write_bytes(case)
        with untouched(tmp_path):
            use(path)

    run_cases(cases, hostile(content), check)


# --- calibrations and profiles ---


def shortened(calibration):
    """Return the reference with few gradients and points, so that changes hit what matters."""
    fits = {name: fit | {"points": fit["points"][:1]} for name, fit in calibration["fits"].items()}
    compute = calibration["compute"] | {"ready_bytes": [40, 100], "ready_shares": [0.5, 1.0]}
    gradients = calibration["gradients"][:2]
    batchnorm = calibration["batchnorm"][:1]
    shorter = {"compute": compute, "gradients": gradients, "batchnorm": batchnorm}
    return calibration | {"fits": fits} | shorter


def predict(path):
    """Read a calibration, predict from it, and check that all numbers are finite."""
    calibration = load_calibration(path)
    here = Scenario(
        calibration=calibration,
        batch_size=256,
        scaling="strong",
        sync_batchnorm=calibration.batchnorm is not None,
    )
    on_links = replace(here, rate_bits=1e9, ranks_per_node=3)
    rows = predict_table([1, 2, 100_000], PLANS, here)
    limits = scaling_limits_of(PLANS, on_links)
    lines = [*describe(calibration)]
    for scenario in (here, on_links):
        lines += summarize(scenario, is_reference=False)
    numbers = json.dumps([asdict(row) for row in [*rows, *limits]], allow_nan=False)
    assert "inf" not in " ".join(lines) + numbers


@CASES
def test_a_calibration_that_is_accepted_predicts_finite_numbers(cases, tmp_path):
    check_reader(tmp_path, cases, "c.json", shortened(GOOD), predict)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is cut off or not JSON"),
        (b"\xff\xfe", "is cut off or not JSON"),
        (b"null", "Expected object"),
        (b"[" * 200_000, "Expected object"),
        (b'{"format": 1}', "is not a calibration of this project"),
        (("format", 2), "has format 2, this version reads 1"),
        (("format", True), "has format True, this version reads 1"),
        (("network/alpha_seconds", -1), "network.alpha_seconds: Expected float >= 0"),
        (("network/alpha_seconds", 10**400), "network.alpha_seconds: Number out of range"),
        (("network/kinds/ring", {}), "network.kinds[...]: Object missing required field alpha_se"),
        (("network/overlap_cost", 2), "network.overlap_cost: Expected float <= 1"),
        (("network", []), "network: Expected object"),
        (("gradients", []), "gradients: Expected array of length >= 1"),
        (("gradients/0/shape", [2**30, 2**30]), "expected at most 1,099,511,627,776 entries"),
        (("gradients/0/itemsize", 3), "itemsize: got 3, expected 1, 2, 4 or 8 bytes"),
        (("cores", 10**9), "cores: Expected int <= 65536"),
        (("ranks_here", 9), "ranks_here: got 9, expected at most ranks, 2"),
        (("others_share", None), "others_share: Expected float"),
        (("made", "yesterday"), "made: Expected str"),
        (("made", "2026-13-01T00:00:00"), "month must be in 1..12"),
        (("name", "\x1b]0;x\x07"), "name: Expected str without control characters"),
        (("machine", {"cpu": [["x"]]}), "machine['cpu']: got [['x']], expected text"),
        (("compute/profiles/0/ranks", 3), "the ranks of profiles must rise"),
        (("compute/ready_shares", [0.5]), "entries, ready_shares 1: expected as many"),
        (("fits", {}), "is missing: network.kinds has it"),
    ],
)
def test_a_hostile_calibration_gives_one_exact_message(content, said, tmp_path):
    path = tmp_path / "c.json"
    if isinstance(content, tuple):
        content = json.dumps(changed(GOOD, *content)).encode()
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        load_calibration(path)
    message = str(raised.value)
    assert said in message
    assert message.startswith((f"the calibration {path}", f"{path} is not a calibration"))
    assert message.endswith(": run `lab calibrate` to write a new one")
    assert message.isprintable()


def test_a_calibration_that_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path, "a folder")):
        with pytest.raises(UserError, match=f"is {kind}, not a regular file"):
            load_calibration(path)
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**34)
    with pytest.raises(UserError, match="at most 33,554,432 are read"):
        load_calibration(tmp_path / "large")


@CASES
def test_a_profile_that_is_accepted_gives_finite_times(cases, tmp_path):
    def use(path):
        profile = load_profile(str(path), model="vgg11")
        times = [layer.forward.at(256) + layer.backward.at(256) for layer in profile.layers]
        json.dumps([times, sum(times)], allow_nan=False)

    check_reader(tmp_path, cases, "p.json", PROFILE.as_json(), use)


# --- results and run folders ---


def smaller():
    """Return the sample's results with two cells, short lists, and a failed repeat."""
    results = json.loads(SAMPLE.read_text())
    results["cells"] = results["cells"][:2]
    for cell in results["cells"]:
        for repeat in cell["repeats"]:
            repeat["losses"] = repeat["losses"][:3]
    results["cells"][1]["repeats"][2] |= {"status": "failed", "message": "why", "ranks": []}
    kept = {cell["id"] for cell in results["cells"]} & results["timelines"].keys()
    results["timelines"] = {name: results["timelines"][name] for name in kept}
    for step in results["timelines"].values():
        step["ranks"] = [rank | {"messages": rank["messages"][:2]} for rank in step["ranks"][:2]]
    return results


def render(results):
    """Make all texts of the report, without drawing figures."""
    blocks = view.blocks(results)
    tables.markdown(blocks)
    tables.csv_text(blocks)
    for key, step in results.timelines.items():
        json.dumps(timeline.trace(step, key), allow_nan=False)
    page = html.render(results, [(block, []) for block in blocks], [])
    shown = io.StringIO()
    print_answer(Console(file=shown), results)
    assert "\x1b" not in shown.getvalue() + page
    return page


@CASES
def test_results_that_are_accepted_can_be_reported(cases, tmp_path):
    check_reader(
        tmp_path, cases, "results.json", smaller(), lambda path: render(read_comparison(path))
    )


@CASES
def test_a_run_folder_that_is_accepted_can_be_reported(cases, tmp_path):
    folder = write_run(tmp_path / "run")
    step = json.loads(SAMPLE.read_text())["timelines"]["all_reduce-n4-1gbit"]
    (folder / "timeline.json").write_text(json.dumps(step))
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    one_line = good["metrics.jsonl"].splitlines()[0]
    contents = good | {"metrics.jsonl": one_line}
    strategy = st.sampled_from(sorted(good)).flatmap(
        lambda name: st.tuples(st.just(name), hostile(json.loads(contents[name])))
    )

    render(collect([folder], scaling="strong"))

    def check(case):
        name, content = case
        (folder / name).write_bytes(content + b"\n")  # without its end, a line would be left out
        try:
            with untouched(tmp_path):
                for scaling in ("strong", "weak"):
                    render(collect([folder], scaling=scaling))
        finally:
            (folder / name).write_bytes(good[name])

    run_cases(cases, strategy, check)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "{}", "config.json: Object missing required field world_size"),
        ("ranks.json", '{"ranks": []}', "ranks.json: ranks: Expected array of length"),
        ("environment.json", '{"usable_cores": []}', "usable_cores: Expected int"),
        ("summary.json", '{"test_accuracy": 2}', "test_accuracy: Expected float <= 1"),
        ("metrics.jsonl", '{"step": 1, "loss": 1}\n{"step"\n', "metrics.jsonl, line 2 is cut off"),
        ("metrics.jsonl", '{"step": "a", "loss": 1}\n', "line 1: step: Expected int"),
        ("timeline.json", '{"ranks": 3}', "timeline.json: ranks: Expected array"),
    ],
)
def test_a_run_that_cannot_be_reported_is_named(name, content, said, tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(content)
    assert main(["report", str(folder), "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error, error
    assert "the run has not finished, or its folder was not copied completely" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("size", "said"), [(0, "world_size: Expected int >= 1"), (3, "config.json has world_size 3")]
)
def test_a_run_whose_files_contradict_each_other_is_refused(size, said, tmp_path):
    folder = write_run(tmp_path / "run", world_size=size)
    with pytest.raises(UserError, match=said):
        collect([folder], scaling="strong")


# --- plans ---


def plan(tmp_path, **settings):
    """Return the folder and the results of a plan, made without running anything."""
    settings = Settings(nodes=(1, 2), sync=("ring",), **settings)
    return open_comparison(settings, reports=tmp_path, code={"torch": "2"})


@CASES
def test_a_plan_that_is_accepted_names_its_runs(cases, tmp_path):
    folder, good = plan(tmp_path, repeats=2)

    def use(path):
        run, _ = planned_run(path.parent, 1)
        for inside in (run.path, run.logs):
            assert Path(os.path.normpath(inside)).is_relative_to(folder)
        assert run.title
        assert run.seed >= 0

    check_reader(folder, cases, "results.json", to_builtins(good), use)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("settings/seeds", [-1], "settings: --seed: got -1"),
        ("settings/repeats", 10**12, "--repeats: got 1000000000000"),
    ],
)
def test_a_damaged_plan_is_refused(place, value, said, tmp_path):
    folder, results = plan(tmp_path, repeats=2)
    (folder / "results.json").write_text(json.dumps(changed(to_builtins(results), place, value)))
    with pytest.raises(UserError, match=said):
        planned_run(folder, 1)


@pytest.mark.parametrize(
    "change", [{"sync": "unknown"}, {"sync": "ddp"}, {"rate": 1e9, "nodes": 3}]
)
def test_what_a_plan_runs_follows_from_its_settings_alone(change, tmp_path):
    """Changed cells in the file change nothing, neither in a run nor in the report."""
    folder, results = plan(tmp_path, repeats=2)
    planned = planned_run(folder, 1)[0].cell
    content = to_builtins(results)
    content["cells"][1].update(change)
    (folder / "results.json").write_text(json.dumps(content))
    assert planned_run(folder, 1)[0].cell == planned
    assert planned in merge_results(folder, read_comparison(folder / "results.json")).cells


# of files, of places, and in each way to write a flag
HOSTILE_FLAGS = ["--output_dir=/tmp/x", "--checkpoint x.pt", "--recipe x.toml", "--data-dir /tmp/x"]
HOSTILE_FLAGS += ["--mirror http://x", "--pretrained-weights x.pt", "--compute x.json", "-- x"]
HOSTILE_FLAGS += ["--resume x.pt", "--run-name x", "--log-wandb", "--dist-url tcp://x:1", "-Mx"]
HOSTILE_FLAGS += ["--distributed", "--print-config", "--help", "--amp --cuda 0"]


@pytest.mark.parametrize("flags", HOSTILE_FLAGS)
def test_a_plan_cannot_choose_files_and_hosts(flags, tmp_path, capsys):
    """Neither one that is made here nor one that somebody sent."""
    folder, _ = plan(tmp_path, flags=tuple(flags.split()))
    new = ["compare", "--plan", "--output-dir", str(tmp_path / "plans"), "--", *flags.split()]
    with untouched(tmp_path):
        assert main(["run-cell", str(folder), "--run", "0"]) == 2
        assert f"{folder}/results.json: settings: flags: got '-" in capsys.readouterr().err
        assert main(new) == 2
        assert "the flags after --: got '-" in capsys.readouterr().err


def test_a_plan_may_have_flags_of_the_training(tmp_path):
    flags = "--threads 2 --no-nesterov --amp_dtype=bf16 --lr 0.1 -b 8 --topk-ratio 0.1 --use-ema"
    folder, _ = plan(tmp_path, flags=tuple(flags.split()))
    assert planned_run(folder, 0)[0].settings.flags == tuple(flags.split())


# --- a folder that somebody sent ---

SCRIPT = "</script><script>alert(1)</script><img src=x onerror=\"alert('2')\">"


def foreign(tmp_path, results):
    """Return the folder of a comparison from elsewhere with these results."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.mark.slow
def test_texts_of_a_foreign_folder_stay_texts(tmp_path, capsys):
    """Neither HTML, nor rich's markup, nor escape sequences of a terminal."""
    results = smaller() | {
        "warnings": [SCRIPT, "[/bold] [link=x]"],
        "differences": [f"model: {SCRIPT} [/red]"],
    }
    results["settings"] |= {"command": SCRIPT, "model": SCRIPT, SCRIPT: SCRIPT}
    results["environment"] |= {"cpu": SCRIPT, SCRIPT: [SCRIPT]}
    results["prediction"]["calibration"] = {SCRIPT: SCRIPT}
    for cell in results["cells"]:
        cell["message"] = SCRIPT
        cell["repeats"][0]["ranks"][0]["host"] = SCRIPT
        results["prediction"]["cells"][cell["id"]] |= {"why": SCRIPT, "in_scope": False}
    folder = foreign(tmp_path, results)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page
    assert "[/red]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("cells/0/id", "../../x", r"cells\[0\]\.id: Expected str"),
        ("cells/0/sync", "../x", r"cells\[0\]\.sync: Expected str"),
        ("timelines", {"/tmp/x": {}}, "key in timelines: Expected str"),
        ("cells/0/repeats/0/folder", "/etc", "has a repeat in '/etc'"),
        ("cells/0/repeats/0/folder", "a/../../b", "expected a folder in"),
        ("warnings", ["\x1b[2J"], r"warnings\[0\]: Expected str without control characters"),
        ("cells/0/nodes", 0, r"cells\[0\]\.nodes: Expected int"),
        ("cells", smaller()["cells"][:1] * 2, "two cells have the id none-n1"),
        ("cells/0/repeats/0/ranks", [], "has 0 ranks, expected 1"),
        ("cells/0/median/step", 0, r"median\.step: Expected"),
        ("settings/scaling", "odd", r"settings\.scaling: "),
        ("format", 2, "has format 2, this version reads 1"),
    ],
)
def test_results_that_lead_out_of_their_folder_or_lie_are_refused(place, value, said, tmp_path):
    folder = foreign(tmp_path, changed(smaller(), place, value))
    with pytest.raises(UserError, match=said) as raised, untouched(folder):
        read_comparison(folder / "results.json")
    assert str(raised.value).endswith("the file is unchanged")


def test_a_report_writes_through_no_link_and_into_no_fifo(tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    for make in (lambda path: path.symlink_to(mine), os.mkfifo):
        for name in ("report.html", "table.md", "step_time.png"):
            folder = foreign(tmp_path, smaller())
            make(folder / name)
            assert main(["report", str(folder)]) == 2
            assert (
                f"{folder / name} leads elsewhere through a link, or is no"
                in capsys.readouterr().err
            )
            shutil.rmtree(folder)
    assert mine.read_text() == "mine"


def test_results_that_could_not_be_read_again_are_not_written(tmp_path):
    folder = foreign(tmp_path, smaller())
    results = read_comparison(folder / "results.json")
    results.cells[0].repeats[0].ranks[0].seconds.step = float("nan")
    with untouched(folder), pytest.raises(UserError, match=r"cannot be written: .*step"):
        write_comparison(folder / "results.json", results)


def test_committed_samples_are_still_read():
    load_calibration(reference_path())
    assert read_comparison(SAMPLE).finished


def test_a_name_of_a_folder_that_is_no_text_is_refused(tmp_path):
    """As ``--output-dir $'\\xff'`` gives it; the file that was there stays."""
    path = tmp_path / "config.json"
    path.write_text("{}")
    folder = os.fsdecode(b"/home/\xff")
    with pytest.raises(UserError, match=r"^'/home/\\udcff' has bytes that are no text[^\n]*$"):
        write_json(path, {"output_dir": folder}, dict[str, Any])
    assert path.read_text() == "{}"
