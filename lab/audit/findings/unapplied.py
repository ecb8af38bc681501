"""Parameters that get gradients in every step, and lie in no optimiser."""

from collections.abc import Iterator

from common.say import count, listed
from lab.audit.findings.finding import Finding, found
from lab.audit.findings.one_model import exchanged_numbers
from lab.audit.recording import Recording
from lab.audit.records import Parameters, Unapplied

_FEWEST_STEPS = 3


def check(recording: Recording) -> Iterator[Finding]:
    """Yield a fault where the ranks exchange these gradients, of a small part of the model.

    Else they may be meant: of a large part that was trained before, a head alone may be trained.
    """
    for records in zip(*(rank.of(Unapplied) for rank in recording.ranks), strict=False):
        first = records[0]
        told = {(tuple(record.names), record.steps) for record in records}
        if len(told) > 1 or first.steps < _FEWEST_STEPS:
            continue
        small = 2 * first.numbers <= first.every
        exchanged = exchanged_numbers(recording) >= first.every
        yield found(
            "in-no-optimizer" if small and exchanged else "trains-a-part",
            first.at,
            count=count(len(first.names), "parameter"),
            names=listed(first.names, most=4),
            share=first.numbers / first.every,
            steps=first.steps,
            optimizer=recording.of(Parameters)[0].at or "unknown",
        )
