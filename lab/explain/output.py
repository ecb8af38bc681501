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
    lines: list[LogLine] = []
    for source in args.logs:
        lines += read_lines(source)
    found = explain(lines)
    kinds = {known.error.kind for known in found}
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if kinds <= {"note"}:
        console.print(_nothing_known(lines))
    for number, known in enumerate(found, start=1):  # notes come last
        heading = "noted: " if known.error.kind == "note" else f"{number}. "
        _print(console, known, heading=heading, several=len(args.logs) > 1)
    if "echo" in kinds and kinds <= {"echo", "note"}:
        console.print(
            "These are echoes: the first failure is in another rank's output. Give the outputs of "
            "all ranks, e.g. lab explain rank*.txt"
        )
    return 0


def _nothing_known(lines: Sequence[LogLine]) -> str:
    """Return what to read or try when the table has no error of these lines."""
    if not lines:
        return (
            "The log is empty. A rank that printed nothing was killed or did not start: check how "
            "it was started."
        )
    for line in lines:
        if OWN_MESSAGE.match(line.text):
            return (
                f"No error of the table in {len(lines):,} lines, but a rank says itself what is "
                f"wrong ({line.file}:{line.number}):\n   {line.text.strip()}"
            )
    return (
        f"No known error in {len(lines):,} lines. If the run failed: read the first traceback of "
        "each rank, the earliest first; run again with --debug (TORCH_DISTRIBUTED_DEBUG=INFO, "
        "NCCL_DEBUG=INFO); look for killed processes in `dmesg`; check the machine with "
        "`lab doctor`."
    )


def _print(console: Console, found: Found, *, heading: str, several: bool) -> None:
    """Print an error with its line, cause and cure. several : whether there are several logs."""
    error = found.error
    line = found.line
    title = Text.assemble(heading, (error.title, "bold"))
    if error.kind not in ("cause", "note"):
        title.append(f"  ({error.kind})")
    where = f"{line.file}:{line.number}" if several else f"line {line.number}"
    shown = f"   {where}: {_excerpt(calm(line.text.strip()), error.patterns)}"
    if found.count > 1:
        shown += f" (and {found.count - 1} more)"
    console.print(title)
    console.print(Text(shown, style="dim"))
    console.print(Text(f"   cause: {error.cause}\n   cure:  {error.cure}"))


def _excerpt(text: str, patterns: Sequence[str]) -> str:
    """Return of a long line the part that shows the error."""
    end = 0
    for pattern in patterns:
        if match := re.search(pattern, text):
            end = max(end, match.end())
    begin = max(0, end - SHOWN)
    excerpt = text[begin : begin + SHOWN]
    if begin > 0:
        excerpt = f"…{excerpt}"
    if begin + SHOWN < len(text):
        whole_words, _, _ = excerpt.rpartition(" ")
        excerpt = f"{whole_words or excerpt} …"
    return excerpt
