"""``lab explain``: which failure of a run came first, and why.

``diagnose`` gives each episode of one or several logs (episodes.py) a role, finds the first, and
only then looks in the table (known_errors.toml) for a cause and a cure of *that* message. Ordinary
lines explain nothing while an exception does; a line after which the run went on explains nothing
at all. output.py prints it. No torch is imported.
"""

import re
import signal
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

from common.say import ranks_text
from common.utils.processes import how_ended
from lab.explain.episodes import OWN, ROOT_CAUSE, Episode, KnownError, exits, ranks_of, tracebacks
from lab.explain.streams import Log

# Of the table's entries: what began a failure, what followed, what other ranks print about it, and
# what is no error.
KINDS = ("cause", "symptom", "echo", "note")
_TABLE = Path(__file__).with_name("known_errors.toml")
_NEAR = 40  # lines, of a traceback
_MOST_OTHERS = 6
_TAIL = 40  # characters: lines that end alike say the same
_MOST_SAID = 500  # characters
# The beginning of this project's messages for the user
_OWN_MESSAGE = re.compile(r"error(?: \(rank \d+\))?: (?!(?:[-+\d.e%]+|[Nn]one|null|OK)$)")
_ERROR_LINE = re.compile(
    r"^(?i:(?:\S{1,200} ){0,4}?\[?(?:error|fatal|critical|failed)\b\]?(?:[:\]( ]|$)|\[?[EF]\d{3,4} "
    r"|\[E |.*NCCL WARN|\S{1,200}: (?:line \d+: |can't open|cannot )|terminate called|\s*what\(\)"
    r"|Fatal Python|(?:\w{1,99}\.){0,12}\w{0,99}(?:Error|Exception)\b)"
)
_BY_WORDS = {
    "lifecycle": re.compile(r"KeyboardInterrupt|SystemExit|SignalException|GeneratorExit"),
    "wrapper": re.compile(
        r"ChildFailedError|Process(?:Raised|Exited)Exception|CalledProcessError|RemoteTraceback"
        r"|Ray(?:Task|Actor)Error|TrainingFailedError|ExceptionGroup"
        r"|CheckpointException ranks|Caught \w+ in (?:DataLoader|pin memory|replica)"
        r"|multiprocessing[/\\]spawn\.py:join"
    ),
    "teardown": re.compile(
        r"Exception ignored |atexit|_run_finalizers|_exit_function|_run_exitfuncs|_python_exit"
        r"|\b__del__\b"
    ),
}
# What a rank says because another one has ended or does not come
_REACTION = re.compile(
    r"(?i)connection (?:was )?(?:closed|reset|aborted|refused)|broken pipe|timed? ?out|got 0 bytes"
    r"|socketimpl|remote process exit|pair closure|worker \(pid.{0,20}\) (?:exited|is killed)"
    r"|communicator was aborted|heartbeat|RendezvousConnectionError|peer"
)
# Packages in which a timeout may tell of another rank; "" is a program without packages
_COMMUNICATE = ("", "torch", "torch_xla", "deepspeed", "horovod", "ray", "accelerate", "lightning")
_TIMED_OUT = re.compile(r"(?i)timed? ?out")
# What a program is told to change, by the launcher at hand
FLAGS = {
    "lab": {
        "port": "--master-port",
        "address": "--master-ip",
        "timeout": "--timeout",
        "batch": "--batch-size",
        "rate": "--learning-rate",
        "gloo": "--backend gloo",
        "debug": "--debug",
    },
    "torchrun": {
        "port": "--master-port (with a c10d rendezvous: the port in --rdzv-endpoint)",
        "address": "--master-addr (with a c10d rendezvous: --rdzv-endpoint)",
    },
    "": {
        "port": "MASTER_PORT",
        "address": "MASTER_ADDR",
        "timeout": "timeout= of init_process_group",
        "batch": "batch",
        "rate": "lr= of the optimizer",
        "gloo": 'init_process_group("gloo")',
        "debug": "TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO",
    },
}
_PROGRAMS = {
    "lab": re.compile(r"Part(?:One|Two|Three)\b|[/\\]common[/\\](?:cli|experiment|distributed)\b"),
    "torchrun": re.compile(r"torch[./]distributed[./](?:run|launch|elastic)|\btorchrun\b"),
}
_SEVERAL = re.compile(r"(?i)rank|torchrun|distributed|spawn|srun|mpi")
_ROLES = {"cause": "initiator", "symptom": "reaction", "echo": "reaction", "note": "note"}
_OF_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "killed",
    signal.SIGABRT: "aborted",
    signal.SIGTERM: "terminated",
    signal.SIGINT: "terminal_closed",
}


