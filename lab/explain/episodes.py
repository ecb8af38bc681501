"""Read what failed in a log: exceptions with their tracebacks, exits that launchers report.

``tracebacks`` reads each traceback as a unit, also where the lines of several ranks alternate;
``exits`` reads statuses and signals in the words of shells and launchers. Both return ``Episode``s.
What an episode means, and which came first, is the business of diagnosis.py.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from lab.explain.streams import Log, LogLine

_MOST_LINES = 4000  # of a traceback, with the lines of other streams between
_MOST_MESSAGE = 16  # lines
_NEAR = 300  # lines, within which a traceback or a message goes on
_HEADER = re.compile(r"Traceback \(most recent call last\)")
_PASSED_ON = re.compile(rf"{_HEADER.pattern}: \(RANK (\d{{1,6}})\)")  # of another rank
_FRAME = re.compile(
    r'(?P<indent>\s*)(?:File "(?P<file>[^"]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<name>.*))?'
    r"|(?:File )?(?P<cell>Cell In\[\d+\]|[^\s:]{1,300}\.py)[:,](?: line )?(?P<row>\d{1,9})"
    r"(?:, in (?P<function>[\w.<>]{1,100})\(.*)?)$"
)
# After frames an exception may have any name; elsewhere its name must say that it is one.
_NAMED = r"(?P<type>(?:[A-Za-z_]\w{0,99}(?:\.<locals>)?\.){0,12}"
_ANY_EXCEPTION = re.compile(rf"{_NAMED}[A-Za-z_]\w{{0,99}}(?:\(\w+\))?)(?::\s?(?P<text>.*))?$")
_METRIC = r"[\w.]{0,100}(?<!Key)Errors?:\s+(?:[-+\d.e%]+|[Nn]one|null|OK)$"
_EXCEPTION = re.compile(
    rf"(?!nccl|{_METRIC}){_NAMED}\w{{0,80}}(?:Error|Exception|Interrupt|Group)(?:\(\w+\))?)(?::(?:\s(?P<text>.*))?)?$"
)
_BEGINS = re.compile(
    re.sub(r"\(\?P<\w+>", "(?:", f"{_HEADER.pattern}|^{_FRAME.pattern}|^{_EXCEPTION.pattern}")
)
# Exceptions with messages of several lines, indented or not
_LONG_MESSAGES = re.compile(
    r"RuntimeError|OutOfMemory|Dist\w+Error|Accelerator|Unpickling|TypeError"
)
_CHAINED = re.compile(
    r"The above exception was the direct cause of|During handling of the above exception"
    r"|Original Traceback \("
)
# Where a message ends: what the launcher, a logger or another traceback prints.
_STRUCTURE = re.compile(
    r"The above exception|During handling of|\s*\[?[DIWEF]\d{3,4} |\s*\[[DIWEF]\d{0,4}\s"
    r"|=====|-----|\*{5}|-- Process \d|.{0,200}Traceback \(|\s*File \"|srun: |slurmstepd"
    r"|\S{1,200}: error: |(?:ERROR|WARNING|INFO)\b|terminate called"
)
_HEADING = re.compile(
    r"Exception ignored |Exception in thread |Error in atexit|-- Process (?P<process>\d+) term"
    r"|(?:.*\b[Rr]ank[ =:]{1,9}(?P<named>\d{1,5})\b)?"
    r".*(?:\b(?:ERROR|error|CRITICAL)\b| \(local_rank:)"
)
_LIBRARY = re.compile(
    r"(?i)(?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d|\\lib\\|<frozen|<string>"
    r"|^torch[/\\]|[/\\](?:bin|scripts)[/\\](?:torchrun|accelerate|deepspeed|horovodrun)"
)
_PACKAGE = re.compile(r"(?:^(?![A-Za-z]:)|(?:site|dist)-packages[/\\])(\w+)")
_WORK = re.compile(r"SeqNum=(\d{1,18}), OpType=(\w{1,40})")  # of NCCL's watchdog
_LAST_ERROR = re.compile(r"Last error:\s+(\S.*)")  # what NCCL says under its own error
_OUTER = ("wrapper", "inner", "<module>")
# --- exits, in the words of launchers, shells and schedulers ---
OWN = "own_exception"
ROOT_CAUSE = "Root Cause"
_SIGNALS = {
    "killed": signal.SIGKILL,
    "out of memory": signal.SIGKILL,
    "oomkilled": signal.SIGKILL,
    "segmentation fault": signal.SIGSEGV,
    "aborted": signal.SIGABRT,
    "bus error": signal.SIGBUS,
    "illegal instruction": signal.SIGILL,
    "terminated": signal.SIGTERM,
    "floating point exception": signal.SIGFPE,
} | {one.name.lower(): one for one in signal.Signals}
_WINDOWS = {0xC0000005: signal.SIGSEGV, 0xC0000409: signal.SIGABRT, 0xC000013A: signal.SIGINT}
_WORD = f"(?P<name>(?i:{'|'.join(name for name in _SIGNALS if not name.startswith('sig'))}))"
_EXITS = [
    re.compile(f"(?:{pattern})", re.DOTALL)
    for pattern in (
        r"Root Cause.{0,400}?rank +: (?P<rank>\d+) .{0,200}?exitcode +: (?P<code>-?\d+)",
        r".{0,200}failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)",
        r".{0,200}process (?P<rank>\d+) terminated with "
        r"(?:signal (?P<name>SIG\w+)|exit code (?P<code>\d+))",
        r"srun: error: \S+: tasks? (?P<rank>\d+)\S*: "
        rf"(?:Exited with exit code (?P<code>\d+)|{_WORD})",
        r".{0,200}process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal "
        r"(?P<number>\d+)",
        r"=\s+(?:EXIT CODE: (?P<code>\d+)|KILLED BY SIGNAL: (?P<number>\d+))",
        r"[\w.-]{1,80} exited with code (?P<code>\d+)",
        r".{0,200}\b(?:[Ee]xit [Cc]ode|return code|exit status)\W{1,20}?(?P<code>-?\d+)",
        r".{0,200}\b(?:rank (?P<rank>\d+)|node \d+)\b.{0,80} was killed by "
        r"(?:(?P<name>SIG\w+)|signal (?P<number>\d+))",
        r".{0,200}(?:died with <Signals\.|\*\*\* )(?P<name>SIG\w+)(?:: \d+>| received at )",
        r"(?:\[\S{1,80}\] )?(?:Caught signal |Signal: [A-Z][\w ]{0,40}\()(?P<number>\d+)\b",
        r"(?:\S{1,200}: line \d+: +|Fatal Python error: )?(?:\d+ )?"
        rf"{_WORD}(?: \(core dumped\)|$| {{5,}})",
    )
]


@dataclass
class TracebackFrame:
    """A line of code in a traceback."""

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def place(self) -> str:
        """The file's name and the line."""
        return re.split(r"[/\\]", f"{self.file}:{self.line}")[-1]


