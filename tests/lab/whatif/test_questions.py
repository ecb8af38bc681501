"""The twelve questions: their names, answers, and a guess's verdict."""

import json
import math
import re
import tomllib

import pytest

from common.sync import STRATEGIES
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.tables import message_plans, scaling_limits_of
from lab.whatif.data import State, page_data
from lab.whatif.measured import published_sets
from lab.whatif.own_steps import shipped_sets
from lab.whatif.questions import load_questions
from tests.helpers import ROOT
from tests.helpers.node import needs_node, run_scripts
from tests.helpers.whatif_states import scenario_of, steps_of

TEXT = (ROOT / "lab" / "whatif" / "questions.toml").read_text(encoding="utf-8")
IDS = [entry["id"] for entry in tomllib.loads(TEXT)["question"]]


def headings():
    """Return the first lines of the lessons' pages."""
    pages = sorted((ROOT / "docs" / "learn").glob("[0-9]*.md"))
    return [page.read_text().splitlines()[0].removeprefix("# ") for page in pages]


def test_twelve_questions_in_the_order_of_the_lessons():
    questions = load_questions()
    assert len({question["id"] for question in questions}) == len(questions) == 12
    places = [headings().index(question["lesson"]) for question in questions]
    assert places == sorted(places)
    for question in questions:
        assert question["text"].endswith("?")
        assert not re.search(r"\d[\d.]* (MB|times|%)", question["explanation"]), (
            "numbers of an explanation come from the engine"
        )


NEEDS = {"ratio": "than", "longer": "than", "gain": "change", "best": "change"}


def test_each_name_in_a_question_is_known():
    """A name that is wrong would be a broken page: nobody else reads the file."""
    keys = {*State.__struct_fields__}
    presets = tomllib.loads((ROOT / "lab" / "whatif" / "presets.toml").read_text())
    starts = {*presets, *(each.id for each in published_sets())}
    sets = {None, *starts, *(each.id for each in shipped_sets())}
    for question in load_questions():
        assert question["start"] in starts
        assert question["measured"] in sets
        assert question["changes"].keys() <= keys
        for asked in (question["asked"], *question["values"].values()):
            assert {asked["strategy"], asked["than"].get("strategy", "ddp")} <= STRATEGIES.keys()
            assert asked["than"].keys() <= keys | {"strategy"}
            assert asked["changes"].keys() <= keys
            needed = NEEDS.get(asked["quantity"])
            assert needed is None or asked[needed], question["id"]
        for sentence in (question["text"], question["explanation"]):
            names = set(re.findall(r"\{(\w+)\}", sentence))
            assert names <= {"answer", *question["values"]}, question["id"]
        used = question["text"] + question["explanation"]
        assert all(f"{{{name}}}" in used for name in question["values"]), question["id"]


# -- answers, in JavaScript ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def data():
    """Return the page's data, through JSON as in the page."""
    found = page_data(
        load_calibration(reference_path()),
        is_reference=True,
        measured=[*shipped_sets(), *published_sets()],
        questions=load_questions(),
    )
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def found(data):
    """Return each question's state, answer and sentences by its id."""
    expression = """(() => {
      const { data } = given;
      return data.questions.map((question) => {
        const state = Questions.stateOf(data, question);
        const answer = Questions.answer(data, question);
        return {
          id: question.id, state, problem: State.check(data, state), answer,
          text: Questions.text(data, question), why: Questions.why(data, question, answer),
          points: Measured.points(data, state).length, source: Questions.source(data, question),
        };
      });
    })()"""
    return {entry["id"]: entry for entry in run_scripts(expression, {"data": data})}


@needs_node
@pytest.mark.parametrize("name", IDS)
def test_an_answer_is_in_range_and_its_sentences_are_full(data, found, name):
    entry = found[name]
    [question] = [each for each in data["questions"] if each["id"] == name]
    assert entry["problem"] is None
    least, most = question["range"]
    value = entry["answer"]["value"]
    assert math.isfinite(value)
    assert least < value < most
    low_high = entry["answer"]["range"]
    assert low_high is None or low_high[0] <= value <= low_high[1]
    for sentence in (entry["text"], entry["why"]):
        assert not re.search(r"[{}]|NaN|undefined|null|Infinity|times times", sentence)
    assert question["measured"] is None or entry["points"] > 0, "they stand in the pictures"


