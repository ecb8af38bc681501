"""What a terminal shows of a report: the answer, a table of six columns and three findings."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.report import tables
from lab.report.equality import wrong_rows
from lab.report.findings import findings
from lab.report.sentences import EQUAL, SPEED, ReportFinding
from lab.report.verdict import Verdict, verdict
from lab.report.view import NOTHING, CellRow, ComparisonGroup, blocks, percent, what_is_emulated

_FINDINGS = 3
_WIDTH = 100  # of a file or a pipe, which has no width of its own
_RED = "bold red"


def print_answer(console: Console, results: Mapping[str, Any]) -> None:
    """Print the answer, the table and the most important findings of each block of ``results``."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    found = blocks(results)
    for block in found:
        console.print()
        if len(found) > 1:
            console.print(block.label, style="bold", markup=False)
        _print_block(console, block, results)


def _print_block(console: Console, block: ComparisonGroup, results: Mapping[str, Any]) -> None:
    all_findings = findings(block, results.get("timelines"))
    answer = verdict(block, all_findings)
    console.print(Text(answer.text, style=_RED if answer.wrong else "bold"), soft_wrap=True)
    if block.emulated:
        console.print(Text(what_is_emulated(block.settings)), soft_wrap=True)
    console.print(_table(block))
    for finding in _most_important(all_findings, answer):
        mark = "WRONG: " if finding.wrong else "- "
        console.print(
            Text(f"{mark}{finding.text}", style=_RED if finding.wrong else ""),
            soft_wrap=True,
        )


def _most_important(found: Sequence[ReportFinding], answer: Verdict) -> list[ReportFinding]:
    """Return at most three findings that the answer does not give: wrong ones, then answers."""
    rest = [one for one in found if not answer.text.startswith(one.text)]
    speeds = [one for one in rest if one.topic == SPEED and one.caution]
    answers = [one for one in rest if not one.caution and one.topic not in (SPEED, EQUAL)]
    wrong = [one for one in rest if one.wrong]
    unequal = [one for one in rest if one.topic == EQUAL and one.caution]
    order = [*wrong, *unequal, *speeds, *answers]
    return list(dict.fromkeys(order))[:_FINDINGS]


def _table(block: ComparisonGroup) -> Table:
    """Return the cells with the six columns that matter most, at most 80 characters wide."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    headings = ("strategy", "nodes", "step, s\n[95 %]", "exposed\ncomm., s", "speed\nup")
    for heading in headings:
        left = heading == "strategy"
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    table.add_column("claims\nexact", no_wrap=True)
    wrong = wrong_rows(block)
    for row in block.rows:
        if row.step is None:
            table.add_row(row.sync, str(row.nodes), row.status, NOTHING, NOTHING, tables.claim(row))
            continue
        table.add_row(
            row.sync,
            str(row.nodes),
            tables.step_text(row),
            _exposed(row),
            tables.speedup_text(row),
            Text(tables.WRONG, style=_RED) if row.id in wrong else tables.claim(row),
        )
    return table


def _exposed(row: CellRow) -> str:
    """Return the exposed communication with its share of the step: ``0.157 (25 %)``."""
    sync = row.median("sync")
    if sync is None or not row.step or row.nodes == 1:
        return NOTHING
    return f"{tables.seconds(row, 'sync')} ({percent(sync / row.step)})"
