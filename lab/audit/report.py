"""What an audit shows: on the terminal, in a JSON file, and on a page that can be sent alone.

``as_json`` holds all of it; the terminal and the page show its parts. The script's text (names of
files, lines of code, its command) comes from a stranger: it is shown without markup and without
control characters.
"""

import platform
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from rich.console import Console
from rich.text import Text

from common.errors import count
from common.utils.atomic_files import write_atomically
from common.utils.system import usable_cores
from common.utils.typed_json import calm, encode, label
from lab.audit.findings.finding import FAULT
from lab.audit.result import AuditResult, ranks_text, titled
from lab.predict.readable import bytes_text, duration_text

FORMAT = 1
# Is in what the findings say where the probe has failed.
OWN_FAULT = "a part of lab audit itself"
QUESTION = "Same updates as one process that computes each rank's share and averages the gradients"
_STYLES = {0: "bold green", 1: "bold red", 2: "bold yellow"}
_WIDTH = 100  # longer lines are hard to read; a file or a pipe has no width of its own
_MOST_EVIDENCE = 3  # sentences of a finding on the terminal
_MOST_LINES = 12  # of a text on the terminal; half as many of one that is wrapped


def as_json(result: AuditResult) -> dict[str, Any]:
    """Return the content of the JSON file: plain values, texts without control characters."""
    records = [
        one
        for recording in result.recordings
        for process in recording.processes
        for kind in ("start", "torch")
        for one in process.by_kind[kind]
    ]
    content = {
        "command": result.command,
        "status": result.status,
        "headline": result.headline,
        "failure": result.failure,
        "verdict": {"question": QUESTION, **msgspec.to_builtins(result.verdict)},
        "findings": [
            {
                "name": one.name,
                "severity": one.entry.severity,
                "title": one.entry.title,
                "evidence": one.evidence,
                "at": one.at,
                "cause": one.entry.cause,
                "cure": one.entry.cure,
                "sure": one.sure,
                "ranks": one.sizes,
            }
            for one in result.findings
        ],
        "right": result.right,
        "unknown": result.unknown,
        "remarks": result.remarks,
        "runs": [
            {
                "ranks": one.size,
                "asked_ranks": one.asked_size,
                "steps": one.steps,
                "hung": one.hung,
            }
            for one in result.recordings
        ],
        "versions": {
            name: ", ".join(sorted({str(one[key]) for one in records if key in one}))
            for name, key in (
                ("python", "python"),
                ("executable", "executable"),
                ("torch", "version"),
            )
        },
        "performance": result.performance,
        "replay": None,  # kept for readers of older results
    }
    return label("audit", FORMAT) | _plain(msgspec.to_builtins(content))


def _plain(value: Any) -> Any:
    """Return plain values with all texts calm."""
    if isinstance(value, str):
        return calm(value)
    if isinstance(value, dict):
        return {calm(str(key)): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, result: AuditResult) -> None:
    """Write the audit atomically, with stable names: of findings, those of catalogue.toml."""
    write_atomically(path, encode(as_json(result), indent=1) + b"\n")


# --- what the terminal and the page show alike ---


def _view(result: AuditResult) -> dict[str, Any]:
    """Return the content with the sentences that are shown, calm as well."""
    content = as_json(result)
    headline, verdict, versions = content["headline"], content["verdict"], content["versions"]
    findings = [
        one | {"shown": calm(titled(finding))}
        for one, finding in zip(content["findings"], result.findings, strict=True)
    ]
    why = verdict["why"].rstrip(".")
    known = headline.endswith(why.removeprefix("probably "))  # the first line says why
    watched = max((run["steps"] for run in content["runs"]), default=0)
    ran = ranks_text(run["ranks"] for run in content["runs"])
    return content | {
        "answer": f"{headline[:1].upper()}{headline[1:].rstrip('.')}.",
        "equality": f"{QUESTION}: {verdict['answer']}{'' if known else f' — {why}'}.",
        "watched": f"Watched {count(watched, 'step')} on {ran}, with Python {versions['python']} "
        f"({versions['executable']}) and torch {versions['torch'] or '(none)'}: "
        f"{content['command']}",
        "incomplete": content["failure"] if content["failure"] != headline else None,
        "faults": [one for one in findings if one["severity"] == FAULT],
        "notices": [one for one in findings if one["severity"] != FAULT],
        "own_faults": [one for one in content["unknown"] if OWN_FAULT in one],
        "unknown": [one for one in content["unknown"] if OWN_FAULT not in one],
        "speed": _speed_lines(content["performance"]),
    }


