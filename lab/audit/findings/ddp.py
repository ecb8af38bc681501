"""Whether DistributedDataParallel gets the gradients that it averages, and no others."""

from collections.abc import Iterator

from common.say import count, listed
from lab.audit.findings.finding import Finding, found
from lab.audit.findings.weights import Replicas
from lab.audit.findings.where import lasting_optimizers
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import DdpMissed, Error
from lab.explain.diagnosis import explain, lines_of

# By the name of a known error that only a mistake with DDP causes: the finding.
_ERRORS = {"unused_parameters": "unused-parameters", "ready_twice": "ready-twice"}


def check(recording: Recording) -> Iterator[Finding]:
    """Yield what DDP itself complains of, and parameters that it does not average."""
    for rank in recording.ranks:
        for error in rank.of(Error):
            yield from _complaint(rank, error)
    for rank in recording.ranks:
        for missed in rank.of(DdpMissed):
            yield from _not_averaged(recording, missed)


def _complaint(rank: RankRecords, error: Error) -> Iterator[Finding]:
    """Yield the finding of an error that DDP raised, with the parameters that it waits for."""
    known = {known.error.name for known in explain(lines_of(error.message))}
    for name in [] if error.after_cut else known & _ERRORS.keys():
        unused = [missed.unused for missed in rank.of(DdpMissed)][-1:]
        names = [*unused, []][0]
        yield found(
            _ERRORS[name],
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
    numbers = [number for family in lasting_optimizers(recording) for number in family]
    for replicas in [Replicas(recording, number) for number in numbers] if names else []:
        later = [got for step, got in replicas.got.items() if step >= missed.step]
        if any((got != got[0]).any() for got in later):
            yield found(
                "ddp-misses-parameters",
                missed.at,
                kind="converted" if missed.converted else "late",
                step=missed.step,
                count=count(len(names), "parameter"),
                names=listed(names, most=4),
            )
