"""Print what ``lab explain`` finds."""

import argparse
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
    errors = [one for one in found if one.error.kind != "note"]
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for number, one in enumerate(errors, start=1):
        _print(console, one, heading=f"{number}. ", several=len(args.logs) > 1)
    if not errors:
        console.print(_nothing_known(lines))
    elif all(one.error.kind == "echo" for one in errors):
        console.print(
            "These are echoes: the first failure is in another rank's output. Give the outputs of "
            "all ranks, e.g. lab explain rank*.txt"
        )
    for one in found[len(errors) :]:  # notes come last
        _print(console, one, heading="noted: ", several=len(args.logs) > 1)
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
    where = f"{one.line.file}:{one.line.number}" if several else f"line {one.line.number}"
    more = f" (and {one.count - 1} more)" if one.count > 1 else ""
    kind = "" if one.error.kind in ("cause", "note") else f"  ({one.error.kind})"
    console.print(Text.assemble(heading, (one.error.title, "bold"), kind))
    console.print(Text(f"   {where}: {_excerpt(one)}{more}", style="dim"))
    console.print(Text(f"   cause: {one.error.cause}\n   cure:  {one.error.cure}"))


def _excerpt(one: Found) -> str:
    """Return the line; of a long one, the part that shows the error."""
    text = calm(one.line.text.strip())
    ends = [match.end() for pattern in one.error.patterns if (match := pattern.search(text))]
    begin = max(0, ends[0] - SHOWN // 2) if ends and ends[0] > SHOWN else 0
    return (
        f"{'…' if begin else ''}{text[begin : begin + SHOWN]}"
        f"{'…' if len(text) > begin + SHOWN else ''}"
    )
