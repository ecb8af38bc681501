"""Each case of tests/audit_cases/README.md gets its own finding, and each right script no fault.

So do the mistakes of tests/helpers/wrong.py, planted into this project's own training. ``FOUND``
says by which names. ``INVISIBLE`` lists the others, with the reason: an audit sees the few steps of
a run, not what a run saves or what a right script could have meant.
"""

import os
import shlex
from dataclasses import replace

import pytest

from lab.audit.cases import Script, apply_edit
from tests.helpers.audited import OWN_FLAGS, Case, mistakes, read_cases, record_case
from tests.helpers.paths import ROOT
from tests.helpers.wrong import WRONG

CASES, OTHER_PYTHON = read_cases(), os.environ.get("AUDIT_PYTHON")
IN_OTHER_TORCH = """
    bypassed_spawn clip_norm_torch clock_wrong_divisor collectives_missing_on_rank_1
    ddp_bypassed_module literal_4_own_optimizer notice_batchnorm right_accumulation right_ddp_bf16
    right_ddp_comm_hook right_ddp_lbfgs right_ddp_zero_redundancy right_foreach_adam_groups
    right_gather_scatter right_own_optimizer right_workers samples_no_sampler_ddp
    missed_converted missed_frozen_then_thawed sum_all_reduce unused_ddp_head
    weights_averaged_each_step
"""
"""Cases for an environment with another torch: they reach each part of the probe."""
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
    "NodeMeanDividedAgain": ("averaged-twice", 4, "--sync hierarchical --ranks-per-node 2"),
    "MeanInsideNodesOnly": ("inside-groups", 3, "--sync hierarchical --ranks-per-node 2"),
    "NodeMeansUnweighted": ("unequal-groups", 3, "--sync hierarchical --ranks-per-node 2"),
    "LeaderKeepsTheSum": ("one-group", 3, "--sync hierarchical --ranks-per-node 2"),
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
    "BiasedRunningVariance UnbiasedInTraining MeanOfTheRanksMoments StatisticsOfTwoGroups": (
        "activations may be normalised in any way"
    ),
    "BackwardWithoutTheSecondTerm BackwardWithOwnSums WeightsGradientOfAllRanks": (
        "a layer's own backward: the audit takes the gradients that autograd returns"
    ),
    "ResumeWithoutOptimiserState ResumeWithoutEpoch": "an audit does not resume",
    "ClipEachParameter": "all ranks clip the mean alike, as a right script may",
    "CheckpointWithoutHash HashOfTheWeightsAlone": "an audit does not read checkpoints",
    "NoInitialBroadcast UnseededOrder": "this project seeds all ranks alike, so these are equal",
    "UnseededAugmentation": "augmentation may differ from rank to rank",
}
QUICK = "SameSamples RingWithoutAChunk StaleByOneStep LastBucketNotSent ClipBeforeAveraging"
"""Those of each run; the others take a minute together."""


def parameters(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@pytest.mark.slow
@parameters(CASES)
def test_finds_exactly_what_is_wrong(case, tmp_path):
    """On one number of ranks; on all, where the runs are compared."""
    sizes = case.sizes if case.together else (case.quick_size,)
    assert not mistakes(case, [record_case(case, size, tmp_path / str(size)) for size in sizes])


@pytest.mark.long
@parameters(CASES)
def test_finds_the_same_on_every_number_of_ranks(case, tmp_path):
    """On each number of ranks by itself, and in all runs together, as ``lab audit`` does."""
    recordings = [record_case(case, size, tmp_path / str(size)) for size in case.sizes]
    for recording in () if case.together else recordings:
        assert not mistakes(case, [recording]), f"on {recording.size} ranks"
    assert not mistakes(case, recordings)


@pytest.mark.long
@pytest.mark.skipif(
    OTHER_PYTHON is None,
    reason="set AUDIT_PYTHON to the path of an interpreter with another torch, 2.0 or newer",
)
@parameters([{one.name: one for one in CASES}[name] for name in IN_OTHER_TORCH.split()])
def test_finds_the_same_with_another_torch(case, tmp_path):
    """``lab`` runs here; the script runs in the other interpreter, on 2 ranks."""
    command = f"{shlex.quote(OTHER_PYTHON)} {case.command.partition(' ')[2]}"
    assert not mistakes(case, [record_case(replace(case, command=command), 2, tmp_path)])


@pytest.mark.parametrize(
    ("edit", "times"),
    [
        ("-c", 0),  # no such line
        ("-a", 2),  # twice
        ("-b\n+a\n...\n-a", 2),  # also in the base of the edit's other place
        ("+c", 4),  # nowhere
        (" a\n a", 0),
    ],
)
def test_the_old_lines_of_an_edit_stand_exactly_once_in_its_base(edit, times):
    case = Script("edited", body="a\nb\na\n", edit=edit)
    with pytest.raises(ValueError, match=f"edited: {times} times, not once, in its base"):
        apply_edit(case)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "slow" if name in QUICK.split() else "long"))
        for name in FOUND
    ],
)
def test_a_planted_mistake_is_found(name, tmp_path):
    finding, size, flags = FOUND[name]
    command = f"python {shlex.quote(str(ROOT))}/PartTwo/main.py {OWN_FLAGS} {flags}"
    case = Case(name, finds=frozenset(finding.split("|")), command=command, plant=name)
    assert not mistakes(case, [record_case(case, size, tmp_path)])


def test_every_planted_mistake_is_listed():
    assert {one.name for one in WRONG} == {*FOUND, *" ".join(INVISIBLE).split()}
