"""What an audit shows: ``print_audit`` on the terminal, ``write_json`` in a file.

The script's text (names of files, lines of code, its command) comes from a stranger: it is shown
without markup and without control characters.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from common.utils.atomic_files import write_atomically
from common.utils.typed_json import calm, encode, label
from lab.audit.findings.finding import Finding
from lab.audit.result import AuditResult
from lab.predict.readable import bytes_text, duration_text

FORMAT = 1
QUESTION = "Equals one process that computes each rank's share and averages"
STYLES = {"yes": "bold green", "no": "bold red", "cannot tell": "bold yellow"}
_WIDTH = 100  # longer lines are hard to read; a file or a pipe has no width of its own
_MOST_EVIDENCE = 3  # sentences of a finding on the terminal
_MOST_TEXT, _MOST_LINES = 600, 12  # characters of a line, lines of a text, on the terminal
_NUMBER = re.compile(r"(?<![\w.])(\d[\d,.]*(?:e[+-]?\d+)?(?![\w]))")
_ON_RANKS = re.compile(r"\(on [^()]+ ranks\)$")  # holds for some runs only
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(%|[mµn]?s|[kMG]?B)(\W|$))")  # where no line should break


def print_audit(console: Console, result: AuditResult) -> None:
    """Print the verdict, the findings, what is right, the notices, the unknown and the speed."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    console.width = min(console.width, _WIDTH)
    _print_wrapped(console, "", verdict_text(result), style=STYLES[result.verdict.answer])
    for line in (f"{counts_text(result)}: {result.command}", *result.remarks):
        _print_wrapped(console, "", line)
    if result.faults and result.failure:  # without faults, `lab` prints it as its last line
        _print_wrapped(console, "", f"Incomplete: {result.failure}")
    for finding in result.faults:
        console.print()
        _print_wrapped(console, "FAULT: ", title(finding), style="bold red")
        _print_details(console, finding)
    if result.right:
        console.print(Text("\nChecked and right:", style="bold"))
        _print_wrapped(console, "  ", one_line("; ".join(joined(result.right))) + ".")
    _print_list(console, "Notices (details: --json or --html)", map(title, result.notices))
    _print_list(console, "Could not be checked", joined(result.unknown))
    _print_list(console, "Computed again in one process", replay_lines(result.replay))
    _print_list(console, "Speed", speed_lines(result.performance))


def verdict_text(result: AuditResult) -> str:
    """Return the answer to ``QUESTION`` with its reason, as one sentence."""
    return f"{QUESTION}: {result.verdict.answer} — {one_line(result.verdict.why).rstrip('.')}."


def counts_text(result: AuditResult) -> str:
    """Return what was found where, as in "2 faults and 1 notice on 2 ranks with torch 2.9"."""
    counts = {"fault": len(result.faults), "notice": len(result.notices)}
    found = [f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts.items() if count]
    torch = versions(result)["torch"]
    version = f" with torch {torch}" if torch else ""
    return f"{enumerated(found) or 'No fault found'} on {runs_text(result)}{version}"


def runs_text(result: AuditResult) -> str:
    """Return the numbers of ranks that ran, as in "2 and 3 ranks"."""
    return ranks_text([recording.size for recording in result.recordings])


def ranks_text(sizes: Iterable[int]) -> str:
    """Return "2 and 3 ranks" or "1 rank"; "no run" without any."""
    numbers = enumerated(str(size) for size in sorted(set(sizes)))
    return f"{numbers} {'rank' if numbers == '1' else 'ranks'}" if numbers else "no run"


def enumerated(words: Iterable[str]) -> str:
    """Return "a, b and c"."""
    *first, last = [*words] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def joined(sentences: Iterable[str]) -> list[str]:
    """Join the sentences on single runs that differ only in numbers: "12 and 8 batches"."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for sentence in sentences:
        parts = _NUMBER.split(sentence) if _ON_RANKS.search(sentence) else [sentence]
        alike.setdefault(tuple(parts[::2]), []).append(parts)
    return [
        "".join(enumerated(dict.fromkeys(each)) for each in zip(*found, strict=True))
        for found in alike.values()
    ]


def title(finding: Finding) -> str:
    """Return a finding's title with the numbers of ranks at which it was found."""
    sizes = f" ({ranks_text(finding.sizes)})" if finding.sizes else ""
    return finding.entry.title + sizes


def speed_lines(performance: Mapping[str, Any] | None) -> list[str]:
    """Return the measured step and the predicted ones as sentences; none without a measurement."""
    if not performance:
        return []
    sent, most = performance["bytes_sent"], performance["most_bytes_sent"]
    busiest = f", at most {bytes_text(most)}" if most > 1.01 * sent else ""
    lines = [
        f"{duration_text(performance['seconds'])} a step on {ranks_text([performance['ranks']])}; "
        f"exposed communication {duration_text(performance['exposed_seconds'])} "
        f"({100 * performance['exposed_share']:.0f} % of a step); a rank sends "
        f"{bytes_text(sent)} a step{busiest}"
    ]
    if steps := performance["predicted"]:
        each = (f"{one['strategy']} {duration_text(one['step_seconds'])}" for one in steps)
        lines.append(f"predicted for this model and batch: {', '.join(each)}")
    return [*lines, *filter(None, [performance["source"], performance["note"]])]


