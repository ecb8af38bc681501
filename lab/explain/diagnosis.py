"""``lab explain``: the known errors of torch.distributed, Gloo, NCCL and this project in a log.

``known_errors`` reads the table (known_errors.toml), ``explain`` finds its errors in the lines of
one or several logs, the likely cause first; output.py prints them. No torch is imported.
"""

import re
import tomllib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

from common.errors import UserError, file_errors
from common.utils.typed_json import without_colours

# In printed order: what began a failure, what followed, what other ranks print about it, and
# what is no error.
KINDS = ("cause", "symptom", "echo", "note")
OWN = "own_exception"
_TABLE = Path(__file__).with_name("known_errors.toml")
LONGEST_LINE = 4000
_MOST_BYTES = 2**28
_NEAR = 40  # lines, of a traceback
SHOWN = 160  # characters of a line
_PREFIX = (
    r"^(?:\[?(?:rank|node )?\d+\]?[:|] ?)?\s*"  # of a launcher: "[rank1]: ", "node 2| ", "3: "
)
# The beginning of this project's messages for the user
OWN_MESSAGE = re.compile(_PREFIX + r"error(?: \(rank \d+\))?: ")
_EXCEPTION = re.compile(
    _PREFIX + r"(?!.*(?:ChildFailedError|DistBackendError|Caught \w+ in DataLoader worker"
    r"|Process(?:Raised|Exited)Exception|KeyboardInterrupt|SystemExit))(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?::|$)"
)
_CHAINED = re.compile(
    _PREFIX + "(?:The above exception was the direct cause of"
    "|During handling of the above exception)"
)


@dataclass(frozen=True, eq=False)
class KnownError:
    """An entry of the table, whose head explains the fields."""

    name: str
    title: str
    kind: str
    cause: str
    cure: str
    patterns: Sequence[str] = ()
    near: str = ""
    after: str = ""
    least: int = 1
    hides: Sequence[str] = ()
    alone: bool = False
    audit: str = ""


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

    def advice(self, **words: str) -> str:
        """Return what to change in the command of ``lab audit``.

        words : what stands for <name> in the entry's text, for each name; the groups of the
            pattern that matched the line come first.
        """
        for pattern in self.error.patterns:
            if match := re.search(pattern, self.line.text):
                matched = {name: word for name, word in match.groupdict().items() if word}
                words = words | matched
                break
        return re.sub(
            r"<(\w+)>", lambda name: words.get(name[1], name[1].upper()), self.error.audit
        )


@cache
def known_errors() -> list[KnownError]:
    """Return the table, in its order."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return [KnownError(name, **entry) for name, entry in table.items()]


def explain(lines: Sequence[LogLine]) -> list[Found]:
    """Return the known errors in the lines, sorted by kind (see KINDS), then by line.

    An exception that the table does not know is added as ``own_exception``: as a cause if all that
    is known follows from another failure, as a note if nothing is known. ``lines`` may join the
    logs of several ranks.
    """
    found, known_lines = _known(lines)
    kinds = {known.error.kind for known in found}
    own = _own_exceptions(lines, known_lines)
    if own and kinds & {"symptom", "echo"} and "cause" not in kinds:
        cause = "A rank raised it and ended; what the other ranks report follows from that."
        found.append(Found(_own_error("cause", cause), own[0], len(own)))
    elif own and kinds <= {"note"}:
        cause = "The table does not know this error, so it is likely the program's own."
        found.append(Found(_own_error("note", cause), own[0], len(own)))
    explained = [known for known in found if not known.error.alone]
    return sorted(
        explained or found,
        key=lambda known: (KINDS.index(known.error.kind), lines.index(known.line)),
    )


def _known(lines: Sequence[LogLine]) -> tuple[list[Found], set[LogLine]]:
    """Return the table's errors in the lines, without hidden ones, and all lines that show any."""
    text = "\n".join(line.text for line in lines)
    shown = {}  # the lines of each error
    hidden: set[str] = set()  # names of entries that another one explains
    for error in known_errors():
        # a search in the whole text is several times as fast as one in each line
        occurs = any(re.search(pattern, text, re.MULTILINE) for pattern in error.patterns)
        if occurs and (showing := _showing(error, lines)):
            shown[error] = showing
            hidden.update(error.hides)
    found = [
        Found(error, showing[0], len(showing))
        for error, showing in shown.items()
        if error.name not in hidden
    ]
    return found, {line for showing in shown.values() for line in showing}


def _own_exceptions(lines: Sequence[LogLine], known: Container[LogLine]) -> list[LogLine]:
    """Return the lines that name an exception, except the known ones."""
    own = []
    for line, following in zip_longest(lines, lines[1:]):
        if line in known or not _EXCEPTION.match(line.text):
            continue
        leads_to_another = following is not None and _CHAINED.match(following.text)
        if not leads_to_another:  # a chain is one failure: only its last exception counts
            own.append(line)
    return own


def _own_error(kind: str, cause: str) -> KnownError:
    """Return the entry of an exception that the table does not have."""
    return KnownError(
        OWN,
        "an exception of the program itself",
        kind,
        cause,
        "Read the traceback above that line: look at its last frame in your own code.",
    )


def _showing(error: KnownError, lines: Sequence[LogLine]) -> list[LogLine]:
    """Return the lines that show the error, where its conditions hold."""
    patterns = [re.compile(pattern) for pattern in error.patterns]
    begun = not error.after
    places = []
    for place, line in enumerate(lines):
        begun = begun or re.search(error.after, line.text) is not None
        if begun and any(pattern.search(line.text) for pattern in patterns):
            places.append(place)
    if error.near:
        places = [place for place in places if _is_near(error.near, place, lines)]
    if len(places) < error.least:
        return []
    return [lines[place] for place in places]


def _is_near(pattern: str, place: int, lines: Sequence[LogLine]) -> bool:
    """Return whether a line around ``place`` matches, in the same log."""
    around = lines[max(0, place - _NEAR) : place + _NEAR + 1]
    file = lines[place].file
    return any(line.file == file and re.search(pattern, line.text) for line in around)


def lines_of(text: str, *, file: str = "") -> list[LogLine]:
    """Return the lines of a text with their numbers, without colours and blank ones."""
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        plain = without_colours(line[:LONGEST_LINE])
        if plain.strip():
            lines.append(LogLine(file, number, plain))
    return lines


def read_lines(source: str) -> list[LogLine]:
    """Return the lines of a file, or of standard input for "-"; see ``lines_of``.

    Raises UserError if the file cannot be read, or has more than ``_MOST_BYTES``.
    """
    is_input = source == "-"
    opened = 0 if is_input else source
    name = source.removeprefix("-")
    with (
        file_errors(
            f"lab explain: {source} cannot be read",
            ": give the file that holds the output of a rank, or - for standard input",
        ),
        open(opened, "rb", closefd=not is_input) as file,
    ):
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise UserError(
            f"lab explain: {source} has more than {_MOST_BYTES:,} bytes: give the part with the "
            "first error, such as the first or the last 100 MB (head -c 100M, tail -c 100M)"
        )
    return lines_of(content.decode(errors="replace"), file=name)
