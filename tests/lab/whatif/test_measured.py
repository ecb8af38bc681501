"""Measured steps in the page: what is published, and the reader's own files."""

import json
from pathlib import Path

import msgspec
import pytest

from common.errors import UserError
from lab.comparison import record
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import published_path, read_published
from lab.predict.tables import message_plans, predict_table
from lab.whatif.data import page_data
from lab.whatif.measured import (
    comparison_file,
    files_of,
    published_sets,
    shipped_files,
)
from lab.whatif.page import scenario_of
from tests.helpers import ROOT
from tests.helpers.node import needs_node, run_scripts

SHIPPED = ROOT / "reports" / "samples" / "compare-digits-1gbit" / "results.json"
READ = "given.drops.map((files) => MeasuredFiles.readTexts(given.data, files))"
TABLE = """nodes,strategy,global_batch,step_seconds,ranks_per_node,rate
# measured at night
1,none,256,1.9,,
2,ddp,256,1.2,1,10
4,ddp,256,0.8,1,10gbit
4,"all_reduce",256,1.05,1,10000mbit
"""
SUMMARY = {"sync": "ddp", "model": "vgg11", "global_batch_size": 128, "step_seconds": 0.5}
RANKS = {"format": 1, "ranks": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}]}


@pytest.fixture(scope="module")
def data():
    """Return the page's data, through JSON as in the page."""
    calibration = load_calibration(reference_path())
    measured = msgspec.to_builtins(published_sets())
    found = page_data(calibration, is_reference=True, measured=measured)
    return json.loads(json.dumps(found))


def file(path, content):
    """Return a dropped file; content : its text, or JSON values."""
    text = content if isinstance(content, str) else json.dumps(content)
    return {"path": path, "text": text}


def comparison(**changes):
    """Return the content of the shipped results.json with other entries."""
    return json.loads(SHIPPED.read_text()) | changes


def with_cells(change):
    """Return the shipped comparison, each cell changed by a function."""
    content = comparison()
    for cell in content["cells"]:
        change(cell)
    return content


# -- published ----------------------------------------------------------------------------------


def test_each_published_step_is_in_one_set():
    rows = read_published(published_path())
    sets = published_sets()
    points = [
        (point.strategy, point.nodes, point.seconds) for found in sets for point in found.points
    ]
    assert points == [(row.strategy, row.nodes, row.measured_step_s) for row in rows]
    assert len({found.id for found in sets}) == len({found.title for found in sets}) == len(sets)


def test_a_set_has_one_batch_and_one_own_step():
    """The rows of dlperf-BERT-base differ in batch and software."""
    batches = [
        (found.state.batch_size, found.state.gradient_type, len(found.points))
        for found in published_sets()
        if found.id.startswith("dlperf-BERT-base")
    ]
    assert batches == [
        *[(32, "fp32", 2), (48, "fp32", 2), (32, "fp32", 2), (64, "fp16", 2), (96, "fp16", 2)]
    ]


def test_ranks_that_shared_a_batch_scale_strongly():
    """Which sets those are follows from the rows: four ranks of 64 samples, one of 256."""
    shared = [found for found in published_sets() if found.state.scaling == "strong"]
    assert [found.id for found in shared] == ["cs744-A", "cs744-B", "cs744-C", "cs744-D"]
    assert {(found.state.batch_size, found.state.batch) for found in shared} == {(256, 256)}
    assert all("256 samples in all" in found.title for found in shared)


def test_a_title_begins_with_what_a_reader_knows_and_has_the_measured_batch():
    titles = {found.id: found.title for found in published_sets()}
    [aws] = [title for name, title in titles.items() if name == "aws-p3-a"]
    expected = ["ResNet-50", "2, 4, 8 nodes of 8 ranks", "25 Gbit/s", "256 samples a rank", "aws"]
    places = [aws.index(part) for part in expected]
    assert places == sorted(places)
    [small] = [found for found in published_sets() if found.id == "1bitadam-eth"]
    assert "1 sample a rank" in small.title
    assert (small.state.batch_size, small.state.batch) == (1, 1), "as it was measured"


