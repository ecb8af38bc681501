"""What an audit shows: on the terminal, in a JSON file, and on a page that can be sent alone.

``as_json`` holds all of it; the terminal and the page show its parts. The script's text (names of
files, lines of code, its command) comes from a stranger: it is shown without markup and without
control characters.
"""

import platform
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
from rich.console import Console
from rich.text import Text

from common.errors import count
from common.utils.atomic_files import write_atomically
from common.utils.system import usable_cores
from common.utils.typed_json import calm, encode, label
from lab.audit.findings.finding import FAULT, Finding
from lab.audit.performance import Performance
from lab.audit.recording import Recording
from lab.audit.records import CodeLine, Start, TorchImported
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
    """A finding, with the catalogue's texts; ``ranks`` are the numbers of ranks."""

    name: str
    severity: str
    title: str
    evidence: list[str]
    at: LineContent | None
    cause: str
    cure: str
    sure: str
    ranks: list[int]

    @property
    def shown(self) -> str:
        """Its heading."""
        return titled(self.title, self.ranks)


class RunContent(msgspec.Struct):
    """A run of the script."""

    ranks: int
    asked_ranks: int | None
    steps: int
    hung: bool


class VersionsContent(msgspec.Struct):
    """What ran the script."""

    python: str
    executable: str
    torch: str


class AuditContent(msgspec.Struct):
    """All that an audit says."""

    command: str
    status: int
    headline: str
    failure: str | None
    verdict: VerdictContent
    findings: list[FindingContent]
    right: Sequence[str]
    unknown: Sequence[str]
    remarks: Sequence[str]
    runs: list[RunContent]
    versions: VersionsContent
    performance: Performance | None
    replay: None = None  # kept for readers of older results


def as_json(result: AuditResult) -> dict[str, Any]:
    """Return the content of the JSON file: plain values, texts without control characters."""
    plain: dict[str, Any] = msgspec.to_builtins(_content(result))
    return label("audit", FORMAT) | plain


def _content(result: AuditResult) -> AuditContent:
    """Return what an audit says, all texts calm."""
    content = AuditContent(
        command=result.command,
        status=result.status,
        headline=result.headline,
        failure=result.failure,
        verdict=VerdictContent(QUESTION, result.verdict.answer, result.verdict.why),
        findings=[_finding_content(finding) for finding in result.findings],
        right=result.right,
        unknown=result.unknown,
        remarks=result.remarks,
        runs=[
            RunContent(recording.size, recording.asked_size, recording.steps, recording.hung)
            for recording in result.recordings
        ],
        versions=_versions(result.recordings),
        performance=result.performance,
    )
    return msgspec.convert(_plain(msgspec.to_builtins(content)), AuditContent)


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
    """Return plain values with all texts calm."""
    if isinstance(value, str):
        return calm(value)
    if isinstance(value, dict):
        return {calm(str(key)): _plain(held) for key, held in value.items()}
    return [_plain(held) for held in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, result: AuditResult) -> None:
    """Write the audit atomically, with stable names: of findings, those of catalogue.toml."""
    write_atomically(path, encode(as_json(result), indent=1) + b"\n")


# --- what the terminal and the page show alike ---


@dataclass(frozen=True)
class _View:
    """The sentences that are shown; the page's template has them by these names.

    incomplete : why a run was not audited to its end, unless ``answer`` says it.
    own_faults : where lab audit itself failed.
    """

    command: str
    status: int
    answer: str
    equality: str
    watched: str
    incomplete: str | None
    remarks: Sequence[str]
    own_faults: Sequence[str]
    faults: Sequence[FindingContent]
    notices: Sequence[FindingContent]
    right: Sequence[str]
    unknown: Sequence[str]
    speed: Sequence[str]


