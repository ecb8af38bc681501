"""Whether DistributedDataParallel gets the gradients that it averages, and no others."""

import itertools
from collections.abc import Iterator

from common.say import count, listed
from lab.audit.findings.finding import Finding, found
from lab.audit.findings.weights import Replicas
from lab.audit.findings.where import lasting_optimizers
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import DdpBuilt, DdpMissed, Error
from lab.explain.diagnosis import find_known

# By the name of a known error that only a mistake with DDP causes: the finding.
_ERRORS = {"unused_parameters": "unused-parameters", "ready_twice": "ready-twice"}


def check(recording: Recording) -> Iterator[Finding]:
    """Yield what DDP itself complains of, and parameters that it does not average."""
    for rank in recording.ranks:
        for error in rank.of(Error):
            yield from _complaint(rank, error)
    for missed in recording.of(DdpMissed):
        yield from _not_averaged(recording, missed)


def _complaint(rank: RankRecords, error: Error) -> Iterator[Finding]:
    """Yield the finding of an error that DDP raised, with the parameters that it waits for."""
    names = rank.of(DdpMissed)[-1].unused if rank.of(DdpMissed) else []
    known = find_known(error.message, around=str, before=str)
    if known is not None and known.name in _ERRORS and not error.after_cut:
        yield found(
            _ERRORS[known.name],
            error.at,
            kind="named" if names else "told",
            rank=rank.rank,
            count=count(len(names), "parameter"),
            names=listed(names, most=4),
            told=error.message.partition(". ")[0].strip(),
        )


def _not_averaged(recording: Recording, missed: DdpMissed) -> Iterator[Finding]:
    """Yield that DDP averages some gradients no more, if the ranks' optimisers got different ones.

    The script may average them by hand.
    """
    names = missed.converted or missed.late
    if not names:
        return
    for number in itertools.chain(*lasting_optimizers(recording)):
        got = Replicas(recording, number).got
        if any((got[step] != got[step][0]).any() for step in got.keys() - range(missed.step)):
            yield found(
                "ddp-misses-parameters",
                missed.at or recording.of(DdpBuilt)[0].at,
                kind="converted" if missed.converted else "late",
                step=missed.step,
                count=count(len(names), "parameter"),
                names=listed(names, most=4),
            )
