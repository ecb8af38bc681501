"""What a terminal shows of a report: the answer, a table of six columns and four findings."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.comparison.record import Comparison
from lab.report.findings import EQUAL, SPEED, ReportFinding, findings
from lab.report.tables import heading, lines
from lab.report.verdict import verdict
from lab.report.view import ComparisonGroup, blocks, what_is_emulated

_FINDINGS = 4
_WIDTH = 100  # of a file or a pipe, which has no width of its own
_RED = "bold red"
_COLUMNS = {
    "strategy": "strategy",
    "nodes": "",
    "step_or_status": "step, s\n[95 %]",
    "exposed_share": "exposed\ncomm., s",
    "speedup_ratio": "speed\nup",
    "claim": "claims\nexact",
}


def print_answer(console: Console, comparison: Comparison) -> None:
    """Print the answer, the table and the most important findings of each block."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    found = blocks(comparison)
    for block in found:
        console.print()
        if len(found) > 1:
            console.print(block.label, style="bold", markup=False)
        _print_block(console, block)


def _print_block(console: Console, block: ComparisonGroup) -> None:
    """Print a block's answer, its table, and findings that the answer does not give."""
    all_findings = findings(block)
    answer = verdict(block, all_findings)
    console.print(Text(answer.text, style=_RED if answer.wrong else "bold"), soft_wrap=True)
    if answer.why:
        console.print(Text(answer.why), soft_wrap=True)
    if block.emulated:
        console.print(Text(what_is_emulated(block.settings)), soft_wrap=True)
    console.print(_table(block))
    # Without the one with which the answer begins.
    rest = [finding for finding in all_findings if not answer.text.startswith(finding.text)]
    for finding in _most_important(rest):
        if finding.wrong:
            console.print(Text(f"WRONG: {finding.text}", style=_RED), soft_wrap=True)
        else:
            console.print(Text(f"- {finding.text}"), soft_wrap=True)


def _most_important(found: Sequence[ReportFinding]) -> list[ReportFinding]:
    """Return at most four findings: wrong ones, cautions about the answer, then the others."""
    printed = [finding for finding in found if finding.wrong]
    for topic in (EQUAL, SPEED):
        printed += [finding for finding in found if finding.topic == topic and finding.caution]
    for finding in found:
        if not (finding.wrong or finding.caution or finding.topic in (EQUAL, SPEED)):
            printed.append(finding)
    return printed[:_FINDINGS]


def _table(block: ComparisonGroup) -> Table:
    """Return the cells with the six columns that matter most, at most 80 characters wide."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for name, text in _COLUMNS.items():
        left = name in ("strategy", "claim")
        table.add_column(
            text or heading(name, block.place), justify="left" if left else "right", no_wrap=True
        )
    for line in lines(block):
        cells = []
        for name in _COLUMNS:
            red = line.row.claim.wrong and name == "claim"
            cells.append(Text(line.texts[name], style=_RED if red else ""))
        table.add_row(*cells)
    return table
