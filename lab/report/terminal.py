"""What a terminal shows of a report: the answer, a table of six columns and four findings."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.report.findings import EQUAL, ITERATION, SPEED, ReportFinding, findings
from lab.report.tables import lines
from lab.report.verdict import Verdict, verdict
from lab.report.view import ComparisonGroup, Json, blocks, what_is_emulated

_FINDINGS = 4
_WIDTH = 100  # of a file or a pipe, which has no width of its own
_RED = "bold red"
_COLUMNS = {
    "strategy": "strategy",
    "nodes": "nodes",
    "step_or_status": "step, s\n[95 %]",
    "exposed_share": "exposed\ncomm., s",
    "speedup_ratio": "speed\nup",
    "claim": "claims\nexact",
}


def print_answer(console: Console, results: Json) -> None:
    """Print the answer, the table and the most important findings of each block of ``results``."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    found = blocks(results)
    for block in found:
        console.print()
        if len(found) > 1:
            console.print(block.label, style="bold", markup=False)
        all_findings = findings(block)
        answer = verdict(block, all_findings)
        console.print(Text(answer.text, style=_RED if answer.wrong else "bold"), soft_wrap=True)
        if answer.why:
            console.print(Text(answer.why), soft_wrap=True)
        if block.emulated:
            console.print(Text(what_is_emulated(block.settings)), soft_wrap=True)
        console.print(_table(block))
        for one in _most_important(all_findings, answer):
            mark, style = ("WRONG: ", _RED) if one.wrong else ("- ", "")
            console.print(Text(mark + one.text, style=style), soft_wrap=True)


def _most_important(found: Sequence[ReportFinding], answer: Verdict) -> list[ReportFinding]:
    """Return at most four findings that the answer does not give: wrong ones, then answers."""
    rest = [one for one in found if not answer.text.startswith(one.text)]
    order = (
        *(one for one in rest if one.wrong),
        *(one for one in rest if one.topic == ITERATION),
        *(one for one in rest if one.topic == EQUAL and one.caution),
        *(one for one in rest if one.topic == SPEED and one.caution),
        *(one for one in rest if one.topic not in (SPEED, EQUAL, ITERATION) and not one.caution),
    )
    return list(order)[:_FINDINGS]


def _table(block: ComparisonGroup) -> Table:
    """Return the cells with the six columns that matter most, at most 80 characters wide."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for name, heading in _COLUMNS.items():
        left = name in ("strategy", "claim")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for line in lines(block):
        table.add_row(
            *(
                Text(line.texts[name], style=_RED if line.wrong and name == "claim" else "")
                for name in _COLUMNS
            )
        )
    return table
