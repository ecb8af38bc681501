"""The page's sentences and numbers are those of lab predict."""

import math
import random
from dataclasses import asdict, replace

import msgspec
import pytest

from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.printing import answer
from lab.predict.readable import bytes_text, duration_text, range_text
from lab.whatif.data import State
from lab.whatif.page import scenario_of, steps_of
from tests.helpers.node import needs_node, run_script
from tests.helpers.whatif_states import Page, add_states

pytestmark = needs_node


@pytest.fixture(scope="module")
def predicted(what_if):
    """Random states with their rows and scenarios."""
    page = Page(what_if.data, str(reference_path()))
    add_states(page, 60, seed=11)
    calibration = load_calibration(reference_path())
    found = []
    for given in page.states:
        if given["batch_size"] < 2 or given["focus"] == "none":
            continue
        state = msgspec.convert(given, State)
        [step] = steps_of(state, calibration)
        found.append((given, step, scenario_of(state, calibration)))
    return page, found


def as_row(step):
    """Return the row as the page's engine has it."""
    row = asdict(step)
    return row | row.pop("prediction")


def undecided(case):
    """Return the case as if each purchase were the best one in a third of the draws."""
    state, step, scenario = case
    shares = dict.fromkeys(step.best_shares, 1 / 3)
    ranges = {change: (0.9 * gain, 1.1 * gain) for change, gain in step.gains.items()}
    return state, replace(step, best_shares=shares, gain_ranges=ranges), scenario


def test_the_answer_is_that_of_lab_predict(predicted):
    page, found = predicted
    found = [*found, *map(undecided, found)]
    given = {"data": page.data, "cases": [[state, as_row(step)] for state, step, _ in found]}
    expression = "given.cases.map(([state, row]) => it.sentence(given.data, state, row))"
    sentences = run_script("words", expression, given)
    assert sentences == [answer([step], scenario) for _, step, scenario in found]
    for words in ("not decided", "would bring most", "Nothing would bring much", "slower"):
        assert sum(words in sentence for sentence in sentences) >= 3, words
    assert sentences.count("") >= 2


def test_where_software_limits_the_link(predicted):
    page, found = predicted
    given = {"data": page.data, "states": [state for state, _, _ in found]}
    expression = "given.states.map((state) => it.softwareLimit(given.data, state))"
    sentences = run_script("words", expression, given)
    for sentence, (state, _, scenario) in zip(sentences, found, strict=True):
        is_limited = state["costs"] == "typical" and 2e9 * state["rate_gbit"] > scenario.enough_bits
        assert bool(sentence) == is_limited
        assert not is_limited or f"above {scenario.enough_bits / 1e9:.3g} Gbit/s" in sentence
        assert not is_limited or f"passes {scenario.software_bits / 1e9:.1f} Gbit/s" in sentence


def test_numbers_are_written_as_in_python():
    dice = random.Random(3)
    values = [math.exp(dice.uniform(math.log(1e-10), math.log(1e14))) for _ in range(500)]
    values += [0, 0.9996, 1.125, 1.115, 112.5, 999.5, 0.0009995, 3599.99, 2.5e6, 1e12, 12.5e3]
    expression = "given.map((v) => [it.duration(v), it.bytes(1e10 * v), it.range(v / 3, v)])"
    expected = [[duration_text(v), bytes_text(1e10 * v), range_text(v / 3, v)] for v in values]
    assert run_script("words", expression, values) == expected


@pytest.mark.parametrize(
    ("row", "terms", "named"),
    [
        ((1.0, 0.5, 0.2), (0.1, 0.6, 0.0, 0.0), ("Messages limit", "70 %", "86 %", "bandwidth")),
        ((1.0, 0.01, 0.0), (0.3, 0.1, 0.0, 0.0), ("Computing limits", "1.0 %", "latency")),
        ((1.0, 0.2, 0.1), (0.1, 0.1, 0.4, 0.0), ("Computing takes most", "30 %", "rank 0's link")),
        ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), ("no gradients are sent",)),
    ],
)
def test_what_limits_a_step(row, terms, named):
    names = ("latency", "bandwidth", "root's link", "summation")
    step, exposed, slowed = row
    seconds = {"step_seconds": step, "sync_seconds": exposed, "slowed_seconds": slowed}
    given = [seconds, dict(zip(names, terms, strict=True))]
    found = run_script("words", "it.limits(...given)", given)
    for text in named:
        assert text in " ".join(found.values())
    assert ("longer" in found["detail"]) == (slowed > 0)
