"""Whether several ranks write one file at once."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from common.say import listed
from lab.audit.findings.finding import Outcome, Right, Unknown, found
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import CollectiveCall, Saved, Start


def check(recording: Recording) -> Iterator[Outcome]:
    """Compare which ranks write a file after the same update and the same number of calls.

    Whether ranks that were started by commands of their own share a disk, nobody can tell.
    """
    if len(recording.ranks) < 2 or not recording.of(Saved):
        return
    several = [saved for saved in _writers(recording) if len(saved) > 1]
    if not several:
        yield Right("files", "no two ranks write one file at once")
        return
    saved = several[0]
    first = next(iter(saved.values()))
    finding = found(
        "one-file",
        first.at,
        ranks=listed(str(rank.rank) for rank in saved),
        file=os.path.basename(first.path),
        step=first.step,
    )
    starts = [rank.of(Start)[0] for rank in saved]
    if len({(start.hinted_rank, start.parent_pid) for start in starts}) == 1:
        yield finding
    else:
        yield Unknown("files", "whether the ranks share a disk, and so the files that all write")
        yield replace(finding, condition="the ranks share a disk")


def _writers(recording: Recording) -> Collection[Mapping[RankRecords, Saved]]:
    """Return who wrote a file, for each file and point of the program."""
    writers: dict[tuple[str, int, int], dict[RankRecords, Saved]] = defaultdict(dict)
    for rank in recording.ranks:
        calls = 0
        for record in rank.records:
            calls += isinstance(record, CollectiveCall)
            if isinstance(record, Saved):
                writers[record.path, record.step, calls][rank] = record
    return writers.values()