@dataclass(frozen=True, eq=False)
class KnownError:
    """An entry of the table known_errors.toml, whose head explains the fields."""

    name: str
    title: str
    kind: str
    cause: str
    cure: str
    patterns: list[str] = field(default_factory=list)
    near: str = ""
    after: str = ""
    hides: list[str] = field(default_factory=list)
    certainty: str = "likely"
    audit: str = ""


@dataclass(eq=False)
class Episode:
    """Something that failed, as the log tells it, and its part in what happened.

    begin, place : of its first line and of the one that names it.
    type : of the exception; "" for an exit or a line outside tracebacks. message : all its lines.
    heading : the line before the traceback, or what reports an exit.
    status : of an exit, as ``Popen.returncode``; 0: it is none.
    is_chained : whether it led to the next one.
    role : "initiator": it began here; "reaction": another one made it happen; "wrapper": a parent
        reports it; "lifecycle": an end from outside; "teardown": it happened while the process
        ended; "handled": the run went on; "note": no failure.
    certainty, reason : how sure it is that this came first, and why.
    ranks, count : which and how many say the same.
    """

    log: Log
    begin: int
    place: int
    message: str
    type: str = ""
    frames: list[TracebackFrame] = field(default_factory=list)
    heading: str = ""
    status: int = 0
    is_chained: bool = False
    role: str = "initiator"
    known: KnownError | None = None
    certainty: str = "likely"
    reason: str = ""
    explanation: str = ""
    ranks: set[int] = field(default_factory=set)
    count: int = 1

    @property
    def line(self) -> LogLine:
        """The line that names it."""
        return self.log.line(self.place)

    @property
    def places(self) -> range:
        """The places of its lines, the message's last one included."""
        return range(self.begin, self.place + 1 + self.message.count("\n"))

    @property
    def rank(self) -> int | None:
        """Its rank, None if nothing tells it."""
        return min(self.ranks, default=None)

    @property
    def owner(self) -> str:
        """Whose it is, "" if nothing tells it."""
        return self.line.stream if self.rank is None else f"rank {self.rank}"

    @property
    def name(self) -> str:
        """The name of the known error, or that of an exception that the table does not have."""
        return self.known.name if self.known else OWN

    @property
    def said(self) -> str:
        """The exception's type and what its message says first, or the line."""
        said = ": ".join(filter(None, (self.type, self.message.partition("\n")[0])))
        last = _LAST_ERROR.search(self.message)
        return f"{said} … Last error: {last[1]}" if last else said

    @property
    def own_frame(self) -> TracebackFrame | None:
        """The innermost frame of the program itself."""
        for frame in reversed(self.frames):
            if not _LIBRARY.search(frame.file):
                return frame
        return None

    @property
    def package(self) -> str:
        """The package of the innermost frame that is in one, "" without."""
        for frame in reversed(self.frames):
            if _LIBRARY.search(frame.file) and (package := _PACKAGE.search(frame.file)):
                return package[1]
        return ""

    @property
    def raised_by(self) -> str:
        """Who raised it: "the program", a package, "Python", or "" where no frame tells."""
        if not self.frames:
            return ""
        last = self.frames[-1]
        if _LIBRARY.search(last.file):
            return self.package if _PACKAGE.search(last.file) else "Python"
        may_be_compiled = self.type.startswith("torch.") or self.type == "RuntimeError"
        is_own = not may_be_compiled or re.search(r"\b(?:raise|assert)\b", last.source)
        return "the program" if is_own else "compiled code that this line calls"

    @property
    def standing(self) -> str:
        """In which call and line of the program it happened, "" if no frame tells."""
        frame = self.own_frame
        if work := _WORK.search(self.message):
            return f"{work[2]} with SeqNum {work[1]}"
        if frame is None:
            return ""
        call = ""
        for one in self.frames:
            if one.file.endswith("nn/parallel/distributed.py"):
                call = "DistributedDataParallel's forward, "
            elif one.file.endswith("autograd/graph.py"):
                call = "backward, "
            elif one.file.endswith("distributed_c10d.py") and one.function not in _OUTER:
                call = call or f"{one.function}, "
        return call + frame.place