def test_the_state_of_a_set_predicts_what_validation_predicts():
    """Within 2 %: the page takes a model's own size, a row the published megabytes."""
    calibration = load_calibration(reference_path())
    beliefs = Beliefs.of(load_priors())
    rows = {row.measured_step_s: row for row in read_published(published_path())}
    compared = 0
    for found in published_sets():
        scenario = scenario_of(found.state, calibration)
        for point in found.points:
            cell = rows[point.seconds].cell(beliefs)
            if cell.scenario.node_step_seconds is not None:
                continue  # the page takes a typical loss
            expected = float(cell.predicted(cell.scenario))
            assert float(cell.predicted(scenario)) == pytest.approx(expected, rel=0.02), found.id
            compared += 1
    assert compared > 30


def test_a_rate_that_nobody_stated_limits_nothing():
    calibration = load_calibration(reference_path())
    [found] = [each for each in published_sets() if each.id == "cs744-A"]
    assert "not stated" in found.about
    steps = []
    for rate_gbit in (found.state.rate_gbit, 400.0):
        state = msgspec.structs.replace(found.state, rate_gbit=rate_gbit)
        scenario = scenario_of(state, calibration)
        steps.append(predict_table([4], message_plans(["ddp"]), scenario)[0].prediction)
    assert steps[0].step_seconds == pytest.approx(steps[1].step_seconds, rel=0.01)
    [stated] = [each for each in published_sets() if each.id == "cs744-C"]
    assert stated.state.rate_gbit == 6.22
    assert "not stated" not in stated.about


# -- the reader's files, checked in Python ------------------------------------------------------


def test_a_comparison_is_embedded_without_its_runs():
    found = comparison_file(record.read_comparison(SHIPPED), "mine")
    assert found.path == "mine/results.json"
    assert len(found.text) < len(SHIPPED.read_text()) / 10
    content = json.loads(found.text)
    medians = [cell["median"]["step"] for cell in content["cells"]]
    assert medians == [cell["median"]["step"] for cell in comparison()["cells"]]
    assert [len(cell["repeats"][0]["ranks"]) for cell in content["cells"]] == [1, 4, 4, 4, 4]


def test_files_of_the_reader(tmp_path):
    table = tmp_path / "observed.csv"
    table.write_text(TABLE)
    run = tmp_path / "run"
    run.mkdir()
    written = {"summary.json": SUMMARY, "ranks.json": real_ranks(), "config.json": {}}
    for name, content in written.items():
        (run / name).write_text(json.dumps(content))
    found = files_of([SHIPPED, SHIPPED.parent, table, run])
    assert [each.path for each in found] == [
        *["compare-digits-1gbit/results.json"] * 2,
        "observed.csv",
        *(f"{tmp_path.name}/run/{name}" for name in ("summary.json", "ranks.json", "config.json")),
    ]
    assert found[2].text == TABLE


def real_ranks():
    """Return ranks.json of two nodes with one rank each."""
    content = comparison()
    [cell] = [cell for cell in content["cells"] if cell["sync"] == "ddp"]
    rows = cell["repeats"][0]["ranks"][:2]
    return {
        "format": 1,
        "ranks": [row | {"host": host} for row, host in zip(rows, "ab", strict=True)],
    }


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("none.csv", None, "none.csv"),
        ("nowhere", None, "nowhere"),
        ("bad.csv", "nodes,strategy\n", "global_batch"),
        ("cut.json", '{"format": 1, "cells": [', "cut.json"),
        ("new.json", json.dumps({"format": 2}), "new.json"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, name, text, named):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as raised:
        files_of([path])
    assert named in str(raised.value)
    assert "--fit" not in str(raised.value)


