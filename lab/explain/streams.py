"""Read logs, and tell whose each line is: a rank's, a launcher's, a pod's.

``read_logs`` reads each file as a ``Log``. Its ``line`` splits a line into the label that launchers
put before it and the body. Lines that differ in digits alone have one shape, so a long log is
cheap: ``telling`` has the first place of each shape that may say something about a failure,
``raising`` the places that an exception's text may begin at.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path

from common.errors import UserError, file_errors
from common.utils.typed_json import without_colours

LONGEST_LINE = 4000
_MOST_BYTES = 2**28
_MOST_TELLING = 3000  # shapes of lines that are looked at
_MOST_RAISING = 2000  # places of exceptions, at the begin and at the end
_MOST_SHAPES = 40  # of lines that a run repeats, and of the lines of one of them
_MOST_LAST = 500  # lines to look for the last words of a run
_MOST_WORDS = 2
_SUFFIXES = ("", ".log", ".txt", ".out", ".err")  # of the logs in a folder
_NEAR = 200  # lines, to look for a time
_DIGITS = b"0123456789"
# What lines say that may tell of a failure, in lower case and without digits
_TELLING_PHRASES = (
    rb"error|exception|traceback|fail|fatal|kill|signal|abort|terminat|segmentation|core dumped"
    rb"|denied|not found|no such|cannot|can't|could not|unable|refused|time limit|timed out|timeout"
    rb"|exit code|exitcode|exited|exit status|return code|out of memory|oom|warn|cancelled|usage: "
    rb"|quota|evicted|low on|not enough|verification|\.py\", line |keyboardinterrupt|interrupted"
    rb"|what\(\)|setting omp_num|deprecated|waiting in store|was not called|perform barrier"
    rb"|strides do not|insufficient|bus error|illegal|no module named|back-off|backoff|imagepull"
    rb"|as root|is nan\b|is -inf\b|is inf\b|step creation|nvrm|not recognized|duplicate gpu"
    rb"|key\(s\)|nccl warn|invalidusage|build stopped|global rank|==> |fault by|\*\*\* sig"
)
_TELLING = re.compile(_TELLING_PHRASES)
# Each word of a log is searched once: the longest ones of the phrases.
_LONGEST_WORDS = [max(phrase.split(), key=len) for phrase in _TELLING_PHRASES.split(b"|")]
_TELLING_WORD = re.compile(b"|".join([*_LONGEST_WORDS, rb"line|\.py:|group"]))
# The first line of a traceback, a frame, or an exception
_RAISING = re.compile(
    rb"Traceback \(most|, line |\.py:|(?:Error|Exception|Interrupt|Group)(?:$|[:(])"
)
_PART = re.compile(
    r"""\s?(?:
    (?P<skip>(?:\[\s*\d{1,9}\.\d{1,9}\]
        |\[?(?:\w{3}\s)?(?:(?:\d{4}[-/]\d\d[-/]\d\d|\w{3}\s{1,2}\d{1,2})[T_ ])?\d\d:\d\d:\d\d
            (?:[.,]\d{1,9})?(?:Z|[ ]?[+-]\d\d:?\d\d)?\]?(?=[\s\[(]|$)
        |\ {1,40}(?:\|(?=\s)|\+-[+-]{0,40}(?:\ \d{1,4}\ -{1,40})?))\ ?)
    |\[[Rr]ank[ :_]?(?P<rank>\d{1,6})\]:?\ ?
    |\[[\w.@-]{0,80},(?:mpirank:)?(?P<task>\d{1,6})(?:,[\w.-]{1,80})?\]<std\w{3,4}>:
    |\[(?:[a-z]\w{0,30}?)?(?P<local>\d{1,6})\](?:<std\w{3}>:|:|\ )
    |\ {0,4}(?P<step>\d{1,6}):(?:\ |$)
    |(?P<name>\[pod/[^\]\s]{1,200}\]\ ?
        |[\w.-]{1,80}\ {1,40}\|(?:\ |$)
        |\(\w[\w.]{0,60}(?:\ pid=\d|,\ ip=)[^)]{0,80}\)\ ?
        |(?:(?:node|worker|host|rank|gpu|task|compute|algo)[-_ ]?\d[\w.-]{0,60}
            |\d{1,3}(?:\.\d{1,3}){3})(?::(?:\ |$)|\|\ ))
    )""",
    re.VERBOSE,
)
# How a rank is told, the surest way last
_RANKED = ("section", "step", "local", "task", "named", "rank")
_LEARNT = re.compile(r"([\w.@/-]{1,80}[:|>] ?)Traceback \(most recent call last\)")
# A rank that a line of NCCL or Slurm names
_NAMED_RANK = re.compile(
    r"(?:.{0,120}?\[(?:PG [^\]]{0,80} )?[Rr]ank[: ]{1,2}|srun: error: \S{1,80}: task )"
    r"(\d{1,6})[\]:]"
)
# Headers before the lines of a process: Composer's, and those of tail
_SECTION = re.compile(r"-{5,}(?:Begin|End) global rank \d{1,6} STD|==> .* <==$")
_RANK_OF_FILE = re.compile(
    r"(?:(?<!End global )rank|task)[-_. ]?(\d{1,6})|[/\\](\d{1,6})[/\\]std\w{3}\.log"
)
_CLOCK = re.compile(r"(\d\d)[-/]?(\d\d)[T _](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,15})?")
_OF_RANK = re.compile(r"(?i)rank[ _:=]?(\d{1,6})")
# What a program says: words at the line's begin, or a progress bar
_SAID = re.compile(
    r"(?!\[?[DIWEF]\d{3,4} |\*\*\*|.{0,80} NCCL (?:INFO|WARN) |Traceback|During |The above "
    r"|\w+(?:\.\w+)*(?:Error|Exception): )"
    r"[A-Za-z\[(].{0,40}?[A-Za-z]{2}|\s{0,4}\d{1,3}%\|"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log.

    number : from 1. stream : what launchers put before the lines of one process, "" without.
    rank : as the stream or the file's name tells it. body : the text after the stream's label.
    """

    number: int
    text: str
    stream: str
    rank: int | None
    body: str

    @property
    def indent(self) -> int:
        """The spaces before the body's first word."""
        return len(self.body) - len(self.body.lstrip(" \t"))

    @property
    def owner(self) -> str:
        """The number of the rank that the text names, else the stream."""
        named = _OF_RANK.search(self.text)
        return named[1] if named else self.stream


