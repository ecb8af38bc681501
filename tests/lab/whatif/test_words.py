"""The page's sentences and numbers are those of lab predict, and do not contradict each other."""

import math
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from common.say import bytes_text, duration_text, range_text
from lab.predict.calibration_file import reference_path
from lab.predict.printing import answer
from lab.predict.priors import load_priors
from tests.helpers import ROOT
from tests.helpers.node import needs_node, run_scripts
from tests.helpers.whatif_states import Page, add_states, scenario_of, steps_of

pytestmark = needs_node

SAID = """(() => {
  const { data } = given;
  const rowOf = (state, row) => row ?? Engine.row(data, state, state.focus);
  return given.cases.map(([state, known]) => {
    const row = rowOf(state, known);
    const terms = Timeline.terms(data, state, state.focus);
    return {
      ...Words.limits(data, state, row, terms), row, terms,
      answer: Words.sentence(data, state, row), software: Words.softwareLimit(data, state),
      range: Words.softwareRange(data, state),
      about: Words.about(data, state), error: Words.error(data, state),
    };
  });
})()"""
# What the heading may name, and by which word.
LIMITS = {
    "Computing limits": "computing",
    "Computing and messages": "computing",
    "links between nodes": "network",
    "Rank 0's link": "network",
    "not decided": "not decided",
    "software that sends": "other",
    "latency of messages": "other",
    "inside a node": "other",
    "Adding gradients": "other",
    "Compressing gradients": "other",
    "Compressing gradients limits": "other",
    "takes all": "nothing",
}


# What differs from the first preset (ddp, Gloo on four nodes at 10 Gbit/s, one batch of 256), and
# what the page says of it; "!": what it does not.
CASES: list[tuple[dict[str, Any], dict[str, list[str]]]] = [
    (
        {},
        {
            "limit": ["Computing limits", "16 %", "nothing hides", "slow computing"],
            "about": [
                "vgg11 on 4 nodes, Gloo over TCP on virtual machines at 10 Gbit/s",
                "256 samples",
                "64 a node",
            ],
            "error": ["median of", "!None of"],
        },
    ),
    ({"nodes": 64}, {"limit": ["latency", "89 %"], "error": ["None of"]}),
    ({"focus": "all_reduce", "latency_us": 5000, "nodes": 16}, {"limit": ["latency"]}),
    ({"focus": "gather_scatter"}, {"limit": ["software"], "detail": ["rank 0's link"]}),
    ({"focus": "gather_scatter", "rate_gbit": 1}, {"limit": ["Rank 0's link"]}),
    ({"rate_gbit": 0.3}, {"limit": ["links between nodes"]}),
    (
        {"focus": "hierarchical", "ranks_per_node": 4, "rate_gbit": 0.5},
        {
            "detail": ["between nodes and inside"],
            "error": ["None of"],
            "about": ["of 4 ranks"],
        },
    ),
    ({"focus": "none"}, {"limit": ["no gradients are averaged"]}),
    ({"nodes": 1}, {"limit": ["one rank"], "about": ["256 samples", "!a node", "1 node,"]}),
    ({"focus": "local_sgd"}, {"detail": ["messages of 4 steps"]}),
    ({"nodes": 1000}, {"about": ["2,000 samples, 2 a node"]}),
    ({"nodes": 3}, {"about": ["256 samples, up to 86 a node"]}),
    (
        {
            "scaling": "weak",
            "batch_size": 64,
            "backend": "nccl",
            "transport": "rdma-host",
            "nodes": 8,
        },
        {
            "about": ["NCCL over RDMA through the host", "64 samples a rank, 512 in all"],
            "error": ["NCCL", "!None of"],
        },
    ),
    ({"costs": "calibrated", "step_ms": None}, {"about": ["costs as calibrated at 10"]}),
]