# -- dropped files, read in JavaScript ----------------------------------------------------------


@needs_node
def test_the_format_is_that_of_the_record(data):
    assert run_scripts("MeasuredFiles.FORMAT", {}) == record.FORMAT


@needs_node
def test_a_dropped_comparison_is_the_embedded_one(data):
    whole = [file("compare-digits-1gbit/results.json", SHIPPED.read_text())]
    embedded = msgspec.to_builtins(shipped_files())
    in_folder = [*whole, file("compare-digits-1gbit/table.csv", "ranks,other\n1,2\n")]
    in_folder.append(file("compare-digits-1gbit/runs/a/summary.json", "{"))
    first, *others = run_scripts(READ, {"data": data, "drops": [whole, embedded, in_folder]})
    assert others == [first, first]
    [found] = first["sets"]
    steps = {cell["sync"]: cell["median"]["step"] for cell in comparison()["cells"]}
    assert {point["strategy"]: point["seconds"] for point in found["points"]} == {
        name: steps[name] for name in ("gather_scatter", "all_reduce", "overlapped", "ddp")
    }
    own = steps["none"] - comparison()["cells"][0]["median"]["sync"]
    expected = {
        **{"model": "vgg11", "backend": "gloo", "rate_gbit": 1, "nodes": 4, "batch": 256},
        **{"batch_size": 256, "scaling": "strong", "ranks_per_node": 1, "costs": "typical"},
    }
    assert expected.items() <= found["state"].items()
    assert found["state"]["step_ms"] == pytest.approx(1e3 * own, rel=1e-3)


@needs_node
def test_cells_that_differ_become_sets_of_their_own(data):
    def weak(cell):
        cell["batch_size"] = 64 * cell["nodes"]

    def faster(cell):
        if cell["sync"] == "ddp":
            cell["rate"] = 2.5e9

    def two_ranks(cell):
        if cell["nodes"] == 4:
            cell.update(nodes=2, ranks_per_node=2)

    def without_one(cell):
        if cell["sync"] == "none":
            cell["median"] = None

    def on_hosts(cell):
        cell["rate"] = None
        for number, row in enumerate(cell["repeats"][0]["ranks"]):
            row["host"] = f"node{number}"

    twice = with_cells(weak)
    twice["cells"] += [
        cell | {"nodes": 2, "batch_size": 128} for cell in twice["cells"] if cell["nodes"] == 4
    ]
    contents = [twice, *map(with_cells, (faster, two_ranks, without_one, on_hosts))]
    drops = [[file("results.json", content)] for content in contents]
    answers = run_scripts(READ, {"data": data, "drops": drops})
    assert [answer.get("problem") for answer in answers] == [None] * len(drops)
    weakly, rates, pairs, alone, hosts = (
        [found["state"] | {"points": len(found["points"])} for found in answer["sets"]]
        for answer in answers
    )
    assert [(one["scaling"], one["batch_size"], one["points"]) for one in weakly] == [
        ("weak", 64, 8)
    ]
    assert [(one["rate_gbit"], one["strategies"]) for one in rates] == [
        (1, ["gather_scatter", "all_reduce", "overlapped"]),
        (2.5, ["ddp"]),
    ]
    assert [(one["nodes"], one["ranks_per_node"]) for one in pairs] == [(2, 2)]
    cells = [cell["median"] for cell in comparison()["cells"] if cell["nodes"] == 4]
    computing = min(median["step"] - median["sync"] for median in cells)
    assert alone[0]["batch"] == 64
    assert alone[0]["step_ms"] == pytest.approx(1e3 * computing, rel=1e-4)
    assert [one["nodes"] for one in hosts] == [4]
    assert "rate_gbit" not in hosts[0]