class Log:
    """The lines of a file, by their place (from 0)."""

    def __init__(self, content: bytes, name: str = "") -> None:
        self.name = name
        self._lines = content.removesuffix(b"\n").split(b"\n")
        self.end = len(self._lines)
        self._places: dict[bytes, list[int]] = defaultdict(list)
        for place, shape in enumerate(content.translate(None, _DIGITS).split(b"\n")[: self.end]):
            self._places[shape].append(place)
        self.telling_shapes: list[list[int]] = []
        self.raising: list[int] = []
        for shape in _with_telling_words(self._places):
            places = self._places[shape]
            if _RAISING.search(shape):
                self.raising += places
            if len(self.telling_shapes) < _MOST_TELLING and _TELLING.search(shape.lower()):
                self.telling_shapes.append(places)
        self.raising.sort()
        del self.raising[_MOST_RAISING:-_MOST_RAISING]
        self.telling = [places[0] for places in self.telling_shapes]
        self._sections = [(0, _rank_of_file(name))]
        for places in self.telling_shapes:
            if _SECTION.match(self.text(places[0])):
                self._sections += [(place, _rank_of_file(self.text(place))) for place in places]
        self._sections.sort(key=itemgetter(0))
        self.line = lru_cache(maxsize=50_000)(self._line)
        headers = map(_LEARNT.match, map(self.text, self.telling))
        self._learnt = {header[1] for header in headers if header}

    def text(self, place: int) -> str:
        """Return a line without colours; of a progress bar what it shows last."""
        raw = self._lines[place].rstrip(b"\r")
        line = raw[raw.rfind(b"\r") + 1 :][:LONGEST_LINE]
        return without_colours(line.decode(errors="replace"))

    def _line(self, place: int) -> LogLine:
        """Return a line, split into the labels of launchers and the rest."""
        text = body = self.text(place)
        labels = []
        section = bisect_right(self._sections, place, key=itemgetter(0)) - 1
        ranks = {"section": self._sections[section][1]}
        while match := _PART.match(body):
            kind = match.lastgroup or ""
            body = body[match.end() :]
            if kind != "skip":
                labels.append(match[0].strip(" :|"))
            if kind in _RANKED:
                ranks[kind] = int(match[kind])
        for label in self._learnt:
            if body.startswith(label):
                labels.append(label.strip(" :|>"))
                body = body.removeprefix(label)
        if named := _NAMED_RANK.match(body):
            ranks["named"] = int(named[1])
        surest = max(ranks, key=_RANKED.index)
        return LogLine(place + 1, text, " ".join(labels), ranks[surest], body)

    def stream_from(self, place: int, most: int) -> Iterator[tuple[int, LogLine]]:
        """Yield the line at ``place`` and the following ones of its stream, of ``most`` lines."""
        stream = self.line(place).stream
        for following in range(place, min(place + most, self.end)):
            line = self.line(following)
            if line.stream == stream:
                yield following, line

    def clock(self, place: int) -> str | None:
        """Return the month, day and time of day at a place, which sort as text; None without."""
        before = range(place, max(-1, place - _NEAR), -1)
        for near in (*before, *range(place, min(self.end, place + _NEAR))):
            if match := _CLOCK.search(self.text(near)):
                return "{}{} {}.{}".format(*match.groups("0"))
        return None

    def last_words(self, before: int, ranks: Collection[int | None]) -> list[str]:
        """Return the last lines that a program printed before a place, or other ranks after it.

        ranks : whose lines are of no interest. Lines that no other line resembles are preferred.
        """
        found: list[tuple[bool, str]] = []
        apart = {str(rank) for rank in ranks}
        for place in range(self.end - 1, max(-1, before - _MOST_LAST), -1):
            line = self.line(place)
            counts = place < before or line.owner.isdigit()
            if counts and line.owner not in apart and _SAID.match(line.body):
                shape = self._lines[place].translate(None, _DIGITS)
                found.append((len(self._places[shape]) > 1, line.text.strip()))
        best = sorted(found, key=lambda words: words[0])[:_MOST_WORDS]
        return [words for _, words in reversed(best)]

    def is_last(self, place: int) -> bool:
        """Return whether the stream of a line says no more after it."""
        rest = self.stream_from(place, _MOST_LAST)
        return not any(self._is_ordinary(after) for after, _ in rest if after > place)

    def _is_ordinary(self, place: int) -> bool:
        line = self.line(place)
        says_more = _TELLING.search(line.text.lower().encode())
        return _SAID.match(line.body) is not None and not says_more

    def goes_on(self, place: int, rank: int | None = None, *, since: int | None = None) -> bool:
        """Return whether the run went on after a line.

        That shows in lines of one shape whose numbers grow, the last of them after ``place``, and
        the first one before ``since`` if that is given. Where lines name ranks, each rank must go
        on, or the given one.
        """
        begin = self.end if since is None else since
        for owners in self._progress:
            own = [
                lines for owner, lines in owners.items() if rank is None or owner in ("", str(rank))
            ]
            if own and all(_grows(lines, begin, place) for lines in own):
                return True
        return False

    @cached_property
    def _progress(self) -> list[dict[str, list[LogLine]]]:
        """The lines of each shape that a run repeats, by their owners; of many the ends."""
        found = []
        for places in sorted(self._places.values(), key=len, reverse=True)[:_MOST_SHAPES]:
            if len(places) > 1 and self._is_ordinary(places[0]):
                owners: dict[str, list[LogLine]] = defaultdict(list)
                for place in [*places[:_MOST_SHAPES], *places[-_MOST_SHAPES:]]:
                    owners[self.line(place).owner].append(self.line(place))
                found.append(owners)
        return found


