"""What an audit shows: on the terminal, in a JSON file, and on a page that can be sent alone.

``as_json`` holds all of it; the terminal and the page show its parts. The script's text (names of
files, lines of code, its command) comes from a stranger: it is shown without markup and without
control characters.
"""

import platform
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from common.say import bytes_text, count, counts, duration_text, percent
from common.utils.atomic_files import write_atomically
from common.utils.system import usable_cores
from common.utils.typed_json import calm, encode, label
from lab.audit.findings.endings import epochs_of, evaluations_of, short_epochs_of
from lab.audit.findings.finding import FAULT, Finding
from lab.audit.findings.properties import PropertyRow
from lab.audit.like import Likeness
from lab.audit.performance import Performance
from lab.audit.recording import Recording
from lab.audit.records import CodeLine, Start, TorchImported
from lab.audit.result import AuditResult, Failure, in_sentence, titled
from lab.html_page import page_template

FORMAT = 2
# Part of each sentence on a failure of the probe, see ``_troubles`` of findings/__init__.py.
OWN_FAULT = "a part of lab audit itself"
QUESTION = "Same updates as one process that computes each rank's share and averages the gradients"
_STYLES = {0: "bold green", 1: "bold red", 2: "bold yellow"}
_STATES = {"held": "", "broken": "red", "not seen": "yellow"}
_WIDTH = 100  # longer lines are hard to read; a file or a pipe has no width of its own
_MOST_EVIDENCE = 3  # sentences of a finding on the terminal
_MOST_LINES = 12  # of a text on the terminal; half as many of one that is wrapped


# --- the content; the fields are keys of the JSON file ---


class VerdictContent(msgspec.Struct):
    """The verdict, with the question that it answers."""

    question: str
    answer: str
    why: str


class LineContent(msgspec.Struct):
    """A line of the script."""

    file: str
    line: int
    text: str


class FindingContent(msgspec.Struct):
    """A finding, with the catalogue's texts; ``ranks`` are the numbers of ranks.

    condition : what it supposes and nobody can tell; None for a finding that holds.
    """

    name: str
    severity: str
    title: str
    evidence: list[str]
    at: LineContent | None
    cause: str
    cure: str
    sure: str
    ranks: list[int]
    condition: str | None

    @property
    def shown(self) -> str:
        """Its heading."""
        heading = titled(self.title, self.ranks)
        return f"If {self.condition}: {in_sentence(heading)}" if self.condition else heading


class RunContent(msgspec.Struct):
    """A run of the script, and how much of it was watched."""

    ranks: int
    asked_ranks: int | None
    steps: int
    hung: bool
    epochs: int = 0
    evaluations: int = 0
    short_epochs: int = 0


class VersionsContent(msgspec.Struct):
    """What ran the script."""

    python: str
    executable: str
    torch: str


class DiagnosisContent(msgspec.Struct):
    """Why a script could not be audited, or not to its end; see ``Failure`` of result.py."""

    how: str
    reason: str
    at: LineContent | None
    cause: str
    cure: str
    advice: str
    known_error: str | None


class AuditContent(msgspec.Struct):
    """All that an audit says."""

    command: str
    status: int
    headline: str
    failure: str | None
    diagnosis: DiagnosisContent | None
    verdict: VerdictContent
    findings: list[FindingContent]
    possible: list[FindingContent]
    properties: list[PropertyRow]
    remarks: Sequence[str]
    runs: list[RunContent]
    versions: VersionsContent
    performance: Performance | None
    likeness: Likeness | None = None
    replay: None = None  # kept for readers of older results

    # What the terminal and the page show, in sentences.

    @property
    def answer(self) -> str:
        """The headline as a sentence."""
        return f"{self.headline[:1].upper()}{self.headline[1:].rstrip('.')}."

    @property
    def equality(self) -> str:
        """The question and its answer, with the reason unless the first line says it."""
        equality = f"{QUESTION}: {self.verdict.answer}"
        why = self.verdict.why.rstrip(".")
        headline_says_it = self.headline.endswith(why.removeprefix("probably "))
        return f"{equality}." if headline_says_it else f"{equality} — {why}."

    @property
    def watched(self) -> str:
        """What of which script was watched, and by what it ran."""
        longest = max(self.runs, key=lambda run: run.steps, default=RunContent(0, None, 0, False))
        seen = count(longest.steps, "step")
        if longest.epochs:
            seen += f" in {count(longest.epochs, 'epoch')}"
        if longest.evaluations:
            seen += f" and {count(longest.evaluations, 'evaluation')}"
        if longest.short_epochs:
            seen += f" ({longest.short_epochs} of the epochs made short)"
        ran = counts((run.ranks for run in self.runs), "rank")
        return (
            f"Watched {seen} on {ran}, with Python {self.versions.python} "
            f"({self.versions.executable}) and torch {self.versions.torch or '(none)'}: "
            f"{self.command}"
        )

    @property
    def incomplete(self) -> str | None:
        """Why a run was not audited to its end, unless the headline says it."""
        return self.failure if self.failure != self.headline else None

    @property
    def faults(self) -> list[FindingContent]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.severity == FAULT]

    @property
    def notices(self) -> list[FindingContent]:
        """The findings that are none."""
        return [finding for finding in self.findings if finding.severity != FAULT]

    @property
    def own_faults(self) -> list[str]:
        """Where lab audit itself failed."""
        return [text for row in self.properties for text in row.said if OWN_FAULT in text]

    @property
    def speed(self) -> list[str]:
        """The measured step and the predicted ones; none without a measurement."""
        return [] if self.performance is None else _speed_lines(self.performance)


