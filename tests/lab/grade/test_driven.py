"""What becomes of the verdicts on a driver's runs, and of what ranks print; nothing is run."""

import json

import pytest
import torch

from lab.audit.findings.finding import FAULT, found
from lab.audit.result import AuditResult, EqualityVerdict, Failure
from lab.grade.driven import driven_facts
from lab.grade.driver.checks import Message, Rank, Returned
from lab.grade.driver.mark import MARK
from lab.grade.driver.running import load_driver
from lab.grade.driver.values import encoded
from lab.grade.facts import Facts
from lab.grade.findings import entries, lesson_of
from lab.grade.judge import SILENT, FoundInRun, PartVerdict, decoded, judged, new_run, verdicts_on
from lab.grade.marks import mark_part
from lab.grade.rubric import FOLDER, load_rubric
from tests.helpers.paths import ROOT

DONE = PartVerdict(passed=["five steps"])
SUM = PartVerdict(found=[FoundInRun("sum-not-mean", "step 1", ("a/b.py", 7))])
RAISED = PartVerdict(
    found=[FoundInRun("raises", "tied weights: KeyError")],
    passed=["five steps"],
    end="fault",
    stopped="tied weights: KeyError",
)
CRASHED = PartVerdict(end="stopped", stopped="ImportError: numpy")
SILENT_RANK = PartVerdict(passed=["five steps"], end="stopped", stopped=f"tied weights: {SILENT}")
FOLLOWS = PartVerdict(
    found=[FoundInRun(name, "step 1") for name in ("groups-ignored", "shard-not-sent")]
)
CASES = {  # the verdicts on 2 and on 3 ranks; the findings, and the marks of 15
    "right": (DONE, DONE, [], 15),
    "on three": (DONE, SUM, ["sum-not-mean"], 0),
    "raised": (RAISED, RAISED, ["raises"], 7.5),
    "follows": (FOLLOWS, DONE, ["shard-not-sent"], 0),
    "crashed": (CRASHED, DONE, [], None),
    "hung": (DONE, SILENT_RANK, [], None),
}


def audited(*findings):
    verdict = EqualityVerdict("cannot tell", "a driver")
    return AuditResult("python", [], findings, verdict, failure=Failure("the ranks hung"))


@pytest.mark.parametrize("name", CASES)
def test_verdicts_on_all_sizes_become_one_mark(name):
    of_two, of_three, names, marks = CASES[name]
    rubric = load_rubric("cs336")
    audit = driven_facts(audited(), {2: of_two, 3: of_three}, entries(rubric.findings))
    seen = Facts(key="", audit=audit, used=[], whole=False, doubts=[], seconds=1.0)
    mark = mark_part("optimizer", seen, rubric)
    assert ([finding.name for finding in audit.findings], mark.marks) == (names, marks)
    assert (mark.page, bool(mark.look)) == (None, marks is None)
    if name == "on three":
        assert "3 ranks" in mark.why[0]
        assert "a/b.py:7" in mark.why[0]
    if name == "crashed":
        assert "ImportError: numpy" in audit.headline
    if name == "hung":
        assert "the ranks hung" in audit.headline


def test_ranks_that_wait_for_each_other_are_the_audits_finding():
    values = {"one": 0, "call": "all_reduce", "other": 1}
    differ = found("collectives-differ", kind="waits", **values)
    audit = driven_facts(audited(differ), {2: SILENT_RANK}, entries({}))
    assert [finding.name for finding in audit.findings] == ["collectives-differ"]
    assert (audit.status, audit.findings[0].sure) == (1, "certain")


# --- what ranks print ---

DRIVER = """\
import torch
from lab.grade.driver.checks import Check, Flaw

def run(module, rank):
    return {"sum": module.add(rank.seed)}

def judge(ranks):
    right = float(sum(returned.rank.seed % 1000 for returned in ranks))
    for returned in ranks:
        if returned["sum"].item() != right:
            yield Flaw("wrong-sum", f"rank {returned.rank.number}")

CHECK = Check("the sum", run, judge)
PARTS = {"one": [CHECK], "two": [CHECK] * 2, "none": []}
"""


def line(check, value=None, error=None, **other):
    values = None if value is None else encoded(value)
    return MARK + json.dumps({"check": check, "values": values, "error": error} | other)


def verdict_on(folder, part, *outputs, judge=verdicts_on):
    """Return the verdict on ranks that printed this."""
    (folder / "driver.py").write_text(DRIVER)
    run = new_run(folder, len(outputs))
    right = {"sum": torch.tensor(float(sum(seed % 1000 for seed in run.seeds)))}
    for rank, output in enumerate(outputs):
        run.log(rank).write_text(output.replace("RIGHT", json.dumps(encoded(right))))
    [verdict] = judge(str(folder / "driver.py"), part, [run])
    return verdict


RIGHT = f'{MARK}{{"check": 0, "values": RIGHT, "error": null}}\n'
ERROR = {"text": "the sum: KeyError: 'a'", "at": ["a.py", 3], "unfinished": False, "follows": False}
DEEP = "[" * 100_000
GARBLED = {
    "the old report": MARK + '{"found": [], "passed": ["the sum"], "end": "done", "stopped": ""}',
    "nothing": "",
    "another check": line(1, {"sum": torch.zeros(())}),
    "no JSON": f"{MARK}{{",
    "deep": f"{MARK}{DEEP}",
    "no such value": line(0, {"product": 1}),
    "no tensor": line(0, {"sum": 1}),
    "not encoded": f'{MARK}{{"check": 0, "values": {{"sum": 1}}, "error": null}}',
    "another shape": RIGHT.replace("RIGHT", '["tensor", [9999999999], "AAAA"]'),
    "negative": f'{MARK}{{"check": -1, "values": RIGHT, "error": null}}',
}


