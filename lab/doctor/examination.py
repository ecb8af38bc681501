"""``lab doctor`` itself: ask every check, print the findings or give them as JSON.

``question_of`` reads the flags, ``examine`` asks, ``main_doctor`` prints. A new check is a function in one of the other files and
an entry of CHECKS; none may hang, so each runs in a thread that is left behind when its time is up.
"""

import argparse
import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from common.errors import UserError
from lab.doctor import files, machine, network
from lab.doctor.finding import FAILURE, WARNING, Finding, Question, failure, reason
from lab.doctor.meeting import Place, meet
from lab.doctor.nodes import findings_of, own_facts

FORMAT = 1
CHECKS: tuple[Callable[[Question], Finding | None], ...] = (
    machine.check_python,
    machine.check_torch,
    machine.check_gpus,
    machine.check_cores,
    machine.check_memory,
    machine.check_open_files,
    files.check_code,
    files.check_dataset,
    files.check_disk,
    network.check_host_name,
    network.check_interface,
    network.check_port,
    network.check_master,
    machine.check_cluster_tools,
)
_CHECK_SECONDS = 120.0
_STYLES = {"ok": "green", WARNING: "yellow", FAILURE: "bold red"}


def question_of(args: argparse.Namespace) -> Question:
    """Return what the flags ask; UserError where they don't go together."""
    if (args.num_nodes is None) != (args.rank is None) or (
        args.rank is not None and args.master_ip is None
    ):
        raise UserError(
            "lab doctor: give --master-ip, --num-nodes and --rank together to try the network between the nodes, or "
            "--master-ip alone, or none of them"
        )
    if args.rank is not None and not 0 <= args.rank < args.num_nodes:
        raise UserError(
            f"--rank: got {args.rank} of --num-nodes {args.num_nodes}; ranks count from 0, so give 0 to "
            f"{args.num_nodes - 1}"
        )
    if not 1 <= args.master_port <= 65535:
        raise UserError(f"--master-port: got {args.master_port}, give 1 to 65535")
    if args.timeout <= 0:
        raise UserError(f"--timeout: got {args.timeout:g}, give seconds above 0")
    return Question(
        args.master_ip,
        args.master_port,
        args.num_nodes,
        args.rank,
        args.dataset,
        args.data_dir,
        args.output_dir.absolute(),
        args.timeout,
    )


def examine(
    question: Question, *, tell: Callable[[Finding], None] = lambda finding: None
) -> list[Finding]:
    """Ask every check, in order, and then the other nodes where there are any; ``tell`` gets each finding as it comes."""
    found: list[Finding] = []

    def add(findings: Sequence[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            tell(finding)

    for check in CHECKS:
        add(
            _limited(
                check.__name__.removeprefix("check_").replace("_", " "),
                lambda check=check: [one] if (one := check(question)) is not None else [],
                _CHECK_SECONDS,
            )
        )
    if question.rank is not None:
        blocked = [
            one for one in found if one.name in ("port", "interface") and one.status == FAILURE
        ]
        if blocked:
            add([failure("nodes", f"not met, because of the {blocked[0].name}", blocked[0].remedy)])
        else:
            add(
                _limited(
                    "nodes", lambda: _meet(question), 3 * question.timeout_seconds + _CHECK_SECONDS
                )
            )
    return found


def _meet(question: Question) -> list[Finding]:
    place = Place(question.master_ip, question.master_port, question.num_nodes, question.rank)
    try:
        return findings_of(
            meet(place, own_facts(question), timeout_seconds=question.timeout_seconds)
        )
    except OSError as error:
        return [
            failure("nodes", f"not met ({reason(error)})", "see the lines on port and interface")
        ]


def _limited(name: str, ask: Callable[[], list[Finding]], seconds: float) -> list[Finding]:
    """Ask in a thread; a check that takes too long or breaks is a finding, too."""
    answer: list[list[Finding]] = []

    def run() -> None:
        try:
            answer.append(ask())
        except Exception as error:  # one broken check must not hide the others
            answer.append(
                [
                    failure(
                        name,
                        f"could not be looked at ({type(error).__name__}: {error})",
                        "tell the authors",
                    )
                ]
            )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer:
        return [
            failure(
                name,
                f"no answer within {seconds:g} s",
                "look for a disk or a name server that hangs",
            )
        ]
    return answer[0]


def as_json(question: Question, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as docs/troubleshooting.md describes them."""
    return {
        "format": FORMAT,
        "what": "lab doctor",
        "host": socket.gethostname(),
        "rank": question.rank,
        "num_nodes": question.num_nodes,
        "ok": not _count(findings, FAILURE),
        "failures": _count(findings, FAILURE),
        "warnings": _count(findings, WARNING),
        "findings": [asdict(one) for one in findings],
    }


def main_doctor(args: argparse.Namespace) -> int:
    """Print the findings; return 0 without a failure, else 1. UserError on flags that don't go together."""
    question = question_of(args)
    if args.json:
        findings = examine(question)
        print(json.dumps(as_json(question, findings), indent=1))
        return 1 if _count(findings, FAILURE) else 0
    console = Console(highlight=False, soft_wrap=True)
    findings = examine(question, tell=lambda finding: _print(console, finding))
    failures, warnings = _count(findings, FAILURE), _count(findings, WARNING)
    told = f"{failures} failure{'s' * (failures != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    console.print(Text(f"{told}: {'not ready' if failures else 'ready to run'}", style="bold"))
    return 1 if failures else 0


def _count(findings: Sequence[Finding], status: str) -> int:
    return sum(one.status == status for one in findings)


def _print(console: Console, finding: Finding) -> None:
    console.print(
        Text.assemble(
            (f"{finding.status:<8}", _STYLES[finding.status]), f" {finding.name:<13} {finding.text}"
        )
    )
    if finding.remedy:
        console.print(
            Text(f"{'':<22} -> {finding.remedy}", style="dim" if finding.status == WARNING else "")
        )
