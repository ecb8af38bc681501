"""What an audit shows on the terminal, in JSON and on its page, and the times that it measures."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lab.audit.findings.finding import Finding, catalogue
from lab.audit.page import write_page
from lab.audit.performance import measure
from lab.audit.recording import CodeLine, RankRecords, Recording
from lab.audit.report import joined, print_audit, write_json
from lab.audit.result import AuditResult, EqualityVerdict
from tests.helpers import ROOT

HOSTILE = "[bold]x[/nope] \x1b[2J\u202e<script>alert(1)</script> {{ 7*7 }}"
PERFORMANCE = {
    "ranks": 3,
    "seconds": 0.020,
    "exposed_seconds": 0.005,
    "backward_seconds": 0.008,
    "update_seconds": 0.001,
    "bytes_sent": 1_000_000.0,
    "exposed_share": 0.25,
    "most_bytes_sent": 2_000_000.0,
    "note": "3 ranks share 2 cores, so a step is slower than on separate machines",
    "predicted": [
        {
            "strategy": "ddp",
            "step_seconds": 0.0155,
            "exposed_seconds": 0.0005,
            "bytes_sent": 1_000_000.0,
        }
    ],
    "source": "loopback as calibrated on a laptop, 2026-11-21",
}


def wrong_script(**changes: object) -> AuditResult:
    """Return the audit of a script that sums, with a notice and something unknown."""
    result = AuditResult(
        command="python main.py --rank {rank}",
        recordings=(Recording(2, []), Recording(3, [])),
        findings=(
            Finding(
                "sum-not-mean",
                tuple(f"step {step}: weights 1.00 and 1.00" for step in range(5)),
                CodeLine("main.py", 52, "optimizer.step()"),
                sizes=(2, 3),
            ),
            Finding("batchnorm-statistics", ("layer1.running_mean differs by 3 %",), sizes=(3,)),
        ),
        verdict=EqualityVerdict("no", "the gradients are added up, not divided (2 and 3 ranks)."),
        right=("every rank trains on different samples", "the ranks start from equal weights"),
        unknown=("the order of epochs: only one epoch was seen",),
        remarks=("What the script printed is cut after 6 steps",),
        performance=PERFORMANCE,
    )
    return replace(result, **changes)


def printed(result: AuditResult, *, width: int = 100, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    print_audit(console, result)
    return console.file.getvalue()


EXPECTED = """\
Equals one process that computes each rank's share and averages: no — the gradients are added up,
not divided (2 and 3 ranks).
1 fault and 1 notice on 2 and 3 ranks: python main.py --rank {rank}
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

Checked and right:
  every rank trains on different samples; the ranks start from equal weights.

Notices (details: --json or --html):
- BatchNorm's running statistics differ between ranks (3 ranks)

Could not be checked:
- the order of epochs: only one epoch was seen

Speed:
- 20 ms a step on 3 ranks; exposed communication 5 ms (25 % of a step); a rank sends 1 MB a step, at
  most 2 MB