@cache
def known_errors() -> list[KnownError]:
    """Return the table, in its order."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return [KnownError(name, **entry) for name, entry in table.items()]


@cache
def _may_tell() -> re.Pattern[str]:
    """Return what matches lines outside of tracebacks that are looked up.

    Those are lines that look like an error, and what the patterns of the table match that begin
    with ^ or are of notes.
    """
    patterns = [
        pattern
        for error in known_errors()
        for pattern in error.patterns
        if error.kind == "note" or re.match(r"\^(?!\(\?!)", pattern)
    ]
    return re.compile("|".join([_ERROR_LINE.pattern, *patterns]))


def _entry(name: str) -> KnownError:
    return next(error for error in known_errors() if error.name == name)


def filled(text: str, words: dict[str, str]) -> str:
    """Return a text with each <name> replaced by its word, or by NAME."""
    return re.sub(r"<(\w+)>", lambda name: words.get(name[1], name[1].upper()), text)


def words_of(error: KnownError, message: str) -> dict[str, str]:
    """Return what the named groups of the entry's patterns match in a message."""
    for pattern in error.patterns:
        if match := re.search(pattern, message):
            return {name: word for name, word in match.groupdict().items() if word}
    return {}


def find_known(
    message: str, *, around: Callable[[], str] = str, before: Callable[[], str] = str
) -> KnownError | None:
    """Return the table's entry of a message, None if it has none.

    message : its first line counts most. around : the traceback and lines near it, which an
    entry's ``near`` may ask for. before : what was printed so far, for ``after``.
    """
    first_line = message.partition("\n")[0]
    matching = [error for error in known_errors() if _matches(error, message, around, before)]
    of_first = {error.name for error in matching if _matches(error, first_line, around, before)}
    hidden = set(chain.from_iterable(error.hides for error in matching))

    def order(error: KnownError) -> tuple[bool, bool, int]:
        is_further = of_first.isdisjoint({error.name, *error.hides})
        return error.name in hidden, is_further, KINDS.index(error.kind)

    return min(matching, key=order, default=None)


def _matches(
    error: KnownError, message: str, around: Callable[[], str], before: Callable[[], str]
) -> bool:
    if not any(re.search(pattern, message, re.MULTILINE) for pattern in error.patterns):
        return False
    if error.near and not re.search(error.near, f"{message}\n{around()}", re.MULTILINE):
        return False
    return not error.after or re.search(error.after, before()) is not None


def _known(episode: Episode) -> KnownError | None:
    """Return the table's entry of an episode's own message."""
    log = episode.log

    def around() -> str:
        frames = [f'File "{one.file}", in {one.function}\n{one.source}' for one in episode.frames]
        lines = filter(
            lambda line: line.stream == episode.line.stream,
            map(
                log.line, range(max(0, episode.place - _NEAR), min(log.end, episode.place + _NEAR))
            ),
        )
        return "\n".join([*frames, episode.heading, *(line.body for line in lines)])

    def before() -> str:
        return "\n".join(map(log.text, filter(episode.place.__ge__, log.telling)))

    message = ": ".join(filter(None, (episode.type, episode.message)))
    return find_known(message, around=around, before=before)


# --- roles ---