@needs_node
def test_answers_are_those_of_lab_predict(found):
    """Each kind of quantity once, by lab/predict itself."""

    def rows(name, *strategies, **changes):
        return steps_of(found[name]["state"] | changes, strategies, reference_path())

    expected = {}
    [none] = rows("batch", "none")
    expected["batch"] = 1e3 * none.prediction.compute_seconds
    [slow, fast] = rows("root-link", "gather_scatter", "ddp")
    expected["root-link"] = slow.prediction.step_seconds / fast.prediction.step_seconds
    [ring] = rows("ring-bytes", "ring")
    expected["ring-bytes"] = ring.prediction.bytes_sent_root / 1e6
    eight, one = (
        rows("ranks-per-node", "all_reduce_flat", ranks_per_node=ranks)[0].prediction
        for ranks in (8, 1)
    )
    expected["ranks-per-node"] = eight.step_seconds / one.step_seconds
    [row] = rows("faster-processors", "ddp")
    expected["faster-processors"] = row.gains["compute"]
    [row] = rows("undecided", "ddp")
    expected["undecided"] = 100 * row.best_shares["network"]
    for name, value in expected.items():
        assert found[name]["answer"]["value"] == pytest.approx(value, rel=1e-9), name
    scenario = scenario_of(found["strong-scaling"]["state"], reference_path())
    [strong, _] = scaling_limits_of(message_plans(["ddp"]), scenario)
    assert found["strong-scaling"]["answer"]["value"] == strong.half_nodes + 1
    low_high = found["faster-processors"]["answer"]["range"]
    assert low_high == pytest.approx(rows("faster-processors", "ddp")[0].gain_ranges["compute"])


@needs_node
def test_what_was_measured_stands_beside_the_answer(found):
    """2.055 s and 0.541 s in the shipped comparison; nobody measured another answer."""
    measured = {name: entry["answer"]["measured"] for name, entry in found.items()}
    assert measured["root-link"] == pytest.approx(3.80, abs=0.005)
    assert [name for name, value in measured.items() if value] == ["root-link"]
    assert "Emulated nodes" in found["root-link"]["source"]
    assert "Princeton" in found["overlap"]["source"]
    assert found["batch"]["source"] == ""


@needs_node
def test_explanations_say_what_the_engine_says(found):
    """Each number here was wrong, or credited to the wrong cause, in an earlier page."""

    def step(name, strategy, **changes):
        [row] = steps_of(found[name]["state"] | changes, [strategy], reference_path())
        return row.prediction

    slowest = step("batch", "all_reduce_flat").compute_seconds
    assert f"{1e3 * slowest:.0f} ms, even if messages" in found["batch"]["why"]
    assert slowest > 1.02 * 1e-3 * found["batch"]["answer"]["value"]
    assert "849 MB a step in place of 657 MB" in found["ranks-per-node"]["why"]
    flat, each, ddp = (
        step("overlap", name).step_seconds for name in ("all_reduce_flat", "all_reduce", "ddp")
    )
    assert found["overlap"]["answer"]["value"] == pytest.approx(flat / ddp)
    assert f"{each / ddp:.2f} times" in found["overlap"]["why"]
    ddp, few = (step("fewer-bytes", name) for name in ("ddp", "ddp_powersgd"))
    assert found["fewer-bytes"]["answer"]["value"] == pytest.approx(
        ddp.step_seconds / few.step_seconds
    )
    # 37 MB at 0.6 GB/s, more than the messages take
    assert few.sync_seconds > 0.06
    assert "takes from the gain" in found["fewer-bytes"]["why"]
    for name in ("root-link", "overlap", "fewer-bytes", "faster-processors", "undecided"):
        assert re.search(r"\d ms", found[name]["text"]), "one step alone is given"


@needs_node
def test_without_the_shipped_comparison_a_question_has_no_measured_answer(data):
    """An installed package has no reports."""
    expression = """(() => {
      const { data } = given;
      data.measured = data.measured.filter((set) => set.is_published);
      const question = data.questions[1];
      return [Questions.answer(data, question), Questions.stateOf(data, question)];
    })()"""
    answer, state = run_scripts(expression, {"data": data})
    assert answer["measured"] is None
    assert state["measured"] is None
    assert answer["value"] > 3


