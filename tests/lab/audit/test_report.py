"""What an audit shows on the terminal, in JSON and on its page."""

import io
import json
import re
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from lab.audit.findings.finding import Finding, catalogue
from lab.audit.findings.properties import PropertyRow
from lab.audit.performance import Performance, StrategyStep
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import CodeLine
from lab.audit.report import OWN_FAULT, print_audit, write_json, write_page
from lab.audit.result import AuditResult, EqualityVerdict, Failure, verdict
from tests.lab.audit.recordings import probe_record

HOSTILE = "[bold]x[/nope] \x1b[2J\u202e<script>alert(1)</script> {{ 7*7 }}"
PERFORMANCE = Performance(
    ranks=3,
    seconds=0.020,
    exposed_seconds=0.005,
    exposed_share=0.25,
    backward_seconds=0.008,
    update_seconds=0.001,
    predicted=[StrategyStep("ddp", 0.0155, 5e-4, 1e6)],
    bytes_sent=1_000_000.0,
    most_bytes_sent=2_000_000.0,
    note="3 ranks share 2 cores, so a step is slower than on separate machines",
    source="loopback as calibrated on a laptop, 2026-11-21",
)
STARTED = RankRecords(1, [probe_record("torch", version="2.9"), probe_record("step")])
STARTED.records += [probe_record("start", executable="/env/bin/python")]
SUM = Finding(
    "sum-not-mean",
    tuple(f"step {step}: weights 1.00 and 1.00" for step in range(5)),
    CodeLine("main.py", 52, "optimizer.step()"),
    sizes=(2, 3),
)
ORDER = PropertyRow("order", "not seen", ["only one epoch was seen"])
HELD = (
    PropertyRow("weights", "held", ["the ranks start from equal weights"]),
    PropertyRow("samples", "held", ["every rank trains on different samples"]),
)


WRONG = AuditResult(  # of a script that sums, with a notice and something unknown
    command="python main.py --rank {rank}",
    recordings=(Recording(2, [STARTED]), Recording(3, [])),
    findings=(
        SUM,
        Finding("batchnorm-statistics", ("layer1.running_mean differs by 3 %",), sizes=(3,)),
    ),
    verdict=EqualityVerdict(
        "no", "gradients are added up, but not divided by the number of ranks (2 and 3 ranks)"
    ),
    properties=(*HELD, ORDER),
    remarks=("What the script printed is cut after 6 steps",),
    performance=PERFORMANCE,
)


def printed(result, *, width=100, terminal=False):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    print_audit(console, result)
    return console.file.getvalue()


def shown(result, folder):
    """Return what the terminal, the page and the JSON file say."""
    write_page(folder / "audit.html", result)
    write_json(folder / "audit.json", result)
    content = json.loads((folder / "audit.json").read_text())
    return printed(result), (folder / "audit.html").read_text(), content


EXPECTED = """\
Wrong: gradients are added up, but not divided by the number of ranks (2 and 3 ranks).
Same updates as one process that computes each rank's share and averages the gradients: no.
Watched 1 step on 2 and 3 ranks, with Python 3.11.7 (/env/bin/python) and torch 2.9: python main.py
--rank {rank}
What the script printed is cut after 6 steps

FAULT: Gradients are added up, but not divided by the number of ranks (2 and 3 ranks)
  found step 0: weights 1.00 and 1.00
        step 1: weights 1.00 and 1.00
        step 2: weights 1.00 and 1.00
        2 more: see --json or --html
  at    main.py:52: optimizer.step()
  cause CAUSE
  cure  CURE
  sure  certain

What was looked at:
held     the ranks start with equal weights and keep them equal: the ranks start from equal weights
held     the ranks train on different samples: every rank trains on different samples
not seen every epoch has another order: only one epoch was seen

Notices (details: --json or --html):
- BatchNorm's running statistics differ between ranks (3 ranks)

Speed:
- 20 ms a step on 3 ranks; exposed communication 5 ms (25 % of a step); a rank sends 1 MB a step, at
  most 2 MB
- predicted step with this project's strategies: ddp 15.5 ms
- loopback as calibrated on a laptop, 2026-11-21
- 3 ranks share 2 cores, so a step is slower than on separate machines
"""


def test_the_terminal_shows_one_screen_in_the_order_that_matters():
    entry = catalogue()["sum-not-mean"]
    expected = EXPECTED.replace("CAUSE", entry.cause).replace("CURE", entry.cure)
    found = printed(WRONG)
    assert found == expected
    assert len(found.splitlines()) <= 40


def test_a_right_script_has_no_heading_without_content():
    right = replace(WRONG, findings=(), verdict=EqualityVerdict("yes", "x"), properties=HELD)
    text = printed(replace(right, performance=None, remarks=()))
    assert text.startswith("Right: no fault in 1 step on 2 and 3 ranks, to the program's end.\n")
    assert ": yes — x.\n" in text
    assert not re.search("FAULT|Notices|not seen|Speed|Replay", text)


SAME, BYPASSED, WAITS = (
    Finding(name, ("seen",), sizes=(3,))
    for name in ("same-samples", "ddp-bypassed", "collectives-differ")
)
EQUAL, UNSURE = EqualityVerdict("yes", "equal"), EqualityVerdict("cannot tell", "nobody knows")