@needs_node
def test_tables_and_runs(data):
    run = [file("run/summary.json", SUMMARY), file("run/ranks.json", RANKS)]
    other = [
        file("x/b/summary.json", SUMMARY | {"sync": "ring", "backend": "nccl"}),
        file("x/b/ranks.json", RANKS),
    ]
    drops = [
        [file("observed.csv", TABLE)],
        run,
        [file("summary.json", SUMMARY), file("ranks.json", RANKS)],
        [*run, *other, file("observed.csv", "\ufeff" + TABLE.replace("\n", "\r\n"))],
    ]
    sections = {"section_seconds": {"sync": 0.2}}
    drops.append([file("r/summary.json", SUMMARY | sections), file("r/ranks.json", RANKS)])
    table, one, single, three, computed = run_scripts(READ, {"data": data, "drops": drops})
    [found] = table["sets"]
    assert [(point["strategy"], point["nodes"]) for point in found["points"]] == [
        *[("ddp", 2), ("ddp", 4), ("all_reduce", 4)]
    ]
    assert found["state"] == {
        **{"ranks_per_node": 1, "scaling": "strong", "batch_size": 256, "nodes": 4},
        **{"strategies": ["all_reduce", "ddp"], "focus": "ddp", "rate_gbit": 10},
        **{"latency_us": None, "inside_gbit": None},
        **{"costs": "typical", "step_ms": 1900, "batch": 256},
    }
    [found] = one["sets"]
    assert found["points"] == [{"strategy": "ddp", "nodes": 2, "seconds": 0.5, "note": ""}]
    assert "step_ms" not in found["state"], "nobody measured it"
    assert "rate_gbit" not in found["state"]
    assert found["state"]["backend"] == "gloo"
    assert single["sets"][0]["state"] == found["state"]
    [own] = computed["sets"]
    expected = {"step_ms": 300, "batch": 64, "costs": "typical", "batch_size": 128}
    assert expected.items() <= own["state"].items(), "what is left of a step without messages"
    assert "less its exposed" in own["about"]
    both = three["sets"]
    assert [len(each["points"]) for each in both] == [3, 2]
    assert "backend" not in both[1]["state"], "the two runs had two"
    assert len({each["id"] for each in both}) == 2


