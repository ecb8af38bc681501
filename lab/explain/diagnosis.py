"""``lab explain``: the known errors of torch.distributed, Gloo, NCCL and this project in a log.

``known_errors`` reads the table (known_errors.toml), ``explain`` finds its errors in the lines of
one or several logs, the likely cause first; output.py prints them. No torch is imported.
"""

import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import UserError

# In printed order: what began a failure, what followed, what other ranks print about it, and
# what is no error.
KINDS = ("cause", "symptom", "echo", "note")
OWN = "own_exception"
_TABLE = Path(__file__).with_name("known_errors.toml")
_LONGEST_LINE = 4000
SHOWN = 160  # characters of a line
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = (
    r"^(?:\[?(?:rank|node )?\d+\]?[:|] ?)?\s*"  # of a launcher: "[rank1]: ", "node 2| ", "3: "
)
OWN_MESSAGE = re.compile(_PREFIX + r"error(?: \(rank \d+\))?: ")
"""The beginning of this project's messages for the user."""
_EXCEPTION = re.compile(_PREFIX + r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?::|$)")
_WRAPPERS = re.compile(
    r"ChildFailedError|DistBackendError|Caught \w+ in DataLoader worker"
    r"|KeyboardInterrupt|SystemExit"
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
    after: re.Pattern[str] = re.compile("")
    hides: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogLine:
    """A line of a log: its file, its number (from 1) and its text."""

    file: str
    number: int
    text: str


@dataclass(frozen=True)
class Found:
    """A known error, the first line that shows it, and the number of lines that do."""

    error: KnownError
    line: LogLine
    count: int


@cache
def known_errors() -> tuple[KnownError, ...]:
    """Return the table, in its order."""
    return tuple(
        KnownError(
            name,
            entry["title"],
            entry["kind"],
            tuple(re.compile(pattern) for pattern in entry["patterns"]),
            entry["cause"],
            entry["cure"],
            re.compile(entry.get("after", "")),
            tuple(entry.get("hides", ())),
        )
        for name, entry in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items()
    )


def explain(lines: Sequence[LogLine]) -> list[Found]:
    """Return the known errors in the lines, sorted by kind (see KINDS), then by line.

    An exception that the table does not know becomes a cause named ``own_exception`` if other
    ranks echo it, or a note if no other error is found. ``lines`` may join the logs of several
    ranks.
    """
    shown: dict[KnownError, list[LogLine]] = {}
    own: list[LogLine] = []
    begun: set[str] = set()
    chained = False
    for line in lines:
        text = line.text[:_LONGEST_LINE]
        begun.update(error.name for error in known_errors() if error.after.search(text))
        known = [
            error
            for error in known_errors()
            if error.name in begun and any(pattern.search(text) for pattern in error.patterns)
        ]
        for error in known:
            shown.setdefault(error, []).append(line)
        if _CHAINED.search(text):
            chained = True
        elif not known and _EXCEPTION.match(text) and not _WRAPPERS.search(text):
            if chained:  # a chain is one failure: keep only its last exception
                del own[-1:]
            own.append(line)
            chained = False
    hidden = {name for error in shown for name in error.hides}
    found = [
        Found(error, of_error[0], len(of_error))
        for error, of_error in shown.items()
        if error.name not in hidden
    ]
    echoed = any(one.error.kind in ("symptom", "echo") for one in found)
    if own and (echoed or all(one.error.kind == "note" for one in found)):
        found.append(Found(_own_exception(own[0], echoed=echoed), own[0], len(own)))
    return sorted(found, key=lambda one: (KINDS.index(one.error.kind), lines.index(one.line)))


def _own_exception(line: LogLine, *, echoed: bool) -> KnownError:
    """Return an entry for an exception that the table does not know.

    ``echoed``: other ranks ended because of it.
    """
    return KnownError(
        OWN,
        "an exception of the program itself",
        "cause" if echoed else "note",
        (),
        "A rank raised it and ended; then the connections of the other ranks broke."
        if echoed
        else f"{re.sub(_PREFIX, '', line.text)[:SHOWN]} is not a known error.",
        "Read the traceback above that line: look at its last frame in your own code.",
    )


def read_lines(source: str) -> list[LogLine]:
    """Return the lines of a file, or of standard input for "-", without blank ones.

    Raises UserError if the file cannot be read.
    """
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UserError(
            f"lab explain: {source} cannot be read ({error.strerror or error}): give the file that "
            "holds the output of a rank, or - for standard input"
        ) from error
    text = content.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return [
        LogLine("" if source == "-" else source, number, _COLOURS.sub("", line))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