def as_json(result: AuditResult) -> dict[str, Any]:
    """Return the content of the JSON file: plain values, texts without control characters."""
    plain: dict[str, Any] = msgspec.to_builtins(content_of(result))
    return label("audit", FORMAT) | plain


def content_of(result: AuditResult) -> AuditContent:
    """Return what an audit says, its texts without control characters."""
    content = AuditContent(
        command=result.command,
        status=result.status,
        headline=result.headline,
        failure=None if result.failure is None else result.failure.text,
        diagnosis=_diagnosis_content(result.failure),
        verdict=VerdictContent(QUESTION, result.verdict.answer, result.verdict.why),
        findings=[_finding_content(finding) for finding in result.findings],
        possible=[_finding_content(finding) for finding in result.possible],
        properties=list(result.properties),
        remarks=result.remarks,
        runs=[_run_content(recording) for recording in result.recordings],
        versions=_versions(result.recordings),
        performance=result.performance,
        likeness=result.likeness,
    )
    return msgspec.convert(_plain(msgspec.to_builtins(content)), AuditContent)


def _run_content(recording: Recording) -> RunContent:
    return RunContent(
        ranks=recording.size,
        asked_ranks=recording.asked_size,
        steps=recording.steps,
        hung=recording.hung,
        epochs=epochs_of(recording),
        evaluations=evaluations_of(recording),
        short_epochs=short_epochs_of(recording),
    )


def _finding_content(finding: Finding) -> FindingContent:
    return FindingContent(
        name=finding.name,
        severity=finding.entry.severity,
        title=finding.entry.title,
        evidence=list(finding.evidence),
        at=_line_content(finding.at),
        cause=finding.entry.cause,
        cure=finding.entry.cure,
        sure=finding.sure,
        ranks=list(finding.sizes),
        condition=finding.condition or None,
    )


def _diagnosis_content(failure: Failure | None) -> DiagnosisContent | None:
    if failure is None:
        return None
    return DiagnosisContent(
        how=failure.how,
        reason=failure.reason,
        at=_line_content(failure.at),
        cause=failure.cause,
        cure=failure.cure,
        advice=failure.advice,
        known_error=failure.known_error,
    )


def _line_content(at: CodeLine | None) -> LineContent | None:
    return None if at is None else LineContent(at.file, at.line, at.text)


def _versions(recordings: Iterable[Recording]) -> VersionsContent:
    processes = [process for recording in recordings for process in recording.processes]
    starts = [start for process in processes for start in process.of(Start)]
    imported = [torch for process in processes for torch in process.of(TorchImported)]
    return VersionsContent(
        python=_listed(start.python for start in starts),
        executable=_listed(str(start.executable) for start in starts),
        torch=_listed(torch.version for torch in imported),
    )


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts)))


