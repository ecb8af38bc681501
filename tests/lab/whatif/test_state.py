"""The page's state: in a link and back, and the command that predicts the same."""

import shlex

import pytest

from lab.predict.calibration_file import reference_path
from tests.helpers.node import needs_node, run_script
from tests.helpers.whatif_states import Page, add_states, command_of, row_of

pytestmark = needs_node

CUT = "given.links.map((link) => it.decode(given.data, link))"


@pytest.fixture(scope="module")
def page(what_if):
    """A page with random states that it accepts."""
    found = Page(what_if.data, str(reference_path()))
    add_states(found, 400, seed=46)
    given = {"data": found.data, "states": found.states}
    problems = run_script("state", "given.states.map((s) => it.check(given.data, s))", given)
    pairs = zip(found.states, problems, strict=True)
    found.states[:] = [state for state, problem in pairs if problem is None]
    assert len(found.states) > 300
    return found


def test_a_link_holds_the_state(page):
    expression = (
        "given.states.map((s) => it.encode(given.data, s))"
        ".map((link) => [link, it.decode(given.data, link)])"
    )
    found = run_script("state", expression, {"data": page.data, "states": page.states})
    assert [decoded for _, decoded in found] == [{"state": state} for state in page.states]
    assert len({link for link, _ in found}) == len(page.states)


def test_a_link_has_what_differs_from_the_first_preset(page):
    first = page.data["presets"][0]["state"]
    states = [
        first,
        first | {"nodes": 37},
        first | {"bucket_mb": 2.5, "strategies": ["ddp", "ring"]},
    ]
    given = {"data": page.data, "states": states}
    links = run_script("state", "given.states.map((s) => it.encode(given.data, s))", given)
    assert links == ["#end", "#n=37&end", "#u=2.5&y=ddp,ring&end"]


def test_a_link_that_was_cut_is_refused(page):
    given = {"data": page.data, "state": page.states[7]}
    link = run_script("state", "it.encode(given.data, given.state)", given)
    assert link.count("&") > 5
    prefixes = [link[:end] for end in range(2, len(link))]
    found = run_script("state", CUT, {"data": page.data, "links": prefixes})
    assert all("not complete" in decoded["problem"] for decoded in found)


@pytest.mark.parametrize(
    ("link", "named"),
    [
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
    ],
)
def test_a_wrong_link_is_refused(page, link, named):
    [found] = run_script("state", CUT, {"data": page.data, "links": [link]})
    assert named in found["problem"]
    assert "state" not in found


def test_no_link_is_the_first_preset(page):
    found = run_script("state", CUT, {"data": page.data, "links": ["", "#", "#end"]})
    assert found == [{"state": page.data["presets"][0]["state"]}] * 3


def test_the_command_predicts_the_same(page):
    """Python's parser reads the state's numbers out of it."""
    states = page.states[:12]
    given = {"data": page.data, "states": states}
    commands = run_script("state", "given.states.map((s) => it.command(given.data, s))", given)
    for state, command in zip(states, commands, strict=True):
        lab, *arguments = shlex.split(command)
        assert lab == "lab"
        if "--calibration" not in arguments:
            arguments += ["--calibration", page.calibration]
        found = row_of([*arguments, "--json"])
        expected = row_of(command_of(state, page.calibration))
        assert found | {"rate": None} == expected | {"rate": None}  # 83gbit, 83.0gbit


def test_the_command_with_the_calibration_that_comes_with_the_project(page):
    """Only calibrated costs need its file; a path with a space is quoted."""
    calibration = page.data["calibration"] | {"is_reference": True, "path": "my files/it's.json"}
    data = page.data | {"calibration": calibration}
    first = page.data["presets"][0]["state"]
    calibrated = first | {"costs": "calibrated", "step_ms": None, "model": calibration["model"]}
    given = {"data": data, "states": [first, calibrated]}
    typical, other = run_script(
        "state", "given.states.map((s) => it.command(given.data, s))", given
    )
    assert "--calibration" not in typical
    words = shlex.split(other)
    assert words[words.index("--calibration") + 1] == "my files/it's.json"
    assert not {"--backend", "--transport", "--step-time", "--batch"} & set(words)