BAD = {
    "empty": [file("results.json", "")],
    "cut": [file("results.json", SHIPPED.read_text()[:5000])],
    "a list": [file("results.json", "[1, 2]")],
    "a number": [file("results.json", "7")],
    "something else": [file("package.json", {"name": "x", "cells": 4})],
    "a picture": [file("step_time.png", "\x89PNG\r\n\x1a\n\x00\x00")],
    "a page": [file("report.html", "<!DOCTYPE html><p>report</p>")],
    "newer": [file("results.json", comparison(format=2))],
    "no format": [file("results.json", comparison(format=None))],
    "no cells": [file("results.json", comparison(cells={}))],
    "cells that are none": [file("results.json", comparison(cells=[3]))],
    "nodes as text": [file("results.json", with_cells(lambda cell: cell.update(nodes="many")))],
    "no step": [file("results.json", with_cells(lambda cell: cell["median"].update(step=0)))],
    "a step of text": [
        file("results.json", with_cells(lambda cell: cell["median"].update(step="1 s")))
    ],
    "a rate of nothing": [file("results.json", with_cells(lambda cell: cell.update(rate="fast")))],
    "one machine": [file("results.json", with_cells(lambda cell: cell.update(rate=None)))],
    "nothing measured": [file("results.json", with_cells(lambda cell: cell.update(median=None)))],
    "another table": [file("table.csv", "ranks;step\n1;2\n")],
    "no rows": [file("observed.csv", TABLE.splitlines()[0])],
    "a cut row": [file("observed.csv", TABLE[:-20])],
    "an unknown strategy": [file("observed.csv", TABLE.replace("ddp", "sorcery"))],
    "a negative step": [file("observed.csv", TABLE.replace("1.2", "-1.2"))],
    "half a node": [file("observed.csv", TABLE.replace("2,ddp", "2.5,ddp"))],
    "no step time": [file("observed.csv", TABLE.replace("0.8", ""))],
    "half a run": [file("run/summary.json", SUMMARY)],
    "ranks alone": [file("ranks.json", RANKS)],
    "a run on one machine": [
        file("r/summary.json", SUMMARY),
        file("r/ranks.json", {"ranks": [{"host": "a"}, {"host": "a"}]}),
    ],
    "uneven nodes": [
        file("r/summary.json", SUMMARY),
        file("r/ranks.json", {"ranks": [{"host": host} for host in "aab"]}),
    ],
    "an unfinished run": [
        file("r/summary.json", SUMMARY | {"step_seconds": None}),
        file("r/ranks.json", RANKS),
    ],
    "two runs without folders": [
        *[file("summary.json", SUMMARY), file("ranks.json", RANKS)],
        file("summary.json", SUMMARY),
    ],
    "an empty folder": [file("folder/notes.txt", "nothing")],
    # Each made an error that nobody caught, or a reason that was none.
    "a strategy that is an object": [
        file("results.json", with_cells(lambda cell: cell.update(sync={"toString": 1})))
    ],
    "repeats that are none": [
        file("results.json", with_cells(lambda cell: cell.update(rate=None, repeats={})))
    ],
    "runs that are none": [
        file("results.json", with_cells(lambda cell: cell.update(rate=None, repeats=[None])))
    ],
    "a rank that is none": [
        *[file("r/summary.json", SUMMARY), file("r/ranks.json", {"ranks": [None]})]
    ],
    "a huge step": [
        file("results.json", with_cells(lambda cell: cell["median"].update(step=1e300)))
    ],
    "a rate of three parts": [file("observed.csv", TABLE.replace("10gbit", "1.2.3gbit"))],
    "a format of text": [file("results.json", comparison(format="1"))],
    "many nodes": [file("observed.csv", TABLE.replace("2,ddp", "5000,ddp"))],
    "many rows": [file("observed.csv", TABLE + "4,ddp,256,0.8,1,10\n" * 20_000)],
    "many cells": [file("results.json", comparison(cells=[{}] * 2001))],
    "one good, one bad": [
        file("results.json", SHIPPED.read_text()),
        file("observed.csv", "nodes\n"),
    ],
}


@needs_node
def test_bad_files_are_refused_in_one_sentence(data):
    answers = run_scripts(READ, {"data": data, "drops": list(BAD.values())})
    for (kind, files), answer in zip(BAD.items(), answers, strict=True):
        assert len(answer["sets"]) == (kind == "one good, one bad"), (kind, answer)
        problem = answer["problem"]
        assert problem.endswith("."), (kind, problem)
        assert "\n" not in problem
        assert len(problem) < 200, (kind, problem)
        if "folder" not in kind:
            names = {part for each in files for part in Path(each["path"]).parts}
            assert any(name in problem for name in names | {"results.json", "run"}), (kind, problem)
    problems = dict(zip(BAD, (answer["problem"] for answer in answers), strict=True))
    assert "format 2" in problems["newer"]
    assert "sorcery" in problems["an unknown strategy"]
    assert "row 2" in problems["a negative step"]
    assert "cut off" in problems["cut"]
    assert "ranks.json" in problems["half a run"]
    assert "1e+300, expected a number from 0.00001 to 1,000" in problems["a huge step"]
    assert '"1.2.3gbit"' in problems["a rate of three parts"]
    assert 'got "1", expected 1' in problems["a format of text"]
    assert "4,096" in problems["many nodes"]
    assert "20,004 rows" in problems["many rows"]
    assert "2,001 cells" in problems["many cells"]
    assert "observed.csv" in problems["one good, one bad"], "and the set of the other is there"