def diagnose(logs: Sequence[Log]) -> list[Episode]:
    """Return what failed, the first failure first, then what followed, then notes.

    Empty if nothing failed. ``logs`` may hold the output of several ranks.
    """
    raised = _by_time(chain.from_iterable(map(_raised, logs)))
    lines = _by_time(chain.from_iterable(_lines(log, raised) for log in logs))
    ended = _ended([*chain.from_iterable(map(exits, logs))], [*raised, *lines])
    notes = {one.name: one for one in reversed(lines) if one.role == "note"}
    found = _by_time([*raised, *lines, *ended])
    first = min(found, key=_tier, default=None)
    if first is None or _tier(first) == _NO_FAILURE:
        return [*reversed(notes.values())]
    if first.status or first.name in _OF_SIGNALS.values():
        first = next((line for line in lines if _tells_more(line, first)), first)
    _complete(first, found)
    others = {one.said: one for one in reversed(raised) if one.role != "wrapper"}
    others.pop(first.said, None)
    return [first, *[*reversed(others.values())][:_MOST_OTHERS], *reversed(notes.values())]


def first_to_fail(
    statuses: Mapping[int, int], outputs: Mapping[int, str], *, name: str
) -> tuple[int, str, Episode]:
    """Return the rank or node that caused the failure of the others, a message, and its failure.

    Parameters
    ----------
    statuses : of those that failed, in the order in which they ended; a negative status is a
        signal's number. If each of them only reacted to another one, the first of them counts.
    outputs : what each of them printed.
    name : "rank" or "node".
    """
    logs = {rank: Log(outputs[rank].encode()) for rank in statuses}
    culprit = next(iter(statuses))
    first = next(iter(diagnose([*logs.values()])), None)
    if first is None or first.role != "initiator":
        first = failure_in(outputs[culprit])
    else:
        culprit = next(rank for rank, log in logs.items() if log is first.log)
    # Whole words only: a path in the line can be copied.
    said = textwrap.shorten(first.said, _MOST_SAID, placeholder=" …")
    return culprit, f"{name} {culprit} {how_ended(statuses[culprit])}: {said}", first


def failure_in(output: str) -> Episode:
    """Return what failed first in an output; its last line if nothing tells of a failure."""
    log = Log(output.encode())
    found = diagnose([log])
    if found and found[0].role != "note":
        return found[0]
    printed = [place for place in range(log.end) if log.text(place).strip()]
    last = max(printed, default=0)
    said = log.text(last).strip() or "it printed nothing"
    return Episode(log, last, last, said, role="note")


def _raised(log: Log) -> list[Episode]:
    """Return the exceptions of a log with their roles; of a chain the first that is known."""
    found = [_first_of(errors) for errors in tracebacks(log)]
    _mark_handled(log, found)
    return found


def _mark_handled(log: Log, found: Sequence[Episode]) -> None:
    """Mark the exceptions after which the run went on."""
    begun = [one for one in found if one.role in ("initiator", "reaction")]
    is_single = not _SEVERAL.search("\n".join(map(log.text, log.telling)))
    for one in begun:
        since = None if one.owner or is_single else one.begin
        if log.goes_on(one.place, one.rank, since=since):
            one.role = "handled"
    for one, later in pairwise(begun if is_single else []):
        if later.role == "initiator" and not (one.owner or one.heading):
            one.role = "handled"  # by a process that has raised another one since


def _first_of(errors: Sequence[Episode]) -> Episode:
    """Return the first of a chain that the table knows, else the first; no launcher's report."""
    hidden: set[str] = set()
    for one in errors:
        one.known = _known(one)
        one.role = _role(one)
        hidden.update(one.known.hides if one.known else ())

    def order(one: Episode) -> tuple[bool, bool]:
        return one.role == "wrapper", one.known is None or one.name in hidden

    first = min(errors, key=order)
    first.ranks = first.ranks.union(*(one.ranks for one in errors))
    place = errors.index(first)
    told = [f"it followed from: {one.said}" for one in errors[:place] if one.role != "wrapper"]
    told += [f"it led to: {one.said}" for one in errors[place + 1 :] if one.said != first.said]
    first.explanation = " / ".join(told)
    return first