@pytest.fixture(scope="module")
def predicted(what_if):
    """Random states with their rows and scenarios."""
    page = Page(what_if.data, str(reference_path()))
    add_states(page, 60, seed=39)
    found = []
    for given in page.states:
        if given["batch_size"] < 2 or given["focus"] == "none":
            continue
        [step, *_] = steps_of(given, given["strategies"], page.calibration)
        found.append((given, step, scenario_of(given, page.calibration)))
    return [*found, *map(undecided, found)]


@pytest.fixture(scope="module")
def said(what_if, predicted):
    """What the page says of each of these, and then of ``CASES``."""
    first = what_if.preset("cloudlab")
    cases = [[state, as_row(step)] for state, step, _ in predicted]
    cases += [[first | changes, None] for changes, _ in CASES]
    found = run_scripts(SAID, {"data": what_if.data, "cases": cases})
    return found[: len(predicted)], found[len(predicted) :]


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


def test_the_answer_is_that_of_lab_predict(predicted, said):
    sentences = [words["answer"] for words in said[0]]
    assert sentences == [answer([step], scenario) for _, step, scenario in predicted]
    for words in ("not decided", "would bring most", "Nothing would bring much", "slower"):
        assert sum(words in sentence for sentence in sentences) >= 3, words
    assert sentences.count("") >= 2


def test_where_software_limits_the_link(predicted, said):
    for words, (state, _, scenario) in zip(said[0], predicted, strict=True):
        sentence = words["software"]
        is_limited = state["costs"] == "typical" and 2e9 * state["rate_gbit"] > scenario.enough_bits
        assert bool(sentence) == is_limited
        assert not is_limited or f"above {scenario.enough_bits / 1e9:.3g} Gbit/s" in sentence
        if not is_limited:
            continue
        assert ("typical" in sentence) == (state["software_gbit"] is None)
        if state["software_gbit"] is not None:
            continue
        name = f"{state['backend']}-{state['transport']}.most_gbit"
        [most] = [prior for prior in load_priors() if prior.name == name]
        low, high = (
            float(f"{scenario.cluster.adapters * gbit:.3g}") for gbit in (most.low, most.high)
        )
        assert f"(80 %: {low:,g} to {high:,g})" in words["range"]


def test_numbers_are_written_as_in_python():
    dice = random.Random(3)
    values = [math.exp(dice.uniform(math.log(1e-10), math.log(1e14))) for _ in range(500)]
    values += [0, 0.9996, 1.125, 1.115, 112.5, 999.5, 0.0009995, 3599.99, 2.5e6, 1e12, 12.5e3]
    expression = (
        "given.map((v) => [Words.duration(v), Words.bytes(1e10 * v), Words.range(v / 3, v),"
        ' Words.range(0.9 * v, 3 * v, " to ", v)])'
    )
    expected = [
        [
            duration_text(v),
            bytes_text(1e10 * v),
            range_text(v / 3, v),
            range_text(0.9 * v, 3 * v, typical=v),
        ]
        for v in values
    ]
    assert run_scripts(expression, values) == expected
    assert range_text(0.857, 1.16, typical=0.952) == "857 to 1,160 ms"


def named_limit(heading):
    [kind] = {kind for words, kind in LIMITS.items() if words in heading}
    return kind


def contradiction(words, state):
    """Return how a heading contradicts the sentence or the numbers of its row; "" if not."""
    heading, sentence, row = words["limit"], words["answer"], words["row"]
    kind = named_limit(heading)
    share = (row["sync_seconds"] + row["slowed_seconds"]) / row["step_seconds"]
    purchases = {"weak": ("network", "compute"), "strong": ("network", "compute", "nodes")}
    gains = {name: row["gains"][name] for name in purchases[state["scaling"]]}
    best = max(gains, key=gains.get)
    if "100 %" in heading and share < 0.9995:
        return "100 %"
    if kind == "nothing":
        return "" if sum(words["terms"].values()) == 0 else "messages"
    if kind == "not decided":
        return "" if "not decided" in sentence and "a network" in sentence else "decided"
    if kind == "computing":
        is_alone = "Computing limits" in heading and share > 0.5
        return "" if gains[best] >= 1.03 and best != "network" and not is_alone else best
    if kind == "network":
        return "" if best == "network" or gains["network"] > 1.1 else best
    if "software" in heading and gains["network"] > 1.1:
        return "links"
    return "" if share > 1 / 3 and gains["network"] < 4 / 3 else "messages"