def tracebacks(log: Log) -> list[list[Episode]]:
    """Return the exceptions of a log, with their tracebacks where there are any.

    Those that led to each other stand together, the first one first.
    """
    chains: list[list[Episode]] = []
    latest: dict[str, list[Episode]] = {}
    taken: set[int] = set()
    for place in log.raising:
        if place in taken or not _BEGINS.search(log.line(place).body):
            continue
        for episode in _read_traceback(log, place, taken):
            errors = latest.get(episode.line.stream, [])
            if errors and errors[-1].type.endswith("Group") and not episode.frames:
                episode.frames = errors[-1].frames
            if not errors or not errors[-1].is_chained:
                errors = latest[episode.line.stream] = []
                chains.append(errors)
            errors.append(episode)
    return chains


def _read_traceback(log: Log, begin: int, taken: set[int]) -> Iterator[Episode]:
    """Yield the exception of the traceback at ``begin``; more if several alternate in a stream.

    taken : receives the places that belong to it.
    """
    frames: list[TracebackFrame] = []
    base = 0
    unfinished = 0
    last = begin
    for place, line in log.stream_from(begin, _MOST_LINES):
        pattern = _ANY_EXCEPTION if frames and place <= last + 1 else _EXCEPTION
        match = pattern.match(line.body.strip())
        if _HEADER.search(line.body):
            unfinished += 1
        elif (inside := _read_frame(line, frames, base)) is not None:
            base = inside
        elif match is not None:
            episode = Episode(log, begin, place, "", match["type"], frames)
            yield _exception(episode, match["text"] or "", taken)
            unfinished -= 1
            if unfinished <= 0:
                return
        elif place > last + _NEAR:
            return
        else:
            continue
        taken.add(place)
        last = place