def _plain(value: Any) -> Any:
    """Return a plain value with all texts in it, at any depth, without control characters."""
    if isinstance(value, str):
        return calm(value)
    if isinstance(value, dict):
        return {calm(str(key)): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    return value


def write_json(path: Path, result: AuditResult) -> None:
    """Write the audit atomically, with stable names: of findings, those of catalogue.toml."""
    write_atomically(path, encode(as_json(result), indent=1) + b"\n")


# --- the speed, for the terminal and the page ---


def _speed_lines(performance: Performance) -> list[str]:
    """Return the measured step and the predicted ones as sentences."""
    measured = (
        f"{duration_text(performance.seconds)} a step on {count(performance.ranks, 'rank')}; "
        f"exposed communication {duration_text(performance.exposed_seconds)} "
        f"({percent(performance.exposed_share)} of a step); a rank sends "
        f"{bytes_text(performance.bytes_sent)} a step"
    )
    if performance.most_bytes_sent > 1.01 * performance.bytes_sent:
        measured += f", at most {bytes_text(performance.most_bytes_sent)}"
    lines = [measured]
    if performance.predicted:
        predicted = ", ".join(
            f"{step.strategy} {duration_text(step.step_seconds)}" for step in performance.predicted
        )
        lines.append(f"predicted step with this project's strategies: {predicted}")
    lines += [text for text in (performance.source, performance.note) if text]
    return lines


# --- the terminal ---


class _Row(NamedTuple):
    """A text on the terminal; nothing is printed of an empty text.

    start : stands before its first line; further lines are indented as far.
    style : of the whole row, as ``rich`` names it.
    """

    start: str
    text: str
    style: str = ""


def print_audit(console: Console, result: AuditResult) -> None:
    """Print the answer, the findings, what is right, the notices, the unknown and the speed."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    for row in _rows(content_of(result)):
        _print(console, row)


def _rows(audit: AuditContent) -> Iterator[_Row]:
    """Yield all rows, in the order of ``print_audit``."""
    yield _Row("", audit.answer, _STYLES[audit.status])
    for text in (audit.equality, audit.watched, *audit.remarks):
        yield _Row("", text)
    yield _Row("Incomplete: ", audit.incomplete or "")
    for text in audit.own_faults:
        yield _Row("Report this: ", text, _STYLES[2])
    for fault in audit.faults:
        yield from _fault_rows("\nFAULT: ", fault, _STYLES[1])
    for possible in audit.possible:
        yield from _fault_rows("\nPOSSIBLE: ", possible, _STYLES[2])
    notices = [notice.shown for notice in audit.notices]
    yield from _property_rows(audit.properties)
    if audit.likeness is not None:
        yield from _list_rows(audit.likeness.heading, audit.likeness.shown)
    yield from _list_rows("Notices (details: --json or --html)", notices)
    yield from _list_rows("Speed", audit.speed)


def _fault_rows(start: str, fault: FindingContent, style: str) -> Iterator[_Row]:
    """Yield what is said of a fault, or of a possible one, under its heading."""
    first, *others = fault.evidence
    yield _Row(start, fault.shown, style)
    yield _Row("  found ", first)
    for sentence in others[: _MOST_EVIDENCE - 1]:
        yield _Row("        ", sentence)
    hidden = len(fault.evidence) - _MOST_EVIDENCE
    if hidden > 0:
        yield _Row("        ", f"{hidden} more: see --json or --html")
    if fault.at is not None:
        yield _Row("  at    ", f"{fault.at.file}:{fault.at.line}: {fault.at.text}")
    yield _Row("  cause ", fault.cause)
    yield _Row("  cure  ", fault.cure)
    yield _Row("  sure  ", fault.sure)


def _property_rows(properties: Sequence[PropertyRow]) -> Iterator[_Row]:
    """Yield each property with its state and what was seen of it."""
    if properties:
        yield _Row("\n", "What was looked at:", "bold")
    for row in properties:
        yield _Row(f"{row.state:<9}", f"{row.claim}: {'; '.join(row.said)}", _STATES[row.state])


def _list_rows(heading: str, texts: Sequence[str]) -> Iterator[_Row]:
    if texts:
        yield _Row("\n", f"{heading}:", "bold")
    for text in texts:
        yield _Row("- ", text)


def _print(console: Console, row: _Row) -> None:
    """Print a row; its further lines are indented as far as its start."""
    indent = " " * len(row.start.lstrip("\n"))
    for index, line in enumerate(row.text.splitlines()[:_MOST_LINES]):
        wrapped = textwrap.wrap(
            line,
            min(console.width, _WIDTH),
            initial_indent=indent if index else row.start,
            subsequent_indent=indent,
            break_on_hyphens=False,
            max_lines=_MOST_LINES // 2,  # a text from the script may be endless
            placeholder=" …",
        )
        console.print(Text("\n".join(wrapped), style=row.style), soft_wrap=True)


# --- the page ---


class MarkNote(msgspec.Struct):
    """The mark that a grader has given for what was audited; it replaces the answer's colour.

    state : "full", "less" or "open".
    """

    text: str
    state: str


def write_page(path: Path, result: AuditResult) -> None:
    """Write the page of an audit atomically; jinja2 escapes every text."""
    write_content(path, content_of(result))


def write_content(path: Path, content: AuditContent, *, mark: MarkNote | None = None) -> None:
    """Write the page of what an audit said, as ``write_page`` does, with a mark at its top."""
    template = page_template(Path(__file__).with_name("page.html.jinja"))
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": f"{platform.platform()}, {usable_cores()} cores",
    }
    write_atomically(path, template.render(audit=content, facts=facts, mark=mark).encode())