def replay_lines(replay: Mapping[str, Any] | None) -> list[str]:
    """Return what the computation in one process showed, as sentences."""
    if not replay:
        return []
    if why_not := replay.get("why_not"):
        return [f"not possible: {why_not}"]
    return [
        f"step {step}: the weights of {ranks_text([replay['ranks']])} differ by at most "
        f"{difference:.1g} of their size ({parameter})"
        for step, difference, parameter in replay["steps"]
    ]


def one_line(text: str) -> str:
    """Return ``text`` on one line, harmless for a terminal, and not too long."""
    line = " ".join(calm(text).split())
    return line if len(line) <= _MOST_TEXT else line[: _MOST_TEXT - 2] + " …"


def _print_details(console: Console, finding: Finding) -> None:
    """Print evidence, place, cause, cure and certainty below each other."""
    shown, hidden = finding.evidence[:_MOST_EVIDENCE], finding.evidence[_MOST_EVIDENCE:]
    more = [f"{len(hidden)} more: see --json or --html"] if hidden else []
    rows = {
        "found": [*shown, *more],
        "at": [str(finding.at)] if finding.at else [],
        "cause": [finding.entry.cause],
        "cure": [finding.entry.cure],
        "sure": [finding.sure],
    }
    for name, texts in rows.items():
        for index, text in enumerate(texts):
            _print_wrapped(console, f"  {'' if index else name:<6}", text)


def _print_list(console: Console, heading: str, texts: Iterable[str]) -> None:
    """Print a heading and a line for each text; nothing without texts."""
    for index, text in enumerate(texts):
        if index == 0:
            console.print(Text(f"\n{heading}:", style="bold"))
        _print_wrapped(console, "- ", text)


def _print_wrapped(console: Console, start: str, text: str, *, style: str = "") -> None:
    """Print a text after ``start``; its further lines are indented as far."""
    space = " " * len(start)
    for index, line in enumerate(calm(text).splitlines()[:_MOST_LINES]):
        own_space = line[: len(line) - len(line.lstrip())] if index else ""
        lines = textwrap.wrap(
            _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", one_line(line)),
            console.width,
            initial_indent=(space if index else start) + own_space,
            subsequent_indent=space + own_space,
            break_on_hyphens=False,
        )
        shown = "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")
        console.print(Text(shown, style=style), soft_wrap=True)


def write_json(path: Path, result: AuditResult) -> None:
    """Write the audit atomically, with stable names: of findings, those of catalogue.toml."""
    write_atomically(path, encode(as_json(result), indent=1) + b"\n")


def as_json(result: AuditResult) -> dict[str, Any]:
    """Return the content of the JSON file: plain values, texts without control characters."""
    content = {
        "command": result.command,
        "status": result.status,
        "failure": result.failure,
        "verdict": {"question": QUESTION, **msgspec.to_builtins(result.verdict)},
        "findings": [finding_json(one) for one in result.findings],
        "right": result.right,
        "unknown": result.unknown,
        "remarks": result.remarks,
        "runs": [
            {
                "ranks": one.size,
                "asked_ranks": one.asked_size,
                "steps": max((len(rank.by_kind["step"]) for rank in one.ranks), default=0),
                "hung": one.hung,
            }
            for one in result.recordings
        ],
        "versions": versions(result),
        "performance": result.performance,
        "replay": result.replay,
    }
    return label("audit", FORMAT) | _plain(msgspec.to_builtins(content))


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding with the catalogue's texts as plain values."""
    entry, at = finding.entry, finding.at
    return {
        "name": finding.name,
        "severity": entry.severity,
        "title": entry.title,
        "evidence": finding.evidence,
        "at": None if at is None else {"file": at.file, "line": at.line, "text": at.text},
        "cause": entry.cause,
        "cure": entry.cure,
        "sure": finding.sure,
        "ranks": finding.sizes,
    }


def versions(result: AuditResult) -> dict[str, str]:
    """Return the versions of Python and torch that the script ran with."""
    ranks = [rank for recording in result.recordings for rank in recording.ranks]
    python = {str(one["python"]) for rank in ranks for one in rank.by_kind["start"]}
    torch = {str(one["version"]) for rank in ranks for one in rank.by_kind["torch"]}
    return {"python": ", ".join(sorted(python)), "torch": ", ".join(sorted(torch))}


def _plain(value: Any) -> Any:
    """Return plain values with all texts calm."""
    if isinstance(value, str):
        return calm(value)
    if isinstance(value, dict):
        return {calm(str(key)): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