def _read_frame(line: LogLine, frames: list[TracebackFrame], base: int) -> int | None:
    """Add a frame or its source; return the indent of its traceback, None if it is neither."""
    if match := _FRAME.match(line.body):
        number = int(match["line"] or match["row"])
        name = match["name"] or match["function"] or ""
        frames.append(TracebackFrame(match["file"] or match["cell"], number, name))
        return max(0, len(match["indent"]) - 2)
    if line.indent <= base and line.body.strip():
        return None
    if frames:
        frames[-1].source = frames[-1].source or line.body.strip()
    return base


def _exception(episode: Episode, text: str, taken: set[int]) -> Episode:
    """Return an exception with all lines of its message, of which ``text`` is the first."""
    log = episode.log
    texts = [text]
    is_long = _LONG_MESSAGES.search(episode.type) is not None
    ended = False
    taken.add(episode.place)
    for place, line in [*log.stream_from(episode.place, _NEAR)][1:]:
        body = line.body.strip()
        belongs = is_long or line.indent > 0 or not texts[-1]
        episode.is_chained = _CHAINED.match(body) is not None
        if body and (ended or not belongs or _STRUCTURE.match(line.body)):
            break
        ended = not body or len(texts) > _MOST_MESSAGE
        texts.append(body)
        taken.add(place)
    episode.message = "\n".join(texts).strip()
    _read_heading(episode)
    return episode


def _read_heading(episode: Episode) -> None:
    """Read whose an exception is; the lines before it may tell that, and what it means."""
    passed_on = _PASSED_ON.search(episode.log.text(episode.begin))
    episode.ranks = ranks_of(passed_on and passed_on[1], episode.line.rank)
    for place in range(max(0, episode.begin - 3), episode.begin):
        line = episode.log.line(place)
        if heading := _HEADING.match(line.body):
            episode.heading = heading[0]
            named = ranks_of(heading["process"], heading["named"], line.rank)
            episode.ranks = episode.ranks or named


def ranks_of(*numbers: int | str | None) -> set[int]:
    """Return the first of the ranks that is given, as a set."""
    for number in numbers:
        if number is not None:
            return {int(number)}
    return set()


def exits(log: Log) -> list[Episode]:
    """Return the exits that launchers, shells and schedulers report; those with status 0 aside.

    An exit that torchrun names as the root cause stands for other reports of its status.
    """
    found = []
    for place in chain.from_iterable(places[:_MOST_MESSAGE] for places in log.telling_shapes):
        line = log.line(place)
        block = line.body
        if ROOT_CAUSE in block:
            lines = map(log.line, range(place, min(place + 40, log.end)))
            block = "\n".join(line.body for line in lines)
        for match in filter(None, (pattern.match(block) for pattern in _EXITS)):
            last = place + match[0].count("\n")
            episode = Episode(
                log, place, last, line.body.strip(), status=_status(match.groupdict())
            )
            episode.ranks = ranks_of(match.groupdict().get("rank"), line.rank)
            found.append(episode)
            break
    named = {one.status: one for one in found if ROOT_CAUSE in one.message}
    for one in found:
        end = named.setdefault(one.status, one)
        end.begin = min(end.begin, one.begin)
    return [one for one in named.values() if one.status]


def _status(groups: dict[str, str | None]) -> int:
    """Return a status as ``Popen.returncode``, from a code, a signal's name or its number."""
    if name := groups.get("name"):
        return -_SIGNALS.get(name.lower(), 0)
    code = int(groups.get("code") or 0)
    if code in _WINDOWS:
        return -_WINDOWS[code]
    number = int(groups.get("number") or code - 128)
    return -number if 0 < number < 65 else code
