"""Whether the program came to its end while it was watched, and which of it was."""

from collections.abc import Iterator

from common.say import count
from lab.audit.findings.finding import Outcome, Right, Unknown
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import Cut, EpochOver, Error, Evaluation, ProcessEnd, Trained


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield whether all ranks ended by themselves and in good order."""
    steps = count(recording.steps, "step")
    if recording.of(Cut):
        yield Unknown("end", f"it still trained after {steps}, and was ended")
    elif recording.hung:
        yield Unknown("end", f"it did not end after {steps}")
    elif came_to_end(recording):
        yield Right("end", f"every rank ended by itself after {steps}")
    else:
        yield Unknown("end", f"a rank did not end in good order after {steps}")


def ended(rank: RankRecords) -> bool:
    """Return whether a rank ended by itself, in good order."""
    return not rank.of(Error) and any(not end.status for end in rank.of(ProcessEnd))


def came_to_end(recording: Recording) -> bool:
    """Return whether all ranks ended by themselves, in good order."""
    return not recording.of(Cut) and bool(recording.ranks) and all(map(ended, recording.ranks))


def epochs_of(recording: Recording) -> int:
    """Return in how many epochs the rank trained that had the most."""
    return max((len(rank.of(Trained)) for rank in recording.ranks), default=0)


def evaluations_of(recording: Recording) -> int:
    """Return how often the rank evaluated that did so most often."""
    return max((len(rank.of(Evaluation)) for rank in recording.ranks), default=0)


def short_epochs_of(recording: Recording) -> int:
    """Return how many epochs the audit has made short on the rank on which it did most often."""
    return max((_short_epochs(rank) for rank in recording.ranks), default=0)


def _short_epochs(rank: RankRecords) -> int:
    trained = {(epoch.loader_number, epoch.epoch) for epoch in rank.of(Trained)}
    short = [over for over in rank.of(EpochOver) if over.cut]
    return sum((over.loader_number, over.epoch) in trained for over in short)
