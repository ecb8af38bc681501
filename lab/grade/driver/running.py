"""Run the checks of a part in one rank and report what was found.

``run_part`` imports the student's file and runs each check. After each one a line on stdout, marked
with ``MARK``, holds the ``Report`` so far: the grader reads the last one, so what was found before
a crash or a hang is not lost.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .checks import Check, Flaw
from .mark import MARK
from .student import absent_text, load, student_place

_TIMEOUT = timedelta(seconds=60)
# What another rank's end makes of a message, and the use of a stand-in.
_CONSEQUENCE = re.compile(r"[Cc]onnection|[Tt]imed out|Socket|Broken pipe|MagicMock")


@dataclass
class Report:
    """What one rank has seen so far.

    Parameters
    ----------
    passed : the titles of the checks that found nothing.
    end : "" while checks are being made; "done" after all; "fault" if one that was found ended
        them; "stopped" if an error did that nobody can judge from here.
    stopped : that error, on one line.
    """

    found: list[Flaw] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    end: str = ""
    stopped: str = ""

    def write(self) -> None:
        """Print it on a line of its own."""
        print(f"\n{MARK}{json.dumps(asdict(self))}", flush=True)


def run_part(driver: Any, part: str, script: str, *, address: str, size: int, rank: int) -> int:
    """Join the group, import the student's file, run the checks; return 0 if all were made.

    driver : its module; see checks.py.
    """
    checks: Sequence[Check] = driver.PARTS[part]
    dist.init_process_group(
        "gloo", init_method=address, world_size=size, rank=rank, timeout=_TIMEOUT
    )
    report = Report()
    try:
        module = load(os.path.abspath(script), getattr(driver, "PATHS", ()))
        for check in checks:
            _run(check, module, report)
            report.write()
        report.end = "done"
    except Exception as error:
        traceback.print_exc()
        report.end = report.end or "stopped"
        report.stopped = report.stopped or f"{_told(error)}{absent_text()}"
    report.write()
    if report.end != "done":
        return 1
    dist.barrier()
    return 0


def _run(check: Check, module: Any, report: Report) -> None:
    """Run a check; an error counts as found where it can only be the student's mistake."""
    found: list[Flaw] = []
    try:
        for wrong in check.run(module):  # those before an error are kept
            if wrong.name not in {earlier.name for earlier in found}:
                found.append(wrong)
    except Exception as error:
        report.stopped = f"{check.title}: {_told(error)}{absent_text()}"
        if name := _finding_of(error, check, report):
            report.end = "fault"
            found.append(Flaw(name, report.stopped, student_place(error)))
        raise
    finally:
        report.found += found
    if not found:
        report.passed.append(check.title)


def _finding_of(error: Exception, check: Check, report: Report) -> str | None:
    """Return the finding that an error is; None if it may come from the machine or another rank."""
    if isinstance(error, NotImplementedError):
        return "not-implemented"
    # Once a check has run the same code, the environment has all that it needs.
    if not report.passed or _CONSEQUENCE.search(str(error)):
        return None
    return check.raises_as


def _told(error: BaseException) -> str:
    """Return an error on one line, with the student's line."""
    text = f"{type(error).__name__}: {error}".split("\n")[0][:200].rstrip(": ")
    place = student_place(error)
    return f"{text} ({place[0]}:{place[1]})" if place else text