def _rank_of_file(name: str) -> int | None:
    """Return the rank that a file's name, or the header of a section, tells; None without."""
    rank = _RANK_OF_FILE.search(name)
    return int(rank[1] or rank[2]) if rank else None


def _with_telling_words(shapes: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the shapes with a word that may tell of a failure; each word is looked up once."""
    seen: set[bytes] = set()
    telling: set[bytes] = set()
    for shape in shapes:
        words = set(shape.lower().split())
        telling.update(filter(_TELLING_WORD.search, words - seen))
        seen |= words
        if not telling.isdisjoint(words):
            yield shape


def _grows(lines: Sequence[LogLine], begin: int, place: int) -> bool:
    """Return whether lines begin before one place and end after another with larger numbers."""
    first = lines[0]
    last = lines[-1]
    stands = first.number <= begin and last.number > place + 1
    return stands and _numbers(last) > _numbers(first)


def _numbers(line: LogLine) -> list[float]:
    """Return the numbers in a line, the times before it aside."""
    return [float(number) for number in _NUMBER.findall(line.body)]


def read_logs(sources: Sequence[str]) -> list[Log]:
    """Return the lines of files, of the logs in folders, or of standard input for "-".

    Raises UserError if a file cannot be read, or has more than ``_MOST_BYTES``.
    """
    logs = []
    for source in sources:
        inside = sorted(path for path in Path(source).rglob("*") if path.suffix in _SUFFIXES)
        logs += [_read_log(str(path)) for path in inside if path.is_file()] or [_read_log(source)]
    return logs


def _read_log(source: str) -> Log:
    is_input = source == "-"
    opened = 0 if is_input else source
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
    return Log(content, source.removeprefix("-"))