def test_the_heading_agrees_with_the_sentence(predicted, said):
    faults = [
        (contradiction(words, state), words["limit"], words["answer"])
        for words, (state, _, _) in zip(said[0], predicted, strict=True)
    ]
    assert [fault for fault in faults if fault[0]] == []
    times = re.compile(r"[\d.,]+ (?:h|s|ms|µs|ns)\b")
    for words in said[0]:
        assert not {*times.findall(words["limit"])} & {*times.findall(words["detail"])}
    assert len({words["detail"].startswith("Of their time") for words in said[0]}) == 2
    kinds = {named_limit(words["limit"]) for words in said[0]}
    assert kinds >= {"computing", "network", "other", "not decided"}


@pytest.mark.slow
def test_the_heading_agrees_with_the_sentence_in_many_states(what_if):
    page = Page(what_if.data, str(reference_path()))
    add_states(page, 300, seed=7)
    cases = [[state, None] for state in page.states]
    found = run_scripts(SAID, {"data": page.data, "cases": cases}, limit=240)
    faults = []
    for words, state in zip(found, page.states, strict=True):
        if fault := contradiction(words, state):
            faults.append((fault, words["limit"], words["answer"]))
    assert faults == []
    assert {named_limit(words["limit"]) for words in found} == {*LIMITS.values()}


def test_what_the_page_says_of_a_state(said):
    """Each has what differs from the first preset, and parts of what the page says of it."""
    for (changes, parts), words in zip(CASES, said[1], strict=True):
        for name, texts in parts.items():
            for text in texts:
                assert (text.removeprefix("!") in words[name]) != text.startswith("!"), changes


def test_the_published_range_follows_from_the_data(what_if, said):
    """Outside it the caption has the numbers of the sets that came with the page."""
    published = [entry for entry in what_if.data["measured"] if entry["is_published"]]
    sets = [entry for entry in published if entry["family"] == "gloo"]
    nodes = [point["nodes"] for entry in sets for point in entry["points"]]
    [outside] = [
        words["error"]
        for (changes, _), words in zip(CASES, said[1], strict=True)
        if changes.get("nodes") == 64
    ]
    assert f"of {min(nodes)} to {max(nodes)} nodes" in outside
    strategies = {point["strategy"] for entry in sets for point in entry["points"]}
    assert set(re.findall(r"[a-z]+_[a-z_]+|\bddp\b", outside)) == strategies


# What differs of a kept state and the shown one from the first preset, and what is said of both.
PAIRS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, ["Change a control"]),
    ({}, {"rate_gbit": 25}, ["10 to 25 Gbit/s: ", "times as fast"]),
    ({"nodes": 4}, {"nodes": 8}, ["4 to 8 nodes: ", "times as fast (80 %"]),
    (
        {"scaling": "weak", "batch_size": 64},
        {"scaling": "weak", "batch_size": 64, "nodes": 8},
        ["4 to 8 nodes: ", "times the samples a second (80 %"],
    ),
    ({"focus": "all_reduce"}, {"bucket_mb": 5.0}, ["default to 5 MiB a bucket, all_reduce to ddp"]),
    ({"costs": "calibrated", "step_ms": None}, {}, ["calibrated to typical costs", "!80 %"]),
    ({"nodes": 12}, {"nodes": 16}, ["12 to 16 nodes: ", "which is faster is open"]),
    ({}, {"rate_gbit": 1}, ["10 to 1 Gbit/s: ", "!is open"]),
]
TOGETHER = """given.pairs.map(([kept, state]) => ({
  said: Words.comparison(given.data, kept, state), ratio: Engine.ratio(given.data, kept, state),
  steps: [kept, state].map((each) => Engine.row(given.data, each, each.focus).step_seconds),
}))"""


