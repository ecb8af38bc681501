"""Whether the ranks draw the same random numbers: for their samples, and in the forward pass."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from common.say import listed
from lab.audit.findings.epochs import TrainingLoader
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.findings.where import first_line, first_records
from lab.audit.recording import Recording
from lab.audit.records import Drew, RandomForward, Start

_FIRST_STEPS = 6


def check(recording: Recording) -> Iterator[Finding]:
    """Compare the ranks' random states at the first dropout of the first six steps.

    Later one rank may have drawn alone, as by evaluating after an epoch.
    """
    if len(recording.ranks) < 2:
        return
    states = [
        {record.state_hash for record in records.values()}
        for step, records in first_records(recording, RandomForward).items()
        if step < _FIRST_STEPS and len(records) == recording.size
    ]
    if len(states) >= 2 and all(len(hashes) == 1 for hashes in states):
        line = first_line(record.at for record in recording.of(RandomForward))
        yield found("equal-dropout", line, ranks=recording.size, steps=len(states))


def augmentation(recording: Recording, loaders: Sequence[TrainingLoader]) -> Iterator[Outcome]:
    """Compare the states in which the ranks' generators were when they made training batches.

    A few may be equal by chance, as where a dataset seeds them with an index.

    loaders : those that belong together, whose samples differ.
    """
    drawn = [_drawn(recording, loader) for loader in loaders]
    for (one, mine), (other, theirs) in combinations(zip(loaders, drawn, strict=True), 2):
        for generator in sorted(mine.keys() & theirs.keys()):
            shared = mine[generator] & theirs[generator]
            fewer = min(len(mine[generator]), len(theirs[generator]))
            if len(shared) >= max(2, fewer / 2):
                yield found(
                    "equal-augmentation",
                    one.facts.line,
                    sure=False,  # the numbers may serve something else
                    one=one.rank,
                    other=other.rank,
                    generator=generator,
                    count=len(shared),
                    batches=fewer,
                )
                return
    generators = listed(sorted(set().union(*drawn)))
    if any(len(states) < 2 for mine in drawn for states in mine.values()):
        yield Unknown("augmentation", f"too few batches were made with numbers from {generators}")
    elif generators:
        yield Right("augmentation", f"the ranks draw from {generators} in states of their own")


def _drawn(recording: Recording, loader: TrainingLoader) -> Mapping[str, set[int]]:
    """Return by generator the states from which a rank's training batches were made.

    The first batch of each process is left out: datasets that seed a generator themselves, as with
    the sample's index, begin from the same state on all ranks.
    """
    trained = {tuple(batch.indices or ()) for epoch in loader.epochs for batch in epoch.batches}
    states: dict[str, set[int]] = defaultdict(set)
    for process in recording.processes:
        parents = {start.parent_pid for start in process.of(Start)}
        if loader.records.pid in (process.pid, *parents):
            batches = [drew for drew in process.of(Drew) if tuple(drew.indices) in trained]
            for number, drew in enumerate(batches):
                for generator, state in drew.states.items():
                    seen = states[generator]
                    if number:
                        seen.add(state)
    return states