@needs_node
def test_a_table_of_the_most_rows_is_read_at_once(data):
    """Grouping takes time with the rows, not with their square."""
    rows = "".join(f"{nodes},ddp,256,0.8,1,10\n" for nodes in range(2, 2002))
    expression = """(() => {
      const before = performance.now();
      const { sets } = MeasuredFiles.readTexts(given.data, given.files);
      return { points: sets.map((set) => set.points.length), ms: performance.now() - before };
    })()"""
    given = {"data": data, "files": [file("observed.csv", TABLE.splitlines()[0] + "\n" + rows)]}
    found = run_scripts(expression, given)
    assert found["points"] == [2000]
    assert found["ms"] < 500


@needs_node
def test_a_bad_file_of_the_reader_hides_no_other(data):
    expression = """(() => {
      const { data } = given;
      Object.assign(data, { files: given.files, shipped: given.shipped });
      Measured.prepare(data);
      return { begin: data.begin, problem: data.problem, sets: data.measured.length };
    })()"""
    alone = with_cells(lambda cell: cell.update(rate=None))
    files = [file("alone/results.json", alone), file("observed.csv", TABLE)]
    shipped = msgspec.to_builtins(shipped_files())
    found = run_scripts(expression, {"data": data, "files": files, "shipped": shipped})
    assert found["begin"] == "observed.csv"
    assert "alone" in found["problem"]
    assert found["sets"] == len(data["measured"]) + 2


# -- what a set shows ---------------------------------------------------------------------------


@needs_node
def test_points_stand_where_the_settings_are_theirs(data):
    expression = """(() => {
      const { data } = given;
      data.shipped = given.shipped;
      Measured.prepare(data);
      const [set] = data.measured;
      const state = { ...State.defaults(data), ...set.state, measured: set.id };
      const changes = [{}, { nodes: 16 }, { strategies: ["ddp"] },
        { step_ms: state.step_ms * 1.001 }, { rate_gbit: 2 }, { ranks_per_node: 2 },
        { model: "resnet50_imagenet" }, { batch_size: 512 }, { backend: "nccl" },
        { bucket_mb: 1 }, { measured: null }];
      return {
        id: set.id, problem: State.check(data, state),
        points: changes.map((change) => Measured.points(data, { ...state, ...change })),
        differences: Measured.differences(set, { ...state, rate_gbit: 2, step_ms: 1 }),
        compared: Measured.compared(data, set, state),
      };
    })()"""
    shipped = msgspec.to_builtins(shipped_files())
    found = run_scripts(expression, {"data": data, "shipped": shipped})
    assert found["id"] == "compare-digits-1gbit"
    assert found["problem"] is None
    assert [len(points) for points in found["points"]] == [4, 4, 1, 4, 0, 0, 0, 0, 0, 0, 0]
    assert found["differences"] == ["rate_gbit", "step_ms"]
    [ddp] = found["points"][2]
    one = comparison()["cells"][0]["median"]["step"]
    assert ddp["efficiency"] == pytest.approx(one / (4 * ddp["seconds"]), rel=1e-3)
    for point in found["compared"]:
        error = point["step_seconds"] / point["seconds"] - 1
        assert point["error"] == pytest.approx(error)
        assert abs(error) < 0.3


@needs_node
def test_each_setting_that_changes_a_prediction_takes_the_points_away(data):
    """The settings are all of the page's: one that is new there counts here, too."""
    expression = """(() => {
      const { data } = given;
      const set = data.measured.find((entry) => entry.id === "horovod-16gpu-25G");
      const own = { ...State.defaults(data), ...set.state };
      const others = { model: "vgg16", costs: "calibrated", gradient_type: "bf16", backend: "gloo",
        transport: "rdma", scaling: "strong" };
      const found = {};
      for (const [name, field] of Object.entries(State.FIELDS)) {
        if (field.list || ["focus", "measured", "nodes"].includes(name)) continue;
        const value = others[name] ?? 2 * (own[name] ?? 50);
        const state = { ...own, [name]: value };
        const step = (of) => Engine.curve(data, of, "ddp", [4], { band: false })[0].step_seconds;
        found[name] = [step(state) !== step(own), Measured.differences(set, state).includes(name)];
      }
      return found;
    })()"""
    found = run_scripts(expression, {"data": data})
    assert len(found) >= 15
    changing = {name for name, (changes, _) in found.items() if changes}
    assert {"latency_us", "bucket_mb", "costs", "batch", "gradient_type"} <= changing
    assert {name for name in changing if not found[name][1]} == set()
    assert found["inside_gbit"] == found["rate_gbit"] == [False, True], "software is the limit here"
    assert found["parameters"] == [False, False]


