"""Mistakes of lab/proofs/wrong.py, planted into this project's own training, are found by an audit.

``FOUND`` says by which names. ``INVISIBLE`` lists the others, with the reason: an audit sees the
few steps of a run, not what a run saves or what a right script could have meant.
"""

from functools import partial

import pytest

from lab.proofs.wrong import WRONG
from tests.helpers.audited import OWN_FLAGS, Case, mistakes, record_case, start_forked
from tests.helpers.paths import ROOT

FOUND = {
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
    "RestDropped NeverReshuffled": "the same: which samples, and what is an epoch, cannot be told",
    "CommunicatesEachMicroBatch": "without a loader, backwards of a step may be several losses",
    "MicroBatchesAddedUp": "PartTwo knows its batches' sizes, and calls nothing that is replaced",
    "AsIfShardsWereEqual EveryBatchFull": "most right scripts take the plain mean over the ranks",
    "Rank0sStatistics UnweightedStatistics": "BatchNorm's are no gradients; DDP takes rank 0's",
    "ResumeWithoutOptimiserState ResumeWithoutEpoch": "an audit does not resume",
    "ClipEachParameter": "all ranks clip the mean alike, as a right script may",
    "CheckpointWithoutHash HashOfTheWeightsAlone": "an audit does not read checkpoints",
    "NoInitialBroadcast UnseededOrder": "this project seeds all ranks alike, so these are equal",
    "UnseededAugmentation": "augmentation may differ from rank to rank",
}
QUICK = "SameSamples RingWithoutAChunk StaleByOneStep LastBucketNotSent ClipBeforeAveraging"
"""Those of each run; the others take a minute together."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "slow" if name in QUICK.split() else "long"))
        for name in FOUND
    ],
)
def test_a_planted_mistake_is_found(name, tmp_path):
    """Exactly the finding that ``FOUND`` says."""
    finding, size, flags = FOUND[name]
    command = f"python {ROOT}/PartTwo/main.py {OWN_FLAGS} {flags}"
    case = Case(name, finds=frozenset(finding.split("|")), command=command)
    recording = record_case(case, size, tmp_path, start=partial(start_forked, plant=name))
    assert not mistakes(case, [recording])


def test_the_lists_are_complete():
    """Every mistake of lab/proofs is in one of the lists."""
    assert {one.name for one in WRONG} == {*FOUND, *" ".join(INVISIBLE).split()}
