"""Print what ``lab explain`` finds."""

import argparse
import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from common.say import ranks_text
from common.utils.processes import how_ended
from common.utils.typed_json import calm
from lab.explain.diagnosis import diagnose, filled, flags_of
from lab.explain.episodes import Episode
from lab.explain.streams import Log, read_logs

NOTHING_FOUND = 3
_SHOWN = 300  # characters of a line
_FOLLOWED = {
    "initiator": "also",
    "reaction": "then",
    "lifecycle": "then",
    "teardown": "while it ended",
    "handled": "earlier, but the run went on",
}


def main_explain(args: argparse.Namespace) -> int:
    """Print what failed first in ``args.logs``, and why; return 0, or 3 if nothing is found.

    Raises UserError if a log cannot be read.
    """
    logs = read_logs(args.logs)
    found = diagnose(logs)
    flags = flags_of(logs)
    if args.json:
        findings = [_as_json(one, flags) for one in found]
        print(json.dumps({"format": 1, "what": "lab explain", "findings": findings}, indent=1))
    else:
        console = Console(highlight=False, soft_wrap=True, markup=False)
        for text in _texts(logs, found, flags):
            title, separator, rest = text.partition("\n")
            console.print(Text.assemble((title, "bold"), separator, rest))
    return 0 if found and found[0].role != "note" else NOTHING_FOUND


def _as_json(one: Episode, flags: dict[str, str]) -> dict[str, object]:
    """Return a finding as plain values."""
    known = one.known
    frame = one.own_frame
    return {
        "role": one.role,
        "certainty": one.certainty,
        "reason": calm(one.reason),
        "ranks": sorted(one.ranks),
        "stream": one.line.stream,
        "file": one.log.name,
        "line": one.line.number,
        "type": one.type,
        "message": calm(one.message),
        "status": one.status,
        "at": frame and frame.place,
        "source": frame and calm(frame.source),
        "raised_by": one.raised_by,
        "explanation": calm(one.explanation),
        "known_error": known and known.name,
        "cause": known and known.cause,
        "cure": known and filled(known.cure, flags),
    }


def _texts(logs: Sequence[Log], found: Sequence[Episode], flags: dict[str, str]) -> Iterator[str]:
    """Yield what to print: the first failure, what followed, notes."""
    if not found or found[0].role == "note":
        yield _nothing_found(logs)
    for number, one in enumerate(found, start=1):
        files = f"{one.log.name}:" if len(logs) > 1 else "line "
        where = f"{files}{one.line.number}"
        if one.count > 1:
            where += f" and {one.count - 1} more"
        if one.role == "note":
            assert one.known is not None  # notes are of the table
            yield f"noted: {one.known.title} ({where})\n   {one.known.cause}"
        elif number > 1:
            yield f"{number}. {_FOLLOWED[one.role]}: {_headline(one)} ({where})"
        else:
            yield "\n   ".join([f"1. {_headline(one)}", *_details(one, where, flags)])


def _nothing_found(logs: Sequence[Log]) -> str:
    """Return what to read or try when nothing in the logs tells of a failure."""
    if not any(log.text(place).strip() for log in logs for place in range(log.end)):
        return (
            "The log is empty. A rank that printed nothing was killed or did not start: check how "
            "it was started."
        )
    return (
        f"Nothing found: no failure in {sum(log.end for log in logs):,} lines. "
        "If the run did fail: give the outputs of "
        "all ranks and of the launcher (standard error too), and look for killed processes in "
        "`dmesg`; `lab doctor` checks the machine."
    )


def _headline(one: Episode) -> str:
    """Return who failed and how, in one line."""
    who = ranks_text(sorted(one.ranks)) if one.ranks else one.line.stream
    if one.certainty == "possible" and one.explanation:  # where the ranks stood
        return f"only consequences are here: {_shortened(one.explanation)}"
    if one.status:
        return f"{who or 'a process'} {how_ended(one.status)}"
    if one.type:
        return f"{who or 'the program'} raised {_shortened(one.said)}"
    return f"{who}: {_shortened(one.said)}" if who else _shortened(one.said)


def _shortened(text: str) -> str:
    """Return a text that is safe to print, and of a long one whole words of its begin."""
    plain = calm(text)
    if len(plain) <= _SHOWN:
        return plain
    words, _, _ = plain[:_SHOWN].rpartition(" ")
    return f"{words or plain[:_SHOWN]} …"


def _details(one: Episode, where: str, flags: dict[str, str]) -> Iterator[str]:
    """Yield the line of the first failure, the program's line, how sure it is, cause and cure."""
    yield f"{where}: {_shortened(one.line.text.strip())}"
    if frame := one.own_frame:
        yield f"at {frame.place}: {_shortened(frame.source)}".removesuffix(": ")
    if one.raised_by and one.role != "lifecycle":
        yield f"raised by {one.raised_by}"
    if one.explanation and one.role != "reaction":
        yield _shortened(one.explanation)
    yield f"{one.certainty}: {calm(one.reason)}"
    if known := one.known:
        yield f"cause ({known.certainty}): {known.title}. {known.cause}"
        yield f"cure:  {filled(known.cure, flags)}"