def _speed_lines(performance: Mapping[str, Any] | None) -> list[str]:
    """Return the measured step and the predicted ones as sentences; none without a measurement."""
    if not performance:
        return []
    sent, most = performance["bytes_sent"], performance["most_bytes_sent"]
    busiest = f", at most {bytes_text(most)}" if most > 1.01 * sent else ""
    predicted = ", ".join(
        f"{one['strategy']} {duration_text(one['step_seconds'])}"
        for one in performance["predicted"]
    )
    lines = [
        f"{duration_text(performance['seconds'])} a step on {ranks_text([performance['ranks']])}; "
        f"exposed communication {duration_text(performance['exposed_seconds'])} "
        f"({100 * performance['exposed_share']:.0f} % of a step); a rank sends "
        f"{bytes_text(sent)} a step{busiest}",
        f"predicted step with this project's strategies: {predicted}" if predicted else None,
        performance["source"],
        performance["note"],
    ]
    return [line for line in lines if line]


# --- the terminal ---


def print_audit(console: Console, result: AuditResult) -> None:
    """Print the answer, the findings, what is right, the notices, the unknown and the speed."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    view = _view(result)
    rows = [
        ("", view["answer"], _STYLES[result.status]),
        *(("", text, "") for text in (view["equality"], view["watched"], *view["remarks"])),
        ("Incomplete: ", view["incomplete"] or "", ""),
        *(("Report this: ", text, _STYLES[2]) for text in view["own_faults"]),
    ]
    for finding in view["faults"]:
        first, *others = finding["evidence"]
        hidden, at = len(others) + 1 - _MOST_EVIDENCE, finding["at"]
        rows += [
            ("\nFAULT: ", finding["shown"], _STYLES[1]),
            ("  found ", first, ""),
            *(("        ", one, "") for one in others[: _MOST_EVIDENCE - 1]),
            ("        ", f"{hidden} more: see --json or --html" if hidden > 0 else "", ""),
            ("  at    ", f"{at['file']}:{at['line']}: {at['text']}" if at else "", ""),
            *((f"  {name:<6}", finding[name], "") for name in ("cause", "cure", "sure")),
        ]
    for heading, start, texts in (
        ("Checked and right", "- ", view["right"]),
        ("Notices (details: --json or --html)", "- ", [one["shown"] for one in view["notices"]]),
        ("Could not be checked", "- ", view["unknown"]),
        ("Speed", "- ", view["speed"]),
    ):
        rows += [("\n", f"{heading}:" if texts else "", "bold")]
        rows += [(start, text, "") for text in texts]
    for row in rows:
        _print(console, *row)


def _print(console: Console, start: str, text: str, style: str) -> None:
    """Print a text after ``start``; its further lines are indented as far."""
    space = " " * len(start.lstrip("\n"))
    for index, line in enumerate(text.splitlines()[:_MOST_LINES]):
        wrapped = textwrap.wrap(
            line,
            min(console.width, _WIDTH),
            initial_indent=space if index else start,
            subsequent_indent=space,
            break_on_hyphens=False,
            max_lines=_MOST_LINES // 2,
            placeholder=" …",
        )
        console.print(Text("\n".join(wrapped), style=style), soft_wrap=True)


# --- the page ---


def page_template(file: Path) -> jinja2.Template:
    """Return a page's template, which may include those of lab/report."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([file.parent, Path(__file__).parents[1] / "report"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(file.name)


def write_page(path: Path, result: AuditResult) -> None:
    """Write the page of an audit atomically; jinja2 escapes every text."""
    template = page_template(Path(__file__).with_name("page.html.jinja"))
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": f"{platform.platform()}, {usable_cores()} cores",
    }
    write_atomically(path, template.render(_view(result), facts=facts).encode())