def _role(episode: Episode) -> str:
    """Return what an exception is by itself; whether it was handled shows in the run."""
    called = [frame.function for frame in episode.frames]
    called += [f"{frame.file}:{frame.function}" for frame in episode.frames[-1:]]
    for role, pattern in _BY_WORDS.items():
        if pattern.search(f"{episode.heading} {' '.join(called)} {episode.said}"):
            return role
    if episode.known is not None:
        return _ROLES[episode.known.kind]
    waits_for_another = episode.package in _COMMUNICATE or not _TIMED_OUT.search(episode.said)
    is_own = episode.raised_by == "the program" or not waits_for_another
    return "initiator" if is_own or not _REACTION.search(episode.said) else "reaction"


def is_consequence(said: str) -> bool:
    """Return whether an exception's type and message tell of the end of another process."""
    known = find_known(said)
    if known is not None:
        return _ROLES[known.kind] == "reaction"
    return _REACTION.search(said) is not None or _BY_WORDS["wrapper"].search(said) is not None


def _lines(log: Log, raised: Sequence[Episode]) -> list[Episode]:
    """Return the lines outside of tracebacks that tell something, one of each shape."""
    taken: set[int] = set()
    for one in raised:
        taken.update(one.places if one.log is log else ())
    found = []
    for places in log.telling_shapes:
        line = log.line(places[0])
        if places[0] in taken or not _may_tell().search(line.body):
            continue
        episode = Episode(log, places[0], places[0], line.body.strip(), count=len(places))
        for same in places[:_NEAR]:
            episode.ranks |= ranks_of(log.line(same).rank)
        episode.known = _known(episode)
        if episode.known is not None:
            episode.role = _ROLES[episode.known.kind]
        elif not _OWN_MESSAGE.match(line.body):
            continue
        if episode.role != "note" and log.goes_on(places[-1]):
            episode.role = "handled"
        found.append(episode)
    return found


def _ended(found: Sequence[Episode], told: Sequence[Episode]) -> list[Episode]:
    """Return the exits with what they mean, except those that a reaction explains."""
    raised = {one.role: one for one in told if one.type}
    is_open = any(end.status == 1 for end in found)
    if is_open and "handled" in raised and raised.keys().isdisjoint(("initiator", "reaction")):
        raised["handled"].role = "initiator"  # it has ended a Python, since nothing else did
    for end in found:
        _tell_status(end)
    return [end for end in found if not any(_explains(one, end) for one in told)]


def _explains(reaction: Episode, end: Episode) -> bool:
    """Return whether a rank has ended in this way because it only reacted."""
    is_another = reaction.ranks and end.ranks and reaction.ranks.isdisjoint(end.ranks)
    if reaction.role != "reaction" or is_another:
        return False
    hides = reaction.known.hides if reaction.known else []
    return end.name in hides or (end.status == 1 and reaction.type != "")


def _tell_status(end: Episode) -> None:
    """Add what an exit means, and how certain it is."""
    by_torchrun = ROOT_CAUSE in end.message or "(exitcode: " in end.message
    name = "torchrun_summary" if by_torchrun else "exited"
    if end.status < 0:
        name = _OF_SIGNALS.get(-end.status, "crashed")
    end.known = _entry(name)
    end.certainty = "certain" if by_torchrun else "likely"
    end.reason = "the first end that a launcher or a shell reports"


# --- which came first ---

_NO_FAILURE = 6


def _tier(one: Episode) -> int:
    """Return how much an episode may be the first failure; of equal ones the earliest is."""
    if one.role == "initiator" and not one.status:
        return 0 if one.type else 1
    if one.status:
        # SIGTERM tells of a launcher that ends the others.
        return 0 if one.status < 0 and one.status != -signal.SIGTERM else 2
    return {"reaction": 3, "lifecycle": 4, "wrapper": 5}.get(one.role, _NO_FAILURE)


def _by_time(found: Iterable[Episode]) -> list[Episode]:
    """Return failures in the order of their times; in that of the logs if one has no time."""
    ordered = sorted(found, key=lambda one: one.begin)
    logs = [*dict.fromkeys(one.log for one in ordered)]
    ordered.sort(key=lambda one: logs.index(one.log))
    clocks = {id(one): one.log.clock(one.place) or "" for one in ordered if len(logs) > 1}
    return (
        sorted(ordered, key=lambda one: clocks.get(id(one), ""))
        if all(clocks.values())
        else ordered
    )