def test_two_states_in_one_sentence(what_if):
    """The steps, how many times as fast, and its interval, with what differs before them."""
    first = what_if.preset("cloudlab")
    pairs = [(first | kept, first | changes) for kept, changes, _ in PAIRS]
    found = run_scripts(TOGETHER, {"data": what_if.data, "pairs": pairs})
    for (kept, state), (_, _, parts), words in zip(pairs, PAIRS, found, strict=True):
        for text in parts:
            assert (text.removeprefix("!") in words["said"]) != text.startswith("!"), words["said"]
        if kept == state:
            continue
        before, after = words["steps"]
        assert f": {range_text(before, after, typical=after)} a step" in words["said"]
        if "samples a second" not in words["said"]:
            assert f", {words['ratio']['value']:.2f} times as fast" in words["said"]
    doubled = found[3]["ratio"]["value"]
    assert f", {2 * doubled:.2f} times the samples" in found[3]["said"]


TARGETS: list[tuple[dict[str, Any], str]] = [
    ({"least_efficiency": 50}, "No more than 8 nodes can have an efficiency of 50 %."),
    ({"least_efficiency": 100}, "No more than 1 node can have an efficiency of 100 %."),
    (
        {"least_efficiency": 1, "nodes": 2},
        "128 nodes, the most that are tried, still have an efficiency of 1 %.",
    ),
    ({"most_step_ms": 600}, "A step takes at most 600 ms on 5 to "),
    ({"most_step_ms": 20}, "No number of nodes has a step of 20 ms: the fastest takes "),
    ({}, ""),
]


def test_where_the_reader_s_target_is_reached(what_if):
    """The numbers of nodes are those whose step or efficiency is so."""
    first = what_if.preset("cloudlab") | {"strategies": ["ddp"]}
    states = [first | changes for changes, _ in TARGETS]
    expression = (
        "given.states.map((state) => "
        "[Words.targets(given.data, state), Engine.triedPoints(given.data, state)])"
    )
    found = run_scripts(expression, {"data": what_if.data, "states": states})
    for (changes, text), (said, points) in zip(TARGETS, found, strict=True):
        assert text in said
        assert bool(said) == bool(changes)
        numbers = [
            int(number.replace(",", "")) for number in re.findall(r"([\d,]+)(?= node| to )", said)
        ]
        if "least_efficiency" in changes:
            share = changes["least_efficiency"] / 100
            assert numbers == [max(p["nodes"] for p in points if p["efficiency"] >= share)]
        if changes.get("most_step_ms") == 600:
            fast = [p["nodes"] for p in points if p["step_seconds"] <= 0.6]
            assert numbers == [min(fast), max(fast)]


def test_the_documentation_shows_what_the_page_says(what_if):
    """Its answers are those of the first preset."""
    first = what_if.preset("cloudlab")
    expression = """(() => {
      const { data, first } = given;
      const slower = { ...first, rate_gbit: 1 };
      const half = { ...first, least_efficiency: 50, most_step_ms: 600 };
      return [Words.sentence(data, first, Engine.row(data, first, first.focus)),
        Words.comparison(data, first, slower), Words.targets(data, half)];
    })()"""
    said = run_scripts(expression, {"data": what_if.data, "first": first})
    page = Path(ROOT, "docs", "whatif.md").read_text()
    shown = re.findall(r"\| \"(.*?)\" +\|", page)
    assert len(shown) == len(said) == 3
    for part, text in zip(shown, said, strict=True):
        assert text.startswith(part)
