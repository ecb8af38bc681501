"""What becomes of the reports that a driver's ranks print; nothing is run."""

import json

import pytest

from lab.audit.findings.finding import FAULT, found
from lab.audit.result import AuditResult, EqualityVerdict, Failure
from lab.grade.driven import driven_facts
from lab.grade.driver.mark import MARK
from lab.grade.facts import Facts
from lab.grade.findings import entries, lesson_of
from lab.grade.marks import mark_part
from lab.grade.rubric import FOLDER, load_rubric
from tests.helpers.paths import ROOT

DONE = {"found": [], "passed": ["five steps"], "end": "done", "stopped": ""}
SUM = DONE | {"found": [{"name": "sum-not-mean", "evidence": "step 1", "at": ["a/b.py", 7]}]}
RAISED = {
    "found": [{"name": "raises", "evidence": "tied weights: KeyError", "at": None}],
    "passed": ["five steps"],
    "end": "fault",
    "stopped": "tied weights: KeyError",
}
GOING_ON = DONE | {"end": ""}
CRASHED = {"found": [], "passed": [], "end": "stopped", "stopped": "ImportError: numpy"}
FOLLOWS = DONE | {
    "found": [
        {"name": name, "evidence": "step 1", "at": None}
        for name in ("groups-ignored", "shard-not-sent")
    ]
}
CASES = {  # the last reports of 2 ranks, then of 3; the findings, and the marks of 15
    "right": ([DONE] * 2, [DONE] * 3, [], 15),
    "on three": ([DONE] * 2, [DONE, SUM, DONE], ["sum-not-mean"], 0),
    "raised": ([RAISED, GOING_ON], [RAISED] * 3, ["raises"], 7.5),
    "follows": ([FOLLOWS] * 2, [DONE] * 3, ["shard-not-sent"], 0),
    "crashed": ([CRASHED, DONE], [DONE] * 3, [], None),
    "silent": ([DONE] * 2, [DONE, DONE, None], [], None),
    "hung": ([DONE] * 2, [GOING_ON] * 3, [], None),
    "forged": ([DONE] * 2, [DONE, DONE, {"end": "done"}], [], None),
    "unknown": ([DONE] * 2, [DONE, DONE, DONE | {"found": [{"name": "x" * 2000}]}], [], None),
}


def audited(*findings):
    verdict = EqualityVerdict("cannot tell", "a driver")
    return AuditResult("python", [], findings, verdict, failure=Failure("the ranks hung"))


def write_logs(folder, size, reports):
    place = folder / f"{size}-ranks"
    place.mkdir()
    for rank, report in enumerate(reports):
        before = f"hello\n{MARK}{json.dumps(GOING_ON)}\n"
        text = before if report is None else f"{before}{MARK}{json.dumps(report)}\nbye\n"
        (place / f"rank{rank}.log").write_text(text)
    return {size: place}


@pytest.mark.parametrize("name", CASES)
def test_reports_of_all_ranks_and_sizes_become_one_mark(tmp_path, name):
    of_two, of_three, names, marks = CASES[name]
    logs = write_logs(tmp_path, 2, of_two) | write_logs(tmp_path, 3, of_three)
    rubric = load_rubric("cs336")
    audit = driven_facts(audited(), logs, entries(rubric.findings))
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


def test_ranks_that_wait_for_each_other_are_the_audits_finding(tmp_path):
    logs = write_logs(tmp_path, 2, [GOING_ON, GOING_ON])
    values = {"one": 0, "call": "all_reduce", "other": 1}
    differ = found("collectives-differ", kind="waits", **values)
    audit = driven_facts(audited(differ), logs, entries({}))
    assert [finding.name for finding in audit.findings] == ["collectives-differ"]
    assert (audit.status, audit.findings[0].sure) == (1, "certain")


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
        title, page = lesson_of(name, findings).removesuffix(")").split(" (")
        assert (ROOT / page).read_text().startswith(f"# {title}\n")