@pytest.mark.parametrize(
    ("findings", "verdict", "failure", "headline", "status"),
    [
        ((SAME,), UNSURE, None, "wrong: several ranks train on the same samples (3 ranks)", 1),
        ((SAME,), EQUAL, Failure("x"), "wrong: several ranks train on the same samp", 1),
        ((replace(BYPASSED, sure="likely"), SAME), UNSURE, None, "wrong: several ranks train", 1),
        ((replace(BYPASSED, sure="likely"),), UNSURE, None, "probably wrong: DistributedData", 1),
        ((), EQUAL, None, "no fault in what was watched on 2 and 3 ranks. Not seen: whether", 2),
        # Before the first step only what explains the failure counts.
        ((SAME,), UNSURE, Failure("before"), "could not be run: before", 2),
        ((WAITS, SAME), UNSURE, Failure("before"), "wrong: the ranks do not call", 1),
        ((), UNSURE, Failure("x"), "could not be run: x", 2),
        ((), UNSURE, None, "cannot tell: nobody knows", 2),
    ],
)
def test_the_first_line_is_the_gravest_thing_known(
    tmp_path, findings, verdict, failure, headline, status
):
    result = replace(WRONG, findings=findings, verdict=verdict, failure=failure)
    if failure and failure.reason == "before":
        result = replace(result, recordings=(Recording(2, []),))
    text, page, content = shown(result, tmp_path)
    assert content["headline"].startswith(headline)
    assert content["status"] == status
    assert text.lower().startswith(headline.lower())
    colours = ['<p class="verdict">', '<div class="note bad">', '<div class="note">']
    assert [number for number, colour in enumerate(colours) if colour in page] == [status]


def test_a_script_that_failed_has_no_verdict_unless_a_fault_is_known():
    unknown = [PropertyRow("gradients", "not seen", ["one rank alone has nothing to average"])]
    answer = verdict((Recording(2, []),), (), unknown, failure=Failure("x"))
    assert (answer.answer, answer.why[:27]) == ("cannot tell", "the script could not be run")
    assert verdict((Recording(2, []),), (BYPASSED,), unknown, failure=Failure("x")).answer == "no"


def test_a_failed_run_a_fault_of_the_probe_and_a_stack(tmp_path):
    own = f"{OWN_FAULT}, losses, failed (KeyError: 1)"
    failed = PropertyRow("gradients", "not seen", [own])
    stack = Finding("collectives-differ", ("rank 0 waits here:\n  main.py:7: dist.barrier()",))
    line = CodeLine("main.py", 7, "model.cuda()")
    failure = Failure(
        "\x1b[1m<out>\x1b[0m of memory.", "stopped", line, "Why.", "Cure.", "Advice.", "no_gpu"
    )
    result = replace(WRONG, failure=failure, properties=(failed, ORDER), findings=(stack,))
    text, page, content = shown(result, tmp_path)
    told = "stopped: <out> of memory. Why. Advice."
    assert f"Incomplete: {told}" in text
    assert "stopped: &lt;out&gt; of memory. Why. Advice." in page
    assert content["failure"] == told
    assert content["diagnosis"] == {
        "how": "stopped",
        "reason": "<out> of memory.",
        "at": {"file": "main.py", "line": 7, "text": "model.cuda()"},
        "cause": "Why.",
        "cure": "Cure.",
        "advice": "Advice.",
        "known_error": "no_gpu",
    }
    assert text.index(f"Report this: {own}") < text.index("FAULT: ")
    assert f"Report this: {own}" in page
    assert "  found rank 0 waits here:\n          main.py:7: dist.barrier()\n" in text


def test_the_scripts_text_is_shown_and_never_obeyed(tmp_path):
    hostile = Finding("sum-not-mean", (HOSTILE,), CodeLine(HOSTILE, 1, HOSTILE), sizes=(2,))
    result = replace(
        WRONG,
        command=HOSTILE,
        findings=(hostile,),
        properties=[PropertyRow("order", "not seen", [HOSTILE + "\udc80"])],
        verdict=EqualityVerdict("no", HOSTILE),
    )
    text, page, content = shown(result, tmp_path)
    assert not re.search("[\x1b\u202e]", text)
    assert "[bold]x[/nope]" in text
    assert "\x1b[2J" not in printed(result, terminal=True)
    assert not re.search("<script|\x1b", page)
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page
    plain = HOSTILE.replace("\x1b", " ").replace("\u202e", " ")
    assert content["properties"][0]["said"] == [f"{plain} "]


def test_the_json_has_stable_names_and_the_page_all_evidence(tmp_path):
    performance = msgspec.structs.replace(PERFORMANCE, seconds=0.5, exposed_seconds=float("nan"))
    _, page, content = shown(replace(WRONG, performance=performance), tmp_path)
    assert (content["format"], content["what"]) == (2, "audit of data-parallel-lab")
    assert (content["verdict"]["answer"], content["status"]) == ("no", 1)
    first, second = content["findings"]
    assert (first["name"], first["severity"]) == ("sum-not-mean", "fault")
    assert (second["name"], second["severity"]) == ("batchnorm-statistics", "notice")
    assert len(first["evidence"]) == 5
    assert first["at"] == {"file": "main.py", "line": 52, "text": "optimizer.step()"}
    assert first["ranks"] == [2, 3]
    assert content["performance"]["seconds"] == 0.5
    assert content["performance"]["exposed_seconds"] is None
    assert page.count("weights 1.00 and 1.00") == 5
    assert "this project&#39;s strategies: ddp" in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page)