- predicted for this model and batch: ddp 15.5 ms
- loopback as calibrated on a laptop, 2026-11-21
- 3 ranks share 2 cores, so a step is slower than on separate machines
"""


def test_the_terminal_shows_one_screen_in_the_order_that_matters() -> None:
    entry = catalogue()["sum-not-mean"]
    expected = EXPECTED.replace("CAUSE", entry.cause).replace("CURE", entry.cure)
    found = printed(wrong_script())
    assert found == expected
    assert len(found.splitlines()) <= 40


def test_a_right_script_has_no_heading_without_content() -> None:
    started = RankRecords(1, [{"k": "torch", "version": "2.9"}], np.zeros(0))
    result = wrong_script(
        recordings=(Recording(2, [started]),),
        findings=(),
        verdict=EqualityVerdict("yes", "x"),
        unknown=(),
        performance=None,
        remarks=(),
    )
    text = printed(result)
    assert ": yes — x.\nNo fault found on 2 ranks with torch 2.9: python" in text
    assert not re.search("FAULT|Notices|Could not|Speed|Replay", text)


def test_sentences_on_single_runs_that_differ_in_numbers_are_one() -> None:
    said = [
        "every rank has 12 batches (on 2 ranks)",
        "rank 0 keeps 3 %",
        "every rank has 8 batches (on 3 ranks)",
        "rank 1 keeps 3 %",
        "deviation 3e-08 of conv1 (on 2 ranks)",
        "deviation 4e-08 of conv1 (on 3 ranks)",
        "deviation 4e-08 of conv2 (on 3 ranks)",
    ]
    assert joined(said) == [
        "every rank has 12 and 8 batches (on 2 and 3 ranks)",
        "rank 0 keeps 3 %",
        "rank 1 keeps 3 %",
        "deviation 3e-08 and 4e-08 of conv1 (on 2 and 3 ranks)",
        "deviation 4e-08 of conv2 (on 3 ranks)",
    ]


def test_a_run_that_failed_is_named_everywhere(tmp_path: Path) -> None:
    result = wrong_script(failure="3 ranks: <out> of memory")
    write_page(tmp_path / "audit.html", result)
    write_json(tmp_path / "audit.json", result)
    assert "Incomplete: 3 ranks: <out> of memory" in printed(result)
    assert "3 ranks: &lt;out&gt; of memory" in (tmp_path / "audit.html").read_text()
    assert json.loads((tmp_path / "audit.json").read_text())["failure"] == result.failure


def test_a_stack_keeps_its_lines() -> None:
    stack = Finding("collectives-differ", ("rank 0 waits here:\n  main.py:7: dist.barrier()",))
    lines = printed(wrong_script(findings=(stack,))).splitlines()
    assert "  found rank 0 waits here:" in lines
    assert "          main.py:7: dist.barrier()" in lines


def test_the_scripts_text_is_shown_and_never_obeyed(tmp_path: Path) -> None:
    hostile = Finding("sum-not-mean", (HOSTILE,), CodeLine(HOSTILE, 1, HOSTILE), sizes=(2,))
    result = wrong_script(
        command=HOSTILE,
        findings=(hostile,),
        unknown=(HOSTILE + "\udc80",),
        verdict=EqualityVerdict("no", HOSTILE),
    )
    text = printed(result)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]x[/nope]" in text
    assert "\x1b[2J" not in printed(result, terminal=True)
    write_page(tmp_path / "audit.html", result)
    page = (tmp_path / "audit.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page
    assert "\x1b" not in page
    write_json(tmp_path / "audit.json", result)
    assert json.loads((tmp_path / "audit.json").read_text())["unknown"] == [
        HOSTILE.replace("\x1b", " ").replace("\u202e", " ") + " "
    ]


def test_the_json_has_stable_names_and_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    performance = PERFORMANCE | {"seconds": 0.5, "exposed_seconds": float("nan")}
    write_json(path, wrong_script(performance=performance))
    content = json.loads(path.read_text())
    assert (content["format"], content["what"]) == (1, "audit of data-parallel-lab")
    assert content["verdict"]["answer"] == "no"
    assert content["status"] == 1
    assert [(one["name"], one["severity"]) for one in content["findings"]] == [
        ("sum-not-mean", "fault"),
        ("batchnorm-statistics", "notice"),
    ]
    first = content["findings"][0]
    assert len(first["evidence"]) == 5
    assert first["at"] == {"file": "main.py", "line": 52, "text": "optimizer.step()"}
    assert first["ranks"] == [2, 3]
    assert content["performance"]["seconds"] == 0.5
    assert content["performance"]["exposed_seconds"] is None


def test_the_page_is_one_file_with_all_evidence(tmp_path: Path) -> None:
    write_page(tmp_path / "audit.html", wrong_script())
    page = (tmp_path / "audit.html").read_text()
    assert page.count("weights 1.00 and 1.00") == 5
    assert "predicted: ddp" in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page)


def test_the_page_of_the_documentation_names_every_finding_as_the_catalogue_does() -> None:
    text = (ROOT / "docs/auditing.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(name, one.severity, one.title) for name, one in catalogue().items()]


# --- the times ---


def records(
    *,
    calls: list[dict],
    through: str,
    own_exposed: float,
    apart: float = 0.1,
    done: dict[str, Any] | None = None,
) -> list[dict]:
    """Return six steps of one second each, the first two of which take ten seconds."""
    found: list[dict] = [
        {
            "k": "params",
            "t": 0.0,
            "o": 0,
            "rows": [["0.0.0", "w", [1000], "torch.float32", 1000, 0, 1000]],
        },
        {"k": "ddp", "t": 0.0, "parameters": 1, "bytes": 4000, "at": None},
    ]
    time, number = 0.0, 0
    for step in range(6):
        begin = time
        time += 10.0 if step < 3 else 1.0
        found.append(
            {
                "k": "backward",
                "t": begin + 0.6,
                "step": step,
                "seconds": 0.4,
                "exposed_seconds": own_exposed,
                "forwards": [[4, 0, through, "Net"]],
            }
        )
        for index, call in enumerate(calls):
            at = begin + 0.7 + apart * index
            found.append({"k": "call", "t": at, "c": number, "size": 2, "async": False, **call})
            took = {"seconds": 0.05, "wait_seconds": 0.0} | (done or {})
            found.append({"k": "done", "t": at, "c": number, **took})
            number += 1
        found.append({"k": "step", "t": time, "o": 0, "step": step})
        found.append({"k": "stepped", "t": time + 0.1, "o": 0, "step": step, "seconds": 0.1})
    return found


def measured(**parts: object) -> dict:
    ranks = [
        RankRecords(rank, records(**parts), np.zeros(0), rank)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    result = measure(Recording(2, ranks))
    assert result is not None
    return result


def test_calls_by_hand_are_exposed_and_count_their_bytes() -> None:
    gather = {"name": "gather", "bytes": 4000, "peer": 0}
    scatter = {"name": "scatter", "bytes": 4000, "peer": 0}
    found = measured(calls=[gather, scatter], through="module", own_exposed=0.0)
    assert found["seconds"] == pytest.approx(1.0)
    assert found["exposed_seconds"] == pytest.approx(0.1)
    assert found["exposed_share"] == pytest.approx(0.1)
    assert found["backward_seconds"] == pytest.approx(0.4)
    assert found["bytes_sent"] == 4000  # rank 0 scatters to one rank, rank 1 sends to rank 0
    names = [one["strategy"] for one in found["predicted"]]
    assert names == ["ddp", "overlapped"]
    assert all(0.8 < one["step_seconds"] < 1.0 for one in found["predicted"])


def test_calls_of_several_threads_at_the_same_time_are_exposed_once() -> None:
    call = {"name": "all_reduce", "bytes": 4000}
    found = measured(calls=[call] * 3, through="module", own_exposed=0.0, apart=0.02)
    assert found["exposed_seconds"] == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("own_thread", "exposed", "backward"), [(False, 0.4, 0.1), (True, 0.1, 0.4)]
)
def test_a_call_in_a_thread_of_the_scripts_own_does_not_hold_backward_up(
    own_thread: bool, exposed: float, backward: float
) -> None:
    """Backward lasts from 0.2 to 0.6 s of a step, the call from 0.3 to 0.7 s."""
    call = {"name": "isend", "bytes": 4000}
    done = {"seconds": 0.1, "wait_seconds": 0.3, "own_thread": own_thread}
    found = measured(calls=[call], through="module", own_exposed=0.0, done=done)
    assert found["exposed_seconds"] == pytest.approx(exposed)
    assert found["backward_seconds"] == pytest.approx(backward)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("all_gather_into_tensor", 4000),
        ("all_gather_single", 4000),
        ("reduce_scatter_tensor", 2000),
        ("reduce_scatter_single", 2000),
        ("all_to_all", 2000),
        ("isend", 4000),
    ],
)
def test_every_name_of_a_collective_counts_its_bytes(name: str, sent: float) -> None:
    call = {"name": name, "bytes": 4000}
    found = measured(calls=[call], through="module", own_exposed=0.0)
    assert found["bytes_sent"] == sent


def test_ddp_hides_its_messages_so_they_are_counted_by_its_parameters() -> None:
    found = measured(calls=[], through="ddp", own_exposed=0.15)
    assert found["exposed_seconds"] == pytest.approx(0.15)
    assert found["backward_seconds"] == pytest.approx(0.25)
    assert found["bytes_sent"] == 4000  # 2 (N-1)/N of 4000 bytes on two ranks
    assert [one["strategy"] for one in found["predicted"]] == ["ddp", "overlapped"]


def test_two_optimisers_make_one_step_together() -> None:
    """A GAN: one second for the discriminator, then half a second for the generator."""
    steps = [
        {"k": "step", "t": time, "o": optimizer, "step": 2 * round + optimizer}
        for round in range(6)
        for optimizer, time in ((0, 1.5 * round + 1.0), (1, 1.5 * round + 1.5))
    ]
    found = measure(Recording(1, [RankRecords(1, steps, np.zeros(0), 0)]))
    assert found is not None
    assert found["seconds"] == pytest.approx(1.5)
    assert found["predicted"] == []


def test_without_steps_nothing_is_measured() -> None:
    assert measure(Recording(2, [RankRecords(1, [], np.zeros(0), 0)])) is None
