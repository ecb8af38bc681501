"""The reader's own measured steps: comparisons, tables and runs as sets of the page."""

import copy
import json
from statistics import fmean

import msgspec
import pytest

from common.errors import UserError
from lab.comparison.record import read_comparison
from lab.whatif.own_steps import read_own, shipped_sets, steps_of_comparison, with_own_ids
from tests.helpers import ROOT
from tests.lab.predict.measured_runs import run_folder

SHIPPED = ROOT / "reports" / "samples" / "compare-digits-1gbit" / "results.json"
SENT = ("gather_scatter", "all_reduce", "overlapped", "ddp")
TABLE = """nodes,strategy,global_batch,step_seconds,ranks_per_node,rate
# measured at night
1,none,256,1.9,,
2,ddp,256,1.2,1,10
4,ddp,256,0.8,1,10gbit
4,"all_reduce",256,1.05,1,10000mbit
"""


def comparison(**changes):
    """Return the content of the shipped results.json with other entries."""
    return json.loads(SHIPPED.read_text()) | changes


def step_of(cell):
    """Return the mean over the repeats of the mean over the ranks, as the report shows it."""
    return fmean(fmean(rank["seconds"]["step"] for rank in run["ranks"]) for run in cell["repeats"])


def with_cells(change):
    """Return the shipped comparison, each cell changed by a function."""
    content = comparison()
    for cell in content["cells"]:
        change(cell)
    return content


