"""Findings about samples: which ones each rank trains on, in which order, and how many.

Everything is compared within one epoch, per loader. Indices alone prove nothing: partitions give
all ranks the same indices of different data, so ``epochs.same_data`` is asked as well. Coverage of
whole epochs is in coverage.py.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, takewhile

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown
from lab.audit.findings.samples.coverage import coverage
from lab.audit.findings.samples.epochs import (
    Epoch,
    Index,
    TrainingLoader,
    is_sequential,
    same_data,
    training_loaders,
)
from lab.audit.findings.samples.steps import local_batches, training_steps
from lab.audit.recording import RankRecords, Record, Recording

Loaders = Sequence[TrainingLoader]
_MANY = 4
"""From this many epochs that all end early, the script takes one batch of each: compare them."""


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield what is found about the samples of a run."""
    yield from _global_batch(recording)
    if len(recording.ranks) < 2:
        return
    groups = training_loaders(recording)
    for loaders in groups:
        if _computes_parts(recording):
            yield Unknown("the samples: the ranks compute on other samples than their loaders give")
            continue
        same = list(_same_samples(recording, loaders))
        yield from same
        if not any(isinstance(one, Finding | Unknown) for one in same):
            yield from coverage(loaders, recording.size)
        yield from _same_order(loaders)
        yield from _batch_counts(recording, loaders)
    if not any(epoch.batches for group in groups for one in group for epoch in one.epochs):
        yield from _same_inputs(recording)


def _computes_parts(recording: Recording) -> bool:
    """Return whether a rank trains on parts of its batches in most steps."""
    for rank in recording.ranks:
        steps = training_steps(rank)
        if sum(step.takes_a_part for step in steps) * 2 > len(steps):
            return True
    return False


def _targets_differ(recording: Recording, one: int, other: int) -> bool:
    """Return whether the targets of two ranks are known, and never the same."""
    hashes = {rank.rank: _input_hashes(rank) for rank in recording.ranks}
    both = [
        (hashes[one][key][1], hashes[other][key][1])
        for key in hashes[one].keys() & hashes[other].keys()
    ]
    known = [(mine, theirs) for mine, theirs in both if mine is not None and theirs is not None]
    return bool(known) and all(mine != theirs for mine, theirs in known)


def _same_samples(recording: Recording, loaders: Loaders) -> Iterator[Outcome]:
    """Compare the ranks' batches of the same number in the same epoch."""
    own = True
    for one, other in combinations(loaders, 2):
        shares = list(_shares(one, other))
        same = [share for share in shares if share[2] >= 0.9]
        data = same_data(one, other)
        own &= bool(shares) and (data is False or not any(share[2] for share in shares))
        if data is False or not same or len(same) < 0.9 * len(shares):
            continue
        ranks = f"ranks {one.rank} and {other.rank}"
        if _targets_differ(recording, one.rank, other.rank):
            yield Unknown(f"whether {ranks} train on the same samples: their targets differ")
            continue
        if data is None:
            yield Unknown(
                f"whether {ranks} train on the same samples: their indices are equal, but "
                "the audit cannot tell whether they index the same data"
            )
            continue
        where, both, _ = same[0]
        listed = ", ".join(map(str, both[:4])) + (", …" if len(both) > 4 else "")
        evidence = f"{where}: {ranks} train on the same {len(both)} samples ({listed})"
        if len(shares) > 1:
            evidence += f"; so in {len(same)} of the {len(shares)} batches compared"
        yield Finding("same-samples", (evidence,))
    if own:
        yield Right("every rank trains on different samples")


def _shares(one: TrainingLoader, other: TrainingLoader) -> Iterator[tuple[str, list[Index], float]]:
    """Yield for each batch: where, the samples that both ranks have, and which share these are."""
    for number, epochs in enumerate(zip(one.epochs, other.epochs, strict=False)):
        batches = zip(epochs[0].batches, epochs[1].batches, strict=False)
        for b, (mine, theirs) in enumerate(batches):
            a, c = one.inner(mine), other.inner(theirs)
            if a and c:
                there = set(c)
                both = [index for index in dict.fromkeys(a) if index in there]
                share = len(both) / min(len(set(a)), len(there))
                yield f"epoch {number + 1}, batch {b + 1}", both, share


def _same_inputs(recording: Recording) -> Iterator[Outcome]:
    """Without indices: compare the ranks' inputs and targets, backward by backward.

    Inputs that never change may be anything, so then equal targets must be known. A model that is
    sharded may rightly compute one sample on several ranks.
    """
    rows = [row for one in recording.ranks for p in one.by_kind["params"] for row in p["rows"]]
    hashes = {one.rank: _input_hashes(one) for one in recording.ranks}
    first, *others = sorted(hashes)
    for rank in others if all(row[6] == row[4] for row in rows) else ():
        both = [
            (hashes[first][key], hashes[rank][key]) for key in hashes[first] if key in hashes[rank]
        ]
        inputs = {mine[0] for mine, _ in both}
        targets = {mine[1] for mine, _ in both}
        same = len(both) >= 2 and all(mine == theirs for mine, theirs in both)
        if same and (len(inputs) > 1 or None not in targets):
            text = f"ranks {first} and {rank} compute with the same inputs and targets in all "
            yield Finding("same-samples", (f"{text}{len(both)} backward passes compared",))
            return
    yield Unknown("which samples each rank trains on: no DataLoader draws them by index")


