"""The page's state: in a link and back, and the command that predicts the same."""

import shlex

import pytest

from lab.predict.calibration_file import reference_path
from tests.helpers.node import needs_node, run_scripts
from tests.helpers.whatif_states import Page, add_states, command_of, row_of

pytestmark = needs_node

# Links that cannot be shown, and what the sentence about each names.
WRONG = [
    ("#n=0&end", "from 1 to 4,096"),
    ("#n=4097&end", "got 4097"),
    ("#n=2.5&end", "a whole number"),
    ("#n=&end", "Nodes"),
    ("#n=0x10&end", "0x10"),
    ("#r=1e999&end", "Infinity"),
    ("#r=-1&end", "-1"),
    ("#n=4&n=5&end", "n=5"),
    ("#zz=4&end", "zz=4"),
    ("#n=%E0%A4%A&end", "n=%E0%A4%A"),
    ("#m=gpt9&end", "gpt9"),
    ("#y=ddp,sorcery&f=ddp&end", "sorcery"),
    ("#y=&end", "one or more"),
    ("#f=topk&end", "topk"),
    ("#d=nowhere&end", "nowhere"),
    ("#b=gloo&t=rdma&end", "Gloo sends by TCP"),
    ("#s=&m=resnet34&end", "Step time"),
    ("#c=calibrated&end", "calibration has the steps"),
    ("#z=1&end", "BatchNorm"),
    ("#__proto__=1&end", "__proto__"),
    ("#n=8&kept&n=0&end", "from 1 to 4,096"),
    ("#n=8&kept&kept&end", '"kept"'),
]
# Links of earlier pages, and the transport that they meant.
OLD = [
    ("#b=nccl&t=rdma&end", "rdma-host"),
    ("#b=nccl&t=tcp&end", "tcp-vm"),
    ("#n=7&t=tcp&end", "tcp-vm"),
]
IN_NODE = """(() => {
  const { data, states, some, others, wrong } = given;
  const decoded = (links) => links.map((link) => State.decode(data, link));
  const links = states.map((state) => State.encode(data, state));
  const cut = Array.from({ length: links[7].length - 2 }, (_, at) => links[7].slice(0, at + 2));
  const commands = (page, chosen) => chosen.map((state) => State.command(page, state));
  return {
    links, decoded: decoded(links), some: some.map((state) => State.encode(data, state)),
    cut: decoded(cut), wrong: decoded(wrong), none: decoded(["", "#", "#end"]),
    beside: decoded(states.slice(1).map((state, at) => State.encode(data, state, states[at]))),
    old: decoded(given.old),
    repeated: State.decode(data, "#y=ddp,ddp,ring,ddp&end"),
    commands: commands(data, states.slice(0, 12)), others: commands(others.data, others.states),
  };
})()"""


@pytest.fixture(scope="module")
def page(what_if):
    """A page with random states that it accepts."""
    found = Page(what_if.data, str(reference_path()))
    add_states(found, 400, seed=46)
    given = {"data": found.data, "states": found.states}
    problems = run_scripts("given.states.map((s) => State.check(given.data, s))", given)
    pairs = zip(found.states, problems, strict=True)
    found.states[:] = [state for state, problem in pairs if problem is None]
    assert len(found.states) > 300
    return found


@pytest.fixture(scope="module")
def computed(page):
    """Links and commands of its states, of some others, and what becomes of wrong links."""
    first = page.data["presets"][0]["state"]
    some = [
        first,
        first | {"nodes": 37},
        first | {"bucket_mb": 2.5, "strategies": ["ddp", "ring"]},
    ]
    calibration = page.data["calibration"] | {"is_reference": True, "path": "my files/it's.json"}
    calibrated = first | {"costs": "calibrated", "step_ms": None, "model": calibration["model"]}
    data = page.data | {"calibration": calibration}
    others = {"data": data, "states": [first, calibrated]}
    wrong = [link for link, _ in WRONG]
    given = {"data": page.data, "states": page.states, "some": some, "others": others}
    old = [link for link, _ in OLD]
    return run_scripts(IN_NODE, given | {"wrong": wrong, "old": old})


def test_a_link_holds_the_state(page, computed):
    assert computed["decoded"] == [{"state": state} for state in page.states]
    assert len(set(computed["links"])) == len(page.states)


def test_a_link_holds_a_kept_state_too(page, computed):
    pairs = zip(page.states[1:], page.states, strict=False)
    assert computed["beside"] == [{"state": state, "kept": kept} for state, kept in pairs]


def test_links_of_earlier_pages_open(computed):
    found = [link["state"]["transport"] for link in computed["old"]]
    assert found == [transport for _, transport in OLD]


def test_a_link_has_what_differs_from_the_first_preset(computed):
    assert computed["some"] == ["#end", "#n=37&end", "#u=2.5&y=ddp,ring&end"]


def test_a_link_that_was_cut_is_refused(computed):
    assert computed["links"][7].count("&") > 5
    assert len(computed["cut"]) == len(computed["links"][7]) - 2
    assert all("not complete" in decoded["problem"] for decoded in computed["cut"])


@pytest.mark.parametrize(("link", "named"), WRONG)
def test_a_wrong_link_is_refused(computed, link, named):
    found = computed["wrong"][WRONG.index((link, named))]
    assert named in found["problem"]
    assert "state" not in found


def test_a_strategy_that_a_link_repeats_is_drawn_once(computed):
    assert computed["repeated"]["state"]["strategies"] == ["ddp", "ring"]


def test_no_link_is_the_first_preset(page, computed):
    assert computed["none"] == [{"state": page.data["presets"][0]["state"]}] * 3


def test_the_command_predicts_the_same(page, computed):
    """Python's parser reads the state's numbers out of it."""
    for state, command in zip(page.states[:12], computed["commands"], strict=True):
        lab, *arguments = shlex.split(command)
        assert lab == "lab"
        if "--calibration" not in arguments:
            arguments += ["--calibration", page.calibration]
        found = row_of([*arguments, "--json"])
        expected = row_of(command_of(state, page.calibration))
        assert found | {"rate": None} == expected | {"rate": None}  # 83gbit, 83.0gbit


def test_the_command_with_the_calibration_that_comes_with_the_project(computed):
    """Only calibrated costs need its file; a path with a space is quoted."""
    typical, other = computed["others"]
    assert "--calibration" not in typical
    words = shlex.split(other)
    assert words[words.index("--calibration") + 1] == "my files/it's.json"
    assert not {"--backend", "--transport", "--step-time", "--batch"} & set(words)