def written(path, content):
    """Write a file; content : its text, or JSON values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def states(own):
    """Return what each set says of the state, and the number of its points."""
    return [msgspec.to_builtins(each.state) | {"points": len(each.points)} for each in own.sets]


def test_a_comparison_and_its_folder_are_the_same_set():
    from_file, in_folder = (read_own([path]) for path in (SHIPPED, SHIPPED.parent))
    of_record = steps_of_comparison(read_comparison(SHIPPED), "compare-digits-1gbit")
    assert from_file == in_folder == of_record
    assert from_file.sets == shipped_sets()
    [found] = from_file.sets
    steps = {cell["sync"]: step_of(cell) for cell in comparison()["cells"]}
    assert {point.strategy: point.seconds for point in found.points} == {
        name: steps[name] for name in SENT
    }
    own = steps["none"] - comparison()["cells"][0]["median"]["sync"]
    expected = {
        **{"model": "vgg11", "backend": "gloo", "rate_gbit": 1, "nodes": 4, "batch": 256},
        **{"batch_size": 256, "scaling": "strong", "ranks_per_node": 1, "costs": "typical"},
    }
    state = msgspec.to_builtins(found.state)
    assert expected.items() <= state.items()
    assert state["step_ms"] == pytest.approx(1e3 * own, rel=1e-3)


def test_cells_that_differ_become_sets_of_their_own(tmp_path):
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
        for run in cell["repeats"]:
            for number, row in enumerate(run["ranks"]):
                row["host"] = f"node{number}"

    weakly = comparison()
    halves = []
    for cell in weakly["cells"]:
        cell["batch_size"] = 64 * cell["nodes"]
        if cell["nodes"] == 4:
            half = copy.deepcopy(cell)
            half.update(id=f"{cell['sync']}-n2", nodes=2, batch_size=128)
            for run in half["repeats"]:
                run["ranks"] = run["ranks"][:2]
                run["claim"] = None
            halves.append(half)
    weakly["cells"] += halves
    contents = [weakly, *map(with_cells, (faster, two_ranks, without_one, on_hosts))]
    found = []
    for number, content in enumerate(contents):
        own = read_own([written(tmp_path / str(number) / "results.json", content)])
        assert own.problems == []
        found.append(states(own))
    weak, rates, pairs, alone, hosts = found
    assert [(one["scaling"], one["batch_size"], one["points"]) for one in weak] == [("weak", 64, 8)]
    assert [(one["rate_gbit"], one["strategies"]) for one in rates] == [
        (1, ["gather_scatter", "all_reduce", "overlapped"]),
        (2.5, ["ddp"]),
    ]
    assert [(one["nodes"], one["ranks_per_node"]) for one in pairs] == [(2, 2)]
    cells = [cell for cell in comparison()["cells"] if cell["nodes"] == 4]
    computing = min(step_of(cell) - cell["median"]["sync"] for cell in cells)
    assert alone[0]["batch"] == 64
    assert alone[0]["step_ms"] == pytest.approx(1e3 * computing, rel=1e-4)
    assert [one["nodes"] for one in hosts] == [4]
    assert "rate_gbit" not in hosts[0]


@pytest.mark.parametrize("change", [str, lambda text: "\ufeff" + text.replace("\n", "\r\n")])
def test_a_table(tmp_path, change):
    path = tmp_path / "observed.csv"
    path.write_text(change(TABLE), newline="")
    [found] = read_own([path]).sets
    assert [(point.strategy, point.nodes) for point in found.points] == [
        *[("ddp", 2), ("ddp", 4), ("all_reduce", 4)]
    ]
    assert msgspec.to_builtins(found.state) == {
        **{"ranks_per_node": 1, "scaling": "strong", "batch_size": 256, "nodes": 4},
        **{"strategies": ["all_reduce", "ddp"], "focus": "ddp", "rate_gbit": 10},
        **{"latency_us": None, "inside_gbit": None},
        **{"costs": "typical", "step_ms": 1900, "batch": 256},
    }


def test_runs(tmp_path):
    """One, two of different backends beside a table, and one whose exposed time is known."""
    one = run_folder(tmp_path / "run", nodes="ab", sync="ddp", step_seconds=0.5)
    nccl = run_folder(tmp_path / "x" / "b", nodes="ab", sync="ring", backend="nccl")
    timed = run_folder(
        tmp_path / "timed",
        nodes="ab",
        batch_size=128,
        step_seconds=0.5,
        section_seconds={"sync": 0.2},
    )
    [found] = read_own([one]).sets
    assert [(each.strategy, each.nodes, each.seconds) for each in found.points] == [("ddp", 2, 0.5)]
    assert found.id == "run"
    state = msgspec.to_builtins(found.state)
    assert "step_ms" not in state, "nobody measured it"
    assert "rate_gbit" not in state
    assert state["backend"] == "gloo"
    [found] = read_own([timed]).sets
    expected = {"step_ms": 300, "batch": 64, "costs": "typical", "batch_size": 128}
    assert expected.items() <= msgspec.to_builtins(found.state).items(), "a step without messages"
    assert "less its exposed" in found.about
    table, both = read_own([one, nccl, written(tmp_path / "observed.csv", TABLE)]).sets
    assert [len(table.points), len(both.points)] == [3, 2]
    assert "backend" not in msgspec.to_builtins(both.state), "the two runs had two"
    assert "(2 runs)" in both.title


def test_a_set_whose_id_is_taken_gets_a_number():
    [shipped] = shipped_sets()
    found = with_own_ids([shipped, shipped, shipped])
    assert [each.id for each in found] == [shipped.id, f"{shipped.id}-2", f"{shipped.id}-3"]
    assert {each.title for each in found} == {shipped.title}


def test_a_measurement_that_cannot_be_drawn_hides_no_other(tmp_path):
    one_machine = with_cells(lambda cell: cell.update(rate=None))
    nothing = with_cells(lambda cell: cell.update(median=None))
    for content in (one_machine, nothing):
        alone = written(tmp_path / "alone" / "results.json", content)
        own = read_own([alone, written(tmp_path / "observed.csv", TABLE)])
        assert [each.id for each in own.sets] == ["observed.csv"]
        [problem] = own.problems
        assert problem.startswith("alone has no step on two or more nodes")


BAD_COMPARISONS = {
    "empty": "",
    "cut": SHIPPED.read_text()[:5000],
    "a list": "[1, 2]",
    "a number": "7",
    "something else": {"name": "x", "cells": 4},
    "newer": comparison(format=2),
    "no format": comparison(format=None),
    "a format of text": comparison(format="1"),
    "no cells": comparison(cells={}),
    "cells that are none": comparison(cells=[3]),
    "nodes as text": with_cells(lambda cell: cell.update(nodes="many")),
    "no step": with_cells(lambda cell: cell["median"].update(step=0)),
    "a step of text": with_cells(lambda cell: cell["median"].update(step="1 s")),
    "a huge step": with_cells(lambda cell: cell["median"].update(step=1e300)),
    "a rate of nothing": with_cells(lambda cell: cell.update(rate="fast")),
    "a strategy that is an object": with_cells(lambda cell: cell.update(sync={"toString": 1})),
    "repeats that are none": with_cells(lambda cell: cell.update(rate=None, repeats={})),
    "runs that are none": with_cells(lambda cell: cell.update(rate=None, repeats=[None])),
    "no batch": with_cells(lambda cell: cell.update(batch_size=None)),
    "half a sample": with_cells(lambda cell: cell.update(batch_size=85.5)),
}
BAD_TABLES = {
    "another table": "ranks;step\n1;2\n",
    "a header alone": "nodes,strategy\n",
    "no rows": TABLE.splitlines()[0],
    "a cut row": TABLE[:-20],
    "an unknown strategy": TABLE.replace("ddp", "sorcery"),
    "a negative step": TABLE.replace("1.2", "-1.2"),
    "half a node": TABLE.replace("2,ddp", "2.5,ddp"),
    "no step time": TABLE.replace("0.8", ""),
    "a word": TABLE.replace("0.8", "soon"),
    "a decimal comma": TABLE.replace("0.8", "0,8,"),
    "a rate of three parts": TABLE.replace("10gbit", "1.2.3gbit"),
    "many nodes": TABLE.replace("2,ddp", "5000,ddp"),
    "many rows": TABLE + "4,ddp,256,0.8,1,10\n" * 20_000,
    "a picture": "\x89PNG\r\n\x1a\n\x00\x00",
    "a page": "<!DOCTYPE html><p>report</p>",
}


def refusal(path):
    """Return why a file is refused, on one line that names it."""
    with pytest.raises(UserError) as raised:
        read_own([path])
    message = str(raised.value)
    assert path.name in message or path.parent.name in message
    assert "\n" not in message
    assert len(message) < 400
    assert "--fit" not in message
    return message


def test_comparisons_that_are_none_are_refused(tmp_path):
    said = {}
    for kind, content in BAD_COMPARISONS.items():
        said[kind] = refusal(written(tmp_path / kind / "results.json", content))
    many = comparison()
    many["cells"] = [many["cells"][0] | {"id": f"cell-{number}"} for number in range(2001)]
    assert "2,001 cells" in refusal(written(tmp_path / "many" / "results.json", many))
    assert "format 2" in said["newer"]
    assert "batch_size: got 85.5" in said["half a sample"]
    assert "'fast'" in said["a rate of nothing"]


def test_tables_that_are_none_are_refused(tmp_path):
    said = {}
    for kind, content in BAD_TABLES.items():
        said[kind] = refusal(written(tmp_path / f"{kind}.csv", content))
    assert "sorcery" in said["an unknown strategy"]
    assert "row 2" in said["a negative step"]
    assert "1.2.3gbit" in said["a rate of three parts"]
    assert "at most 4,096" in said["many nodes"]
    assert "20,004 rows" in said["many rows"]


def test_folders_without_a_whole_run_are_refused(tmp_path):
    half = run_folder(tmp_path / "half")
    (half / "ranks.json").unlink()
    (tmp_path / "empty").mkdir()
    odd = run_folder(tmp_path / "a rank that is none")
    written(odd / "ranks.json", {"format": 1, "ranks": [None]})
    for path in (
        half,
        odd,
        tmp_path / "empty",
        tmp_path / "nowhere",
        run_folder(tmp_path / "uneven", nodes="aab"),
        run_folder(tmp_path / "unfinished", step_seconds=None),
    ):
        refusal(path)
    assert "ranks.json" in refusal(half)
    one_machine = read_own([run_folder(tmp_path / "on one machine", nodes="aa")])
    assert one_machine.sets == []
    assert "on one machine" in one_machine.problems[0]


def test_a_table_of_the_most_rows(tmp_path):
    rows = "".join(f"{nodes},ddp,256,0.8,1,10\n" for nodes in range(2, 2002))
    own = read_own([written(tmp_path / "observed.csv", TABLE.splitlines()[0] + "\n" + rows)])
    assert [len(found.points) for found in own.sets] == [2000]