def _input_hashes(rank: RankRecords) -> dict[tuple[int, int], tuple[object, object]]:
    """Return the hashes of inputs and target by (step, number of the backward)."""
    return {
        (one["step"], one["micro"]): (
            tuple(forward[1] for forward in one["forwards"]),
            (one["loss"] or {}).get("target_hash"),
        )
        for one in rank.by_kind["backward"]
        if one["forwards"] and all(forward[1] is not None for forward in one["forwards"])
    }


def _same_order(loaders: Loaders) -> Iterator[Outcome]:
    """Compare the first batches of each epoch with those of the epoch before.

    An epoch that the script left early, as to look at a batch, counts only if there is none else
    and they are many.
    """
    seen: list[tuple[int, Sequence[Index], bool]] = []
    for one in loaders:
        numbered: Sequence[tuple[int, Epoch]] = list(enumerate(one.epochs, 1))
        kept = [(number, epoch) for number, epoch in numbered if not epoch.left]
        several = kept if len(kept) >= 2 or len(numbered) < _MANY else numbered
        for (_, first), (number, second) in pairwise(several):
            batches = list(zip(first.batches, second.batches, strict=False))
            common = [index for a, b in batches if len(b) >= len(a) >= 2 for index in a]
            if (len(batches) >= 2 or several is numbered) and not is_sequential(common):
                seen.append((number, common, all(a == b for a, b in batches if len(a) == len(b))))
    if len({same for *_, same in seen}) == 1:
        number, indices, same = seen[0]
        yield _order(loaders[0], number, indices if same else None)
    if loaders[0].facts.get("replicas") and max(len(one.epochs) for one in loaders) == 1:
        yield Unknown("whether each epoch has another order: one epoch was seen")


def _order(loader: TrainingLoader, number: int, indices: Sequence[Index] | None) -> Outcome:
    """Return what it means that all epochs have the same order, or with None another one."""
    if indices is None:
        return Right(f"epoch {number} has a different order from epoch {number - 1}")
    sampler = str(loader.facts.get("sampler"))
    if "Distributed" not in sampler and sampler != "RandomSampler":
        return Unknown(
            f"whether the order is meant to be the same in every epoch: {sampler} gives the same "
            f"first {len(indices)} samples again"
        )
    listed = ", ".join(map(str, indices[:4]))
    evidence = (
        f"epoch {number} begins with the same {len(indices)} samples as the one before, in "
        f"the same order (rank {loader.rank}: samples {listed}, …)"
    )
    return Finding("same-order", (evidence,))


def _batch_counts(recording: Recording, loaders: Loaders) -> Iterator[Outcome]:
    """Compare how many batches the ranks have in an epoch.

    Not a fault if the ranks stay in step where an epoch ends, since their loops then end alike or
    begin anew, or if Join lets those wait that have fewer.
    """
    counts = {one.rank: one.facts.get("batches") for one in loaders}
    if None in counts.values():
        return
    if len(set(counts.values())) == 1:
        yield Right(f"every rank has {next(iter(counts.values())):,} batches in an epoch")
        return
    listed = ", ".join(f"rank {rank} has {count:,}" for rank, count in counts.items())
    taken = [
        [record["epoch"] for record in _until_cut(rank) if _is_batch_of(loader, record)]
        for rank in recording.ranks
        for loader in loaders
        if loader.rank == rank.rank
    ]
    cut = any(one.by_kind["cut"] for one in recording.ranks)
    ends = not cut or any(len(set(epochs)) > 1 for epochs in taken)
    in_step = not recording.hung and len(set(map(len, taken))) == 1
    if any(one.by_kind["join"] for one in recording.ranks):
        yield Right(f"Join lets the ranks with fewer batches wait ({listed})")
    elif ends and in_step:
        yield Unknown(
            f"whether the ranks' different numbers of batches matter ({listed}): they "
            "stay in step where an epoch ends"
        )
    else:
        evidence = [f"batches in an epoch: {listed}"]
        if not ends:
            evidence.append(
                "no epoch ended within the steps watched: if the loop stops earlier, "
                "give as many --steps"
            )
        yield Finding(
            "different-batch-counts", tuple(evidence), sure="certain" if ends else "likely"
        )


def _until_cut(rank: RankRecords) -> Iterator[Record]:
    return takewhile(lambda record: record["k"] != "cut", rank.records)


def _is_batch_of(loader: TrainingLoader, record: Record) -> bool:
    return bool(record["k"] == "batch" and record["l"] == loader.facts["l"])


def _global_batch(recording: Recording) -> Iterator[Outcome]:
    """Compare the samples of a step on all ranks with what was asked for.

    A local batch may be rounded either way, in each micro-batch.
    """
    if recording.global_batch is None:
        return
    local = local_batches(recording)
    if local is None:
        yield Unknown("the global batch: the samples of a step are not known on every rank")
        return
    total, asked = sum(local.values()), recording.global_batch
    micro = max((len(s.backwards) for r in recording.ranks for s in training_steps(r)), default=1)
    if abs(total - asked) < recording.size * max(micro, 1):
        yield Right(f"the global batch is {total:,} samples, as asked for")
        return
    listed = ", ".join(f"rank {rank} has {count:,}" for rank, count in sorted(local.items()))
    yield Finding(
        "wrong-global-batch",
        (f"a step has {total:,} samples instead of {asked:,}: {listed}",),
    )