QUESTION = {"unit": "times", "range": [0.1, 100]}
FOUND = {"value": 3.6, "range": [3.2, 4.1], "measured": 3.3}


@needs_node
def test_a_guess_is_a_number_perhaps_with_its_unit():
    guesses = {"2": 2, " 2.5 times ": 2.5, "2times": 2, ".5": 0.5, "1e1": 10, "+3": 3}
    given = {"question": QUESTION, "typed": list(guesses)}
    expression = "given.typed.map((text) => Questions.check(given.question, text))"
    found = run_scripts(expression, given)
    assert found == [{"guess": guess} for guess in guesses.values()]


@needs_node
def test_a_wrong_guess_is_refused_in_one_sentence():
    typed = ["", "  ", "0", "-2", "101", "two", "3,6", "1/2", "NaN", "Infinity", "0x10", "times"]
    given = {"question": QUESTION, "typed": typed}
    expression = "given.typed.map((text) => Questions.check(given.question, text))"
    for text, answer in zip(typed, run_scripts(expression, given), strict=True):
        assert list(answer) == ["problem"], text
        assert answer["problem"].endswith("."), text
        assert "0.1 to 100" in answer["problem"], text
        if text.strip() not in ("", "times"):
            assert text in answer["problem"]


@needs_node
def test_a_verdict_says_by_how_much_the_guess_was_off():
    cases = [
        (2, FOUND, ["You guessed 2 times", "says 3.6 times", "80 %: 3.2 to 4.1", "measured 3.3"]),
        (2, FOUND, ["44 % too low"]),
        (7.2, FOUND, ["100 % too high"]),
        (3.6, FOUND, ["right, just so"]),
        (3.4, FOUND, ["right, 6 % too low"]),
        (36, FOUND | {"range": None, "measured": None}, ["900 % too high"]),
    ]
    given = {"question": QUESTION, "cases": [[guess, answer] for guess, answer, _ in cases]}
    expression = (
        "given.cases.map(([guess, found]) => Questions.verdict(given.question, guess, found))"
    )
    verdicts = run_scripts(expression, given)
    for verdict, (_, answer, words) in zip(verdicts, cases, strict=True):
        assert all(word in verdict for word in words), verdict
        assert ("measured" in verdict) == (answer["measured"] is not None)
        assert ("80 %" in verdict) == (answer["range"] is not None)


@needs_node
def test_a_guess_is_right_by_its_gain_its_points_or_the_band():
    """Of 1.14 times as fast, 1.6 is far off, though the two differ by less than 1.5 times."""
    cases = [
        *[("times", 1.6, 1.14, [1.06, 1.16], False), ("times", 1.2, 1.14, [1.06, 1.16], True)],
        *[("times", 1.07, 1.14, [1.06, 1.16], True), ("times", 1.05, 1.14, None, False)],
        *[("times", 0.9, 1.14, None, False), ("times", 0.72, 0.8, None, True)],
        *[("times", 4.8, 3.6, None, True), ("times", 5, 3.6, None, False)],
        *[("of 100", 60, 69, None, True), ("of 100", 58, 69, None, False)],
        *[("%", 9, 3, None, True), ("%", 14, 3, None, False)],
        *[("nodes", 17, 12, None, True), ("nodes", 19, 12, None, False)],
        *[("ms", 400, 488, None, True), ("ms", 300, 488, None, False), ("MB", 0, 0, None, True)],
    ]
    expression = """given.map(([unit, guess, value, range]) => (
      Questions.isRight({ unit }, guess, { value, range })))"""
    found = run_scripts(expression, [case[:4] for case in cases])
    assert found == [case[4] for case in cases]


@needs_node
def test_guesses_become_one_line():
    guesses = [
        {"id": "batch", "guess": 500, "value": 487.907, "isRight": True},
        {"id": "root-link", "guess": 2, "value": 3.60816, "isRight": False},
        {"id": "undecided", "guess": 0, "value": 68.75, "isRight": False},
    ]
    expression = "[Questions.line(given, '2026-11-27'), Questions.score(given)]"
    line, score = run_scripts(expression, guesses)
    assert line == ("lab whatif,2026-11-27,1/3,batch,500,487.9,root-link,2,3.608,undecided,0,68.75")
    assert score == "Right: 1 of 3"
