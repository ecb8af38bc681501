"""Mistakes of lab/proofs/wrong.py, planted into this project's own training, are found by an audit.

``FOUND`` says by which names. ``INVISIBLE`` lists the others, with the reason: an audit sees the
few steps of a run, not what a run saves or what a right script could have meant.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lab.audit.command import AuditCommand
from lab.proofs.wrong import WRONG
from tests.helpers.audited import Case, mistakes, record_case, start_forked
from tests.helpers.paths import ROOT

_DIGITS = "--dataset digits --model tiny --max-steps 8 --threads 1 --master-ip {master}"
_RANKS = "--master-port {port} --num-nodes {nodes} --rank {rank}"

FOUND: dict[str, tuple[str, int, str]] = {
    "Sum": ("sum-not-mean", 2, "--sync all_reduce"),
    "LiteralDivisor": ("literal-divisor", 3, "--sync all_reduce"),
    "OwnGradient": ("own-gradient|group-unused", 2, "--sync all_reduce"),
    "FirstParameterLeftOut": ("some-parameters", 2, "--sync all_reduce"),
    "StaleByOneStep": ("stale-gradient", 2, "--sync all_reduce"),
    "AveragedTwice": ("averaged-twice", 3, "--sync all_reduce"),
    "WeightsInsteadOfGradients": ("weights-averaged", 2, "--sync all_reduce"),
    "BroadcastFromEachRank": ("own-gradient", 2, "--sync all_reduce"),
    "FlatBufferNotCopiedBack": ("own-gradient", 2, "--sync all_reduce"),
    "RingWithoutAChunk": ("not-the-mean|some-parameters", 3, "--sync ring"),
    "HalvingDoublingForPowersOfTwo": ("not-the-mean", 3, "--sync halving_doubling"),
    "TreeWithOneChild": ("not-the-mean", 3, "--sync tree"),
    "LastBucketNotSent": ("some-parameters", 2, "--sync overlapped --bucket-mb 0.001"),
    "SameSamples": ("same-samples", 2, "--sync all_reduce"),
    "ClipBeforeAveraging": ("clipped-before-averaging", 2, "--sync all_reduce --clip-norm 0.1"),
}
"""By mistake: the finding, at how many ranks, and PartTwo's flags."""

INVISIBLE = {
    "OverlappingShards": "no loader of torch's: of a batch's samples, only a hash of them all",
    "RestDropped": "the same: which samples are left out cannot be told",
    "NeverReshuffled": "the same: without a loader there are no epochs",
    "CommunicatesEachMicroBatch": "without a loader, backwards of a step may be several losses",
    "MicroBatchesAddedUp": "PartTwo knows its batches' sizes, and calls nothing that is replaced",
    "AsIfShardsWereEqual": "the plain mean over the ranks is what most right scripts take",
    "EveryBatchFull": "the same, in the last batch of an epoch",
    "Rank0sStatistics": "BatchNorm's statistics are no gradients; DDP itself takes rank 0's",
    "UnweightedStatistics": "as before",
    "ResumeWithoutOptimiserState": "an audit does not resume",
    "ResumeWithoutEpoch": "an audit does not resume",
    "ClipEachParameter": "all ranks clip the mean alike, as a right script may",
    "CheckpointWithoutHash": "an audit does not read checkpoints",
    "HashOfTheWeightsAlone": "an audit does not read checkpoints",
    "NoInitialBroadcast": "this project seeds all ranks alike, so the weights are equal without it",
    "UnseededOrder": "this project seeds the global generator alike too, so the orders are equal",
    "UnseededAugmentation": "augmentation may differ from rank to rank",
}
_IN_EACH_RUN = (
    "SameSamples",
    "RingWithoutAChunk",
    "StaleByOneStep",
    "LastBucketNotSent",
    "ClipBeforeAveraging",
)
"""The others take a minute together."""


def _case(name: str, flags: str) -> Case:
    batch = "" if "--batch-size" in flags else "--batch-size 24"
    words = f"python {ROOT}/PartTwo/main.py {flags} {batch} {_DIGITS} {_RANKS}".split()
    return Case(
        name=name,
        finds=frozenset(),
        notices=frozenset(),
        only_notices=False,
        sizes=(),
        command=AuditCommand(tuple(words)),
        flags=(),
        verdict=None,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in _IN_EACH_RUN else pytest.mark.long)
        for name in FOUND
    ],
)
def test_a_planted_mistake_is_found(name: str, tmp_path: Path) -> None:
    """Exactly the finding that ``FOUND`` says."""
    finding, size, flags = FOUND[name]
    case = replace(_case(name, flags), finds=frozenset(finding.split("|")))
    recording = record_case(case, size, tmp_path, start=partial(start_forked, plant=name))
    assert not mistakes(case, [recording])


def test_the_lists_are_complete() -> None:
    """Every mistake of lab/proofs is in one of the lists."""
    assert {one.name for one in WRONG} == {*FOUND, *INVISIBLE}