def _tells_more(line: Episode, end: Episode) -> bool:
    """Return whether a line explains an exit, or came before it."""
    if line.role != "initiator":
        return False
    hides = line.known.hides if line.known else []
    return end.name in hides or end.status > 0 or (end.status < 0 and line.begin < end.begin)


def _complete(first: Episode, found: Sequence[Episode]) -> None:
    """Add to the first failure how certain it is, its ranks, and where the others stood."""
    reactions = [one for one in found if one.role == "reaction"]
    ends = [one for one in found if one.status]
    if first.role == "reaction":
        _tell_where_ranks_stood(first, reactions)
    elif first.type:
        _count(first, found)
        is_last = ends or first.log.is_last(first.places[-1])
        if first.certainty == "certain" and not is_last:
            first.certainty = "likely"
            first.reason += ", but the log goes on after it"
    elif not first.status:
        first.reason = "a line outside of tracebacks; no exception tells more"
        _add_same(first, found)
        if ends and ends[0].certainty == "certain":
            first.ranks |= ends[0].ranks
    elif first.status > 0:
        begin = min(one.begin for one in found)
        words = first.log.last_words(begin, [one.rank for one in reactions])
        if words:
            first.explanation = f"the last lines of others: {' / '.join(words)}"


def _add_same(first: Episode, found: Sequence[Episode]) -> None:
    """Add to a line what others say of the same failure: further words, and the ranks."""
    for one in found:
        if one.name == first.name and not one.type:
            first.ranks |= one.ranks
            if one.said[-_TAIL:] != first.said[-_TAIL:]:
                first.explanation = first.explanation or f"also: {one.said}"


def _count(first: Episode, found: Sequence[Episode]) -> None:
    """Add who says the same, and whether something else began by itself."""
    first.certainty = "certain"
    first.reason = "no other exception, signal or known error began by itself"
    first.count = 0
    for one in found:
        if _tier(one) > 1:
            continue
        if one.said == first.said:
            first.count += 1
            first.ranks |= one.ranks
        elif one.name == OWN or one.name != first.name:
            first.certainty = "likely"
            first.reason = "the first of several failures that may have begun by themselves"


def _tell_where_ranks_stood(first: Episode, reactions: Sequence[Episode]) -> None:
    """Explain a failure that follows from another one by where each rank was when it did."""
    first.certainty = "possible"
    first.reason = "it follows from something else"
    stood: dict[str, set[int]] = defaultdict(set)
    for one in reactions:
        if one.standing:
            stood[one.standing] |= one.ranks
    if first.frames and len(stood) > 1 and _TIMED_OUT.search(first.said):
        first.known = _entry("mismatched_collectives")
    words = first.log.last_words(first.begin, {one.rank for one in reactions} - {None})
    if suspect := _suspect(first):
        first.reason += f"; an earlier line may tell of what: {suspect}"
    elif words and len(stood) < 2:
        first.reason += f"; the last lines of others: {' / '.join(words)}"
    places = [
        f"{ranks_text(sorted(ranks)) if ranks else 'a rank'} in {place}"
        for place, ranks in stood.items()
    ]
    first.explanation = "; ".join(places)


def _suspect(first: Episode) -> str:
    """Return a line before a failure that looks like an error and is no consequence, else ""."""
    log = first.log
    for line in map(log.line, filter(first.begin.__gt__, log.telling)):
        is_error = _ERROR_LINE.search(line.body) and not is_consequence(line.body)
        if is_error and not log.goes_on(line.number - 1):
            return line.text.strip()
    return ""


def flags_of(logs: Iterable[Log]) -> dict[str, str]:
    """Return what the names in the cures stand for in the program that the logs are of."""
    texts = [
        log.text(place)
        for log in logs
        for place in [*range(min(log.end, _NEAR)), *log.telling[:_NEAR]]
    ]
    for name, pattern in _PROGRAMS.items():
        if any(map(pattern.search, texts)):
            return FLAGS[""] | FLAGS[name]
    return FLAGS[""]