@needs_node
def test_the_nearest_set_has_the_same_backend_then_model_rate_and_ranks(data):
    """Each setting counts more than all those after it."""
    expression = """(() => {
      const { data } = given;
      const gpus = { ...State.defaults(data), costs: "typical", backend: "nccl", transport: "tcp",
        model: "resnet50_imagenet", gradient_type: "fp16", step_ms: 300, rate_gbit: 25,
        ranks_per_node: 8 };
      const changes = [{}, { ranks_per_node: 1, rate_gbit: 10 }, { transport: "rdma" },
        { model: "bert_base", gradient_type: "fp32", ranks_per_node: 1, rate_gbit: 10 },
        { backend: "gloo", rate_gbit: 1 },
        { model: "own", parameters: 3.4e8, rate_gbit: 40, ranks_per_node: 4 },
        { rate_gbit: 1000 }];
      return changes.map((change) => {
        const state = { ...gpus, ...change };
        const set = Measured.nearest(data, state);
        const texts = [1, 7, 64].map((nodes) =>
          Measured.nearestText(set, { ...state, focus: "ddp", nodes }));
        return [set.id, texts];
      });
    })()"""
    found = run_scripts(expression, {"data": data})
    names = [name for name, _ in found]
    assert names == [
        *["aws-p3-a", "orion-4x3090-2", "horovod-16gpu-25G-4", "cos568-A-gpu", "cs744-A"],
        *["1bitadam-eth", "aws-p3-a"],
    ]
    _, (alone, seven, many) = found[0]
    assert alone.startswith("Nearest measured: ResNet-50: 2, 4, 8 nodes of 8 ranks")
    assert "415 ms on 2 nodes" in alone
    assert "443 ms on 8 nodes" in seven
    assert "443 ms on 8 nodes" in many


@needs_node
def test_most_points_on_one_side_are_one_sentence():
    cases = [
        ["below"] * 3,
        ["above", "above", "inside"],
        ["above"],
        ["below", "inside"],
        ["inside"],
        [],
    ]
    expression = "given.map((sides) => Measured.sidesText(sides.map((side) => ({ side }))))"
    below, above, single, *others = run_scripts(expression, cases)
    assert "All 3 steps were" in below
    assert "shorter" in below
    assert "2 of these 3 steps" in above
    assert "longer" in above
    assert "This step was longer" in single
    assert others == ["", "", ""]


@needs_node
def test_the_side_of_the_band_agrees_with_the_digits(data):
    """A point on the same side for the reader as for the page, at three digits."""
    expression = """(() => {
      const { data } = given;
      const set = data.measured.find((entry) => entry.id === "aws-p3-a");
      const state = { ...State.defaults(data), ...set.state };
      const [{ low_seconds: low, high_seconds: high }] = Measured.compared(data, set, state);
      const seconds = [0.5 * low, 0.99999 * low, low, high, 1.00001 * high, 2 * high];
      const points = seconds.map((each) => ({ ...set.points[0], seconds: each }));
      return Measured.compared(data, { ...set, points }, state).map((point) => point.side);
    })()"""
    sides = run_scripts(expression, {"data": data})
    assert sides == ["below", "inside", "inside", "inside", "inside", "above"]