def test_right_values_of_all_ranks_pass(tmp_path):
    verdict = verdict_on(tmp_path, "one", f"hello\n{RIGHT}bye", RIGHT, judge=judged)
    assert verdict == PartVerdict(passed=["the sum"])


@pytest.mark.parametrize("name", GARBLED)
def test_what_no_rank_of_the_runner_prints_passes_nothing(tmp_path, name):
    verdict = verdict_on(tmp_path, "one", RIGHT, GARBLED[name])
    assert (verdict.end, verdict.passed, verdict.found) == ("stopped", [], [])
    assert verdict.stopped.startswith("the sum: ")


@pytest.mark.parametrize("course", [path.stem for path in FOLDER.glob("*.py")])
def test_no_check_of_a_course_passes_ranks_that_returned_nothing(course):
    empty = {"start": {}, "steps": [], "after": [], "sent": [], "held": 0}
    ranks = [Returned(Rank(number, 2, number, 7), empty) for number in range(2)]
    parts = load_driver(str(FOLDER / f"{course}.py")).PARTS
    for check in [check for checks in parts.values() for check in checks]:
        try:
            flaws = list(check.judge(ranks))
        except (LookupError, ValueError):
            continue  # which judge.py makes "cannot be judged"
        assert flaws, check.title


def test_tensors_without_elements_equal_no_weights():
    """A shape (0, 10, 10) fits (10, 10) where torch compares, and all of no elements agree."""
    driver = load_driver(str(FOLDER / "cs336.py"))
    check = driver.PARTS["optimizer"][0]
    weights = dict(driver.Plain().named_parameters())
    after = {name: torch.empty(0, *value.shape) for name, value in weights.items()}
    ranks = [Returned(Rank(number, 2, number, 7), {"after": [after] * 10}) for number in range(2)]
    assert list(check.judge(ranks))


def test_a_finding_without_a_text_leaves_the_mark_to_a_person():
    rubric = load_rubric("cs336")
    misspelt = PartVerdict(found=[FoundInRun("shard-not-sendt", "step 1")])
    audit = driven_facts(audited(), {2: misspelt, 3: RAISED}, entries(rubric.findings))
    seen = Facts(key="", audit=audit, used=[], whole=False, doubts=[], seconds=1.0)
    assert (audit.status, mark_part("optimizer", seen, rubric).marks) == (2, None)


def test_a_part_without_checks_passes_nothing(tmp_path):
    assert verdict_on(tmp_path, "none", "", "").end == "stopped"


def test_wrong_values_are_the_drivers_finding(tmp_path):
    wrong = line(0, {"sum": torch.tensor(-1.0)})
    verdict = verdict_on(tmp_path, "one", RIGHT, f"{RIGHT}{wrong}")
    assert [(found.name, found.evidence) for found in verdict.found] == [("wrong-sum", "rank 1")]


def test_an_error_counts_only_where_an_earlier_check_has_passed(tmp_path):
    first = verdict_on(tmp_path, "two", line(0, error=ERROR), RIGHT)
    assert (first.end, first.found) == ("stopped", [])
    assert first.stopped == ERROR["text"]
    raised = line(1, error=ERROR)
    second = verdict_on(tmp_path, "two", f"{RIGHT}{raised}", RIGHT)
    assert second.end == "fault"
    assert [(found.name, found.at) for found in second.found] == [("raises", ("a.py", 3))]
    followed = line(1, error=ERROR | {"follows": True})
    assert verdict_on(tmp_path, "two", f"{RIGHT}{followed}", RIGHT).end == "stopped"


def test_values_come_through_as_they_were():
    value = {
        "tensors": [torch.arange(6.0).reshape(2, 3), torch.zeros(0, 4), torch.tensor(float("nan"))],
        "sent": [Message("send", 8, "ring", 1, ("a.py", 3)), Message("x", 0, "", None, None)],
        "plain": {"a": None, "b": True, "c": 1, "d": 0.5, "e": "text"},
    }
    there = decoded(json.loads(json.dumps(encoded(value))))
    for mine, other in zip(value["tensors"], there.pop("tensors"), strict=True):
        assert torch.equal(mine.nan_to_num(7), other.nan_to_num(7))
    assert there == {"sent": value["sent"], "plain": value["plain"]}


@pytest.mark.parametrize("course", [path.stem for path in FOLDER.glob("*.py")])
def test_every_text_of_a_courses_findings_is_whole_and_its_lesson_is_there(course):
    findings = load_rubric(course.replace("_", "-")).findings
    known = entries(findings)
    titles = [entry.title for entry in known.values() if entry.severity == FAULT]
    assert len(set(titles)) == len(titles)
    assert findings
    for name in [*findings, "raises", "not-implemented"]:
        assert known[name].cause.endswith(".")
        assert known[name].cure.endswith(".")
        lesson = lesson_of(name, findings)
        assert bool(lesson) == (name not in findings or bool(findings[name].read))
        if lesson:
            title, page = lesson.removesuffix(")").split(" (")
            assert (ROOT / page).read_text().startswith(f"# {title}\n")
