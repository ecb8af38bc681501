"""A strategy's record: what the project does with a new one, and what the documentation says."""

import json
import re
import sys

import pytest

from common.config.parser import build_parser
from common.errors import UserError
from common.sync import STRATEGIES, Strategy, build_message_plan_from, offered_by, plan_class
from common.sync.message_cost import GradientSize
from lab.predict.calibration_file import find_calibration
from lab.predict.scenario import Scenario
from lab.predict.tables import message_plans, predict_table
from lab.proofs import check_equivalence
from lab.strategy_style import SPARE_COLORS, color
from tests.helpers import ROOT, TINY, Started, user_environment
from tests.helpers.own_strategy import NAME, RECORD

PROGRAM = ROOT / "tests" / "helpers" / "own_strategy.py"
PARTS = ("PartOne", "PartTwo", "PartThree")


@pytest.fixture
def _own(monkeypatch):
    monkeypatch.setitem(STRATEGIES, NAME, RECORD)


@pytest.mark.usefixtures("_own")
def test_a_new_strategy_is_proven_and_predicted():
    [found] = check_equivalence(NAME, sizes=[2])
    assert found.first_wrong is None, str(found)
    calibration, _ = find_calibration(None)
    plans = message_plans([NAME, "all_reduce_flat"], {"pieces": 3})
    scenario = Scenario(
        calibration=calibration,
        batch_size=256,
        scaling="strong",
        rate_bits=1e9,
        latency_seconds=2e-4,
    )
    own, flat = predict_table([4], plans, scenario)
    assert own.sync == NAME
    # the bytes of one all_reduce, in three messages
    assert 0 < own.prediction.step_seconds - flat.prediction.step_seconds < 0.05
    assert plans[NAME].bytes_sent([400, 100], 0, 2) == 500


@pytest.mark.usefixtures("_own")
def test_a_new_strategy_belongs_to_the_part_of_its_record():
    offers = {part: NAME in offered_by(part) for part in PARTS}
    assert offers == {"PartOne": False, "PartTwo": True, "PartThree": False}
    parser = build_parser("PartThree", "", offered_by("PartThree"))
    with pytest.raises(UserError, match=f"PartThree has no '{NAME}'. Use PartTwo --sync {NAME}"):
        parser.parse_args(["--sync", NAME])


@pytest.mark.usefixtures("_own")
def test_strategies_without_a_colour_get_one_each(monkeypatch):
    without = [name for name, strategy in STRATEGIES.items() if strategy.color is None]
    assert NAME in without
    for number in range(len(SPARE_COLORS) - len(without)):
        monkeypatch.setitem(STRATEGIES, f"other{number}", RECORD)
    assert len({color(name) for name in STRATEGIES}) == len(STRATEGIES)
    monkeypatch.setitem(STRATEGIES, "one_more", RECORD)
    with pytest.raises(UserError, match="no colour is left for one_more: state one in its record"):
        color("one_more")


def test_a_plan_without_its_memory_is_refused(monkeypatch):
    record = Strategy(
        implementation=RECORD.implementation,
        plan="common.sync.plans.base:MessagePlan",
        part="PartTwo",
        label="unknown",
    )
    monkeypatch.setitem(STRATEGIES, NAME, record)
    with pytest.raises(UserError, match=r"MessagePlan lacks memory\(case\).*write it"):
        plan_class(NAME)


def start_program(folder, *words):
    """Start the program that knows the new strategy: PartTwo, or lab."""
    command = [sys.executable, str(PROGRAM), *map(str, words)]
    return Started(command, cwd=folder, env=user_environment())


def test_the_option_of_a_new_strategy_is_a_flag_of_the_part_and_of_lab(tmp_path):
    predict = start_program(
        tmp_path, "lab", "predict", "--sync", NAME, "--nodes", 2, "--pieces", 4, "--json"
    )
    wrong = start_program(tmp_path, "--sync", NAME, "--pieces", 9)
    ended = predict.end()
    assert ended.status == 0, ended.err
    assert [row["sync"] for row in json.loads(ended.out)["rows"]] == [NAME]
    told = "--pieces: got 9, give a whole number of at least 1 and at most 8"
    assert told in wrong.end().err


@pytest.mark.slow
def test_ranks_of_a_new_strategy_hold_and_send_the_bytes_that_its_plan_says(tmp_path):
    where = ("--output-dir", tmp_path / "out", "--dataset", "digits", "--timeline")
    ended = start_program(
        tmp_path,
        *("--sync", NAME, "--pieces", 3, "--distributed", "--world-size", 2),
        *(*TINY, *where, "--batch-size", 32, "--max-steps", 3, "--measure-only"),
    ).end()
    assert ended.status == 0, ended.err
    [path] = (tmp_path / "out").rglob("ranks.json")
    for rank in json.loads(path.read_text())["ranks"]:
        assert rank["memory"] == rank["predicted_memory"]
        assert rank["messages"] == 3
        plan = build_message_plan_from("all_reduce_flat", {})
        sizes = [GradientSize((rank["memory"]["gradients"] // 4,))]
        assert rank["bytes_sent"] == plan.bytes_sent(sizes, rank["rank"], 2)
    config = json.loads(path.with_name("config.json").read_text())
    assert (config["sync"], config["pieces"]) == (NAME, 3)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "none"])
def test_the_documentation_has_a_row_with_the_facts_of_the_record(name):
    """A row of docs/strategies.md begins with the label, and ends with part, name and options."""
    page = (ROOT / "docs" / "strategies.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    record = STRATEGIES[name]
    options = [f" `--{option.name.replace('_', '-')}`" for option in plan_class(name).options()]
    expected = [record.part, f"`{name}`{''.join(options)}"]
    rows = [
        [row[-2], re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row[-1])]
        for row in cells
        if row[0].split(", ")[0] == record.label
    ]
    assert expected in rows, f"add a row: {record.label} | ... | {' | '.join(expected)}"
