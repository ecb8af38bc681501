"""``lab explain``: which known error of torch.distributed, Gloo, NCCL or this project a log holds, with cause and cure.

``known_errors`` reads the table (known_errors.toml), ``explain`` finds its errors in the lines of one or several logs, the likely
cause first; output.py prints them. No torch is imported.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import UserError

KINDS = ("cause", "symptom", "echo", "note")
"""In the order in which they are printed: where it began, what followed, what other ranks print about it, what is no error."""
OWN = "own_exception"
_TABLE = Path(__file__).with_name("known_errors.toml")
_LONGEST_LINE = 4000
SHOWN = 160
"""Characters of a line that are shown."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EXCEPTION = re.compile(
    r"^(?:\[?(?:rank|node )?\d+\]?[:|] ?)?\s*(?:\w+\.)*(\w*(?:Error|Exception|Interrupt))(?::|$)"
)
_PREFIX = re.compile(r"^(?:\[?(?:rank|node )?\d+\]?[:|] ?)?\s*")
_WRAPPERS = re.compile(
    r"ChildFailedError|DistBackendError|Caught \w+ in DataLoader worker|KeyboardInterrupt|SystemExit"
)
_CHAINED = re.compile(
    "^(The above exception was the direct cause of|During handling of the above exception)"
)


@dataclass(frozen=True)
class KnownError:
    """An entry of the table, whose head explains ``after`` and ``hides``."""

    name: str
    title: str
    kind: str
    patterns: tuple[re.Pattern[str], ...]
    cause: str
    cure: str
    after: re.Pattern[str] | None = None
    hides: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogLine:
    """A line of a log: its file, its number (from 1) and its text."""

    file: str
    number: int
    text: str


@dataclass(frozen=True)
class Found:
    """A known error, the first line that shows it and how many do."""

    error: KnownError
    line: LogLine
    count: int


@cache
def known_errors() -> tuple[KnownError, ...]:
    """Return the table, in its order."""
    entries = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return tuple(
        KnownError(
            name,
            entry["title"],
            entry["kind"],
            tuple(re.compile(pattern) for pattern in entry["patterns"]),
            entry["cause"],
            entry["cure"],
            re.compile(entry["after"]) if "after" in entry else None,
            tuple(entry.get("hides", ())),
        )
        for name, entry in entries.items()
    )


def explain(lines: Iterable[LogLine]) -> list[Found]:
    """Return the known errors that the lines show: causes before symptoms, echoes and notes, each in the order of the log.

    An exception that the table does not know counts as a cause named ``own_exception`` where other ranks echo it; as a note where
    nothing else is known. Logs of several ranks may follow one another.
    """
    first: dict[str, LogLine] = {}
    count: dict[str, int] = {}
    own: list[LogLine] = []
    chained = False
    begun: set[str] = set()
    position: dict[LogLine, int] = {}
    for line in lines:
        position[line] = len(position)
        text = line.text[:_LONGEST_LINE]
        known = False
        for error in known_errors():
            if error.after is not None and error.name not in begun:
                if error.after.search(text) is None:
                    continue
                begun.add(error.name)
            if any(pattern.search(text) for pattern in error.patterns):
                known = True
                first.setdefault(error.name, line)
                count[error.name] = count.get(error.name, 0) + 1
        if _CHAINED.search(text):
            chained = True
        elif not known and _EXCEPTION.match(text) and not _WRAPPERS.search(text):
            own[-1 if chained and own else len(own) :] = [line]
            chained = False
    hidden = {name for error in known_errors() if error.name in first for name in error.hides}
    found = [
        Found(error, first[error.name], count[error.name])
        for error in known_errors()
        if error.name in first and error.name not in hidden
    ]
    echoed = any(one.error.kind in ("symptom", "echo") for one in found)
    if own and (echoed or all(one.error.kind == "note" for one in found)):
        found.append(Found(_own_exception(own[0], echoed=echoed), own[0], len(own)))
    return sorted(found, key=lambda one: (KINDS.index(one.error.kind), position[one.line]))


def _own_exception(line: LogLine, *, echoed: bool) -> KnownError:
    """The entry for an exception that the table does not know; ``echoed``: other ranks ended because of it."""
    cause = f"{_PREFIX.sub('', line.text)[:SHOWN]} is none of the errors known here."
    if echoed:
        cause = "A rank raised it and ended; what the others say of their connections followed from that."
    return KnownError(
        OWN,
        "an exception of the program itself",
        "cause" if echoed else "note",
        (),
        cause,
        "Read the traceback above that line: its last frame in your own code is the place to look.",
    )


def read_lines(source: str) -> list[LogLine]:
    """Return the lines of a file, or of standard input for "-". UserError where it cannot be read."""
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UserError(
            f"lab explain: {source} cannot be read ({error.strerror or error}): give the file that holds the output "
            "of a rank, or - for standard input"
        ) from error
    text = content.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return [
        LogLine("" if source == "-" else source, number, _COLOURS.sub("", line))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
