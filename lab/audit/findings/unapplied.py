"""Parameters that get gradients in every step, and lie in no optimiser."""

from collections.abc import Iterator, Sequence

import numpy as np

from common.say import count, listed
from lab.audit.findings.finding import Finding, found
from lab.audit.findings.where import first_line
from lab.audit.recording import Recording
from lab.audit.records import Parameters, Unapplied

_FEWEST_STEPS = 3


def check(recording: Recording) -> Iterator[Finding]:
    """Yield a fault where the ranks exchange these gradients, of a small part of the model.

    Else they may be meant: of a large part that was trained before, a head alone may be trained.
    """
    for records in zip(*(rank.of(Unapplied) for rank in recording.ranks), strict=False):
        told = {(tuple(record.names), record.steps) for record in records}
        if len(told) == 1 and records[0].steps >= _FEWEST_STEPS:
            yield _unapplied(recording, records)


def _unapplied(recording: Recording, records: Sequence[Unapplied]) -> Finding:
    first = records[0]
    pairs = list(zip(recording.ranks, records, strict=True))
    own = np.array([rank.numbers(record.own) for rank, record in pairs])
    held = np.array([rank.numbers(record.held) for rank, record in pairs])
    exchanged = _same(held) and not _same(own)
    meant = 2 * first.numbers > first.every or not exchanged
    return found(
        "trains-a-part" if meant else "in-no-optimizer",
        first.at,
        count=count(len(first.names), "parameter"),
        names=listed(first.names, most=4),
        share=first.numbers / first.every,
        steps=first.steps,
        optimizer=first_line(one.at for one in recording.of(Parameters)) or "unknown",
    )


def _same(rows: np.ndarray) -> bool:
    return np.allclose(rows, rows[0], rtol=1e-4, atol=1e-6 * np.abs(rows).max())
