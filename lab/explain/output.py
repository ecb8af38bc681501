"""Print what ``lab explain`` finds."""

import argparse
import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from common.utils.typed_json import calm
from lab.explain.diagnosis import OWN_MESSAGE, SHOWN, Found, LogLine, explain, read_lines


def main_explain(args: argparse.Namespace) -> int:
    """Print the known errors in ``args.logs``, read as one log; return 0.

    Raises UserError if a log cannot be read.
    """
    lines = [line for source in args.logs for line in read_lines(source)]
    found = explain(lines)
    kinds = {one.error.kind for one in found}
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if kinds <= {"note"}:
        console.print(_nothing_known(lines))
    for number, one in enumerate(found, start=1):  # notes come last
        heading = "noted: " if one.error.kind == "note" else f"{number}. "
        _print(console, one, heading=heading, several=len(args.logs) > 1)
    if "echo" in kinds <= {"echo", "note"}:
        console.print(
            "These are echoes: the first failure is in another rank's output. Give the outputs of "
            "all ranks, e.g. lab explain rank*.txt"
        )
    return 0


def _nothing_known(lines: Sequence[LogLine]) -> str:
    if not lines:
        return (
            "The log is empty. A rank that printed nothing was killed or did not start: check how "
            "it was started."
        )
    if own := next((line for line in lines if OWN_MESSAGE.match(line.text)), None):
        return (
            f"No error of the table in {len(lines):,} lines, but a rank says itself what is wrong "
            f"({own.file}:{own.number}):\n   {own.text.strip()}"
        )
    return (
        f"No known error in {len(lines):,} lines. If the run failed: read the first traceback of "
        "each rank, the earliest first; run again with --debug (TORCH_DISTRIBUTED_DEBUG=INFO, "
        "NCCL_DEBUG=INFO); look for killed processes in `dmesg`; check the machine with "
        "`lab doctor`."
    )


def _print(console: Console, one: Found, *, heading: str, several: bool) -> None:
    more = f" (and {one.count - 1} more)" if one.count > 1 else ""
    kind = "" if one.error.kind in ("cause", "note") else f"  ({one.error.kind})"
    text = calm(one.line.text.strip())
    # of a long line, the part that shows the error
    ends = [match.end() for match in (re.search(p, text) for p in one.error.patterns) if match]
    where = f"{one.line.file}:{one.line.number}" if several else f"line {one.line.number}"
    begin = max(0, max(ends, default=0) - SHOWN)
    excerpt = f"{'…' * (begin > 0)}{text[begin : begin + SHOWN]}{'…' * (len(text) > begin + SHOWN)}"
    console.print(Text.assemble(heading, (one.error.title, "bold"), kind))
    console.print(Text(f"   {where}: {excerpt}{more}", style="dim"))
    console.print(Text(f"   cause: {one.error.cause}\n   cure:  {one.error.cure}"))