def _view(result: AuditResult) -> _View:
    """Return the sentences on an audit, calm as well."""
    content = _content(result)
    headline = content.headline
    return _View(
        command=content.command,
        status=content.status,
        answer=f"{headline[:1].upper()}{headline[1:].rstrip('.')}.",
        equality=_equality(content),
        watched=_watched(content),
        incomplete=content.failure if content.failure != headline else None,
        remarks=content.remarks,
        own_faults=[text for text in content.unknown if OWN_FAULT in text],
        faults=[finding for finding in content.findings if finding.severity == FAULT],
        notices=[finding for finding in content.findings if finding.severity != FAULT],
        right=content.right,
        unknown=[text for text in content.unknown if OWN_FAULT not in text],
        speed=_speed_lines(content.performance),
    )


def _equality(content: AuditContent) -> str:
    """Return the question and its answer, with the reason unless the first line says it."""
    equality = f"{QUESTION}: {content.verdict.answer}"
    why = content.verdict.why.rstrip(".")
    known = content.headline.endswith(why.removeprefix("probably "))
    return f"{equality}." if known else f"{equality} — {why}."


def _watched(content: AuditContent) -> str:
    """Return how many steps of which script were watched, and by what it ran."""
    steps = max((run.steps for run in content.runs), default=0)
    ran = ranks_text(run.ranks for run in content.runs)
    versions = content.versions
    return (
        f"Watched {count(steps, 'step')} on {ran}, with Python {versions.python} "
        f"({versions.executable}) and torch {versions.torch or '(none)'}: {content.command}"
    )


def _speed_lines(performance: Performance | None) -> list[str]:
    """Return the measured step and the predicted ones as sentences; none without a measurement."""
    if performance is None:
        return []
    measured = (
        f"{duration_text(performance.seconds)} a step on {ranks_text([performance.ranks])}; "
        f"exposed communication {duration_text(performance.exposed_seconds)} "
        f"({100 * performance.exposed_share:.0f} % of a step); a rank sends "
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
    """A text after ``start``; nothing is printed of an empty text."""

    start: str
    text: str
    style: str = ""


def print_audit(console: Console, result: AuditResult) -> None:
    """Print the answer, the findings, what is right, the notices, the unknown and the speed."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    for row in _rows(_view(result)):
        _print(console, row)


def _rows(view: _View) -> Iterator[_Row]:
    yield _Row("", view.answer, _STYLES[view.status])
    for text in (view.equality, view.watched, *view.remarks):
        yield _Row("", text)
    yield _Row("Incomplete: ", view.incomplete or "")
    for text in view.own_faults:
        yield _Row("Report this: ", text, _STYLES[2])
    for fault in view.faults:
        yield from _fault_rows(fault)
    notices = [notice.shown for notice in view.notices]
    yield from _list_rows("Checked and right", view.right)
    yield from _list_rows("Notices (details: --json or --html)", notices)
    yield from _list_rows("Could not be checked", view.unknown)
    yield from _list_rows("Speed", view.speed)


def _fault_rows(fault: FindingContent) -> Iterator[_Row]:
    first, *others = fault.evidence
    yield _Row("\nFAULT: ", fault.shown, _STYLES[1])
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


def _list_rows(heading: str, texts: Sequence[str]) -> Iterator[_Row]:
    if texts:
        yield _Row("\n", f"{heading}:", "bold")
    for text in texts:
        yield _Row("- ", text)


def _print(console: Console, row: _Row) -> None:
    """Print a row; its further lines are indented as far as its start."""
    space = " " * len(row.start.lstrip("\n"))
    for index, line in enumerate(row.text.splitlines()[:_MOST_LINES]):
        wrapped = textwrap.wrap(
            line,
            min(console.width, _WIDTH),
            initial_indent=space if index else row.start,
            subsequent_indent=space,
            break_on_hyphens=False,
            max_lines=_MOST_LINES // 2,
            placeholder=" …",
        )
        console.print(Text("\n".join(wrapped), style=row.style), soft_wrap=True)


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
    write_atomically(path, template.render(vars(_view(result)), facts=facts).encode())
