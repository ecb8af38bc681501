"""Wrong implementations of data-parallel training, each with the test that must catch it.

``WRONG`` is the complete list: mistakes from published solutions, and mistakes that a change to
this project could make. ``Wrong.plant`` replaces the right code with the wrong code. ``pytest -m
mutation`` plants each one and checks that its test fails for the stated reason. The wrong code is
in ``wrong_code.py``, ``wrong_batchnorm.py`` and ``wrong_strategies.py``.
"""

import functools
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from common.sync.base import GradientSync
from tests.helpers import wrong_batchnorm, wrong_code, wrong_strategies


@dataclass(frozen=True)
class Wrong:
    """One wrong implementation.

    Parameters
    ----------
    name, group : a unique name, and what the mistake is about.
    what : one sentence that says what is wrong.
    target : what is replaced, as "module:attribute" or "module:Class.attribute".
    replacement : the wrong code.
    check : the test of ``make test`` that then fails.
    reason : a regular expression for the failure's message; a test that fails with another message
        has not caught the mistake.
    """

    name: str
    group: str
    what: str
    target: str
    replacement: Any
    check: str
    reason: str

    def plant(self) -> None:
        """Replace the right code with the wrong code for the rest of this process.

        Raises AttributeError if the target does not exist.
        """
        module, path = self.target.split(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, import_module(module))
        getattr(owner, name)  # raises if it is not there
        setattr(owner, name, self.replacement)


_SYNC = "tests/common/sync/test_sync.py::test_equals_one_process_after_every_step"
_SHARDING = "tests/common/data/test_sharding.py"
_ENGINE = "tests/common/training_engine/test_engine.py"
_CHECKPOINT = "tests/common/test_checkpoint.py"
_DIFFERS = r"differs from one process by .+ \(allowed"


def _strategy(
    kind: type[GradientSync],
    *,
    in_place_of: str = "AllReduce",
    ranks: int = 2,
    where: str = "",
    group: str = "strategy",
) -> Wrong:
    """Return a wrong strategy, which takes the place of a right one in the test of all strategies.

    ranks : of that test. where : the parameter that the test's message must name, if it is certain.
    """
    names = {
        "AllReduce": "all_reduce",
        "Ring": "ring",
        "Tree": "tree",
        "HalvingDoubling": "halving_doubling",
        "Overlapped": "overlapped",
        "Hierarchical": "hierarchical",
    }
    name = names[in_place_of]
    return Wrong(
        kind.__name__,
        group,
        str(kind.__doc__),
        f"common.sync.{name}:{in_place_of}",
        kind,
        f"{_SYNC}[{ranks}-{name}-float64]",
        rf"{ranks} ranks, step \d: {where}.*{_DIFFERS}",
    )


def _batchnorm(
    name: str, what: str, target: str, replacement: Any, *, ranks: int = 2, where: str = ""
) -> Wrong:
    """Return a wrong SyncBatchNorm, for the test of all strategies; see ``_strategy``."""
    return Wrong(
        name,
        "SyncBatchNorm",
        what,
        f"common.models.sync_batchnorm:{target}",
        replacement,
        f"{_SYNC}[{ranks}-all_reduce-float64]",
        rf"{ranks} ranks, step \d: {where}.*{_DIFFERS}",
    )


WRONG = (
    _strategy(wrong_strategies.Sum, where="norm"),
    _strategy(wrong_strategies.LiteralDivisor, ranks=3),
    _strategy(wrong_strategies.OwnGradient),
    _strategy(wrong_strategies.FirstParameterLeftOut, where="conv.weight"),
    _strategy(wrong_strategies.StaleByOneStep),
    _strategy(wrong_strategies.AveragedTwice),
    _strategy(wrong_strategies.WeightsInsteadOfGradients),
    _strategy(wrong_strategies.BroadcastFromEachRank),
    _strategy(wrong_strategies.FlatBufferNotCopiedBack),
    _strategy(wrong_strategies.RingWithoutAChunk, in_place_of="Ring", ranks=3),
    _strategy(
        wrong_strategies.HalvingDoublingForPowersOfTwo, in_place_of="HalvingDoubling", ranks=3
    ),
    _strategy(wrong_strategies.TreeWithOneChild, in_place_of="Tree", ranks=3),
    _strategy(wrong_strategies.LastBucketNotSent, in_place_of="Overlapped"),
    _strategy(wrong_strategies.NodeMeanDividedAgain, in_place_of="Hierarchical"),
    _strategy(wrong_strategies.MeanInsideNodesOnly, in_place_of="Hierarchical", ranks=3),
    _strategy(wrong_strategies.NodeMeansUnweighted, in_place_of="Hierarchical", ranks=3),
    _strategy(wrong_strategies.LeaderKeepsTheSum, in_place_of="Hierarchical"),
    Wrong(
        "SameSamples",
        "sharding",
        "Every rank trains on the whole global batch.",
        "common.data.sharding:rank_share",
        wrong_code.whole_batch,
        f"{_SHARDING}::test_ranks_see_different_samples_in_each_step",
        "two ranks have the same sample",
    ),
    Wrong(
        "OverlappingShards",
        "sharding",
        "Each shard also has the first sample of the next.",
        "common.data.sharding:rank_share",
        wrong_code.overlapping,
        f"{_SHARDING}::test_ranks_see_different_samples_in_each_step",
        "two ranks have the same sample",
    ),
    Wrong(
        "RestDropped",
        "sharding",
        "Samples that do not divide by the number of ranks are left out.",
        "common.data.sharding:rank_share",
        wrong_code.rest_dropped,
        f"{_SHARDING}::test_each_sample_comes_exactly_once_an_epoch",
        "samples come never or twice",
    ),
    Wrong(
        "NeverReshuffled",
        "sharding",
        "Every epoch uses the order of the first epoch.",
        "common.data.sharding:epoch_order",
        wrong_code.one_order,
        f"{_SHARDING}::test_order_is_new_each_epoch_and_the_same_for_the_same_seed",
        "two epochs have the same order",
    ),
    Wrong(
        "AsIfShardsWereEqual",
        "loss weighting",
        "The shards' mean losses are averaged without weights, although shards differ in size.",
        "common.training_engine.engine:agreed_sizes",
        wrong_code.as_if_shards_were_equal,
        f"{_SYNC}[2-all_reduce-float64]",
        rf"2 ranks, step 1: .*{_DIFFERS}",
    ),
    _batchnorm(
        "BiasedRunningVariance",
        "The running variance estimates the data's variance by dividing by N, not by N - 1.",
        "SyncBatchNorm._learn",
        wrong_batchnorm.biased_running_variance,
        where="norm.running_var",
    ),
    _batchnorm(
        "UnbiasedInTraining",
        "Training normalises by a variance of N - 1 values.",
        "moments_over_ranks",
        wrong_batchnorm.unbiased_in_training,
    ),
    _batchnorm(
        "MeanOfTheRanksMoments",
        "Means and mean squares of ranks are averaged without weights, although shards differ.",
        "moments_over_ranks",
        wrong_batchnorm.mean_of_the_ranks_moments,
    ),
    _batchnorm(
        "StatisticsOfTwoGroups",
        "Rank 0 has statistics of its own, and the other ranks have theirs.",
        "MessageGroup.__init__",
        wrong_batchnorm.without_rank_0,
        ranks=3,
    ),
    _batchnorm(
        "BackwardWithoutTheSecondTerm",
        "The gradient leaves out how a value moves the standard deviation.",
        "_Normalise.backward",
        staticmethod(wrong_batchnorm.backward_without_the_second_term),
    ),
    _batchnorm(
        "BackwardWithOwnSums",
        "Backward has no message: each rank uses the sums of its own gradients.",
        "_Normalise.backward",
        staticmethod(wrong_batchnorm.backward_with_own_sums),
    ),
    _batchnorm(
        "WeightsGradientOfAllRanks",
        "The gradients of weight and bias are added up in the layer, and averaged again later.",
        "_Normalise.backward",
        staticmethod(wrong_batchnorm.weights_gradient_of_all_ranks),
        where="norm",
    ),
    Wrong(
        "EveryBatchFull",
        "loss weighting",
        "The last batch of an epoch is weighted as if it were full.",
        "common.data.sharding:GlobalBatchSampler.global_batch_sizes",
        property(wrong_code.every_batch_full),
        f"{_SHARDING}::test_batches_are_full_but_the_last_and_shared_evenly",
        "the loss would be weighted by other sizes",
    ),
    Wrong(
        "Rank0sStatistics",
        "BatchNorm",
        "All ranks take the running statistics of rank 0.",
        "common.training_engine.batchnorm:agree_on_buffers",
        wrong_code.rank0s_statistics,
        "tests/common/training_engine/test_batchnorm.py::test_running_statistics_are_the_mean_over_all_samples",
        "running statistics differ from those of the shards in turn",
    ),
    Wrong(
        "UnweightedStatistics",
        "BatchNorm",
        "Running statistics are averaged as if all ranks had equally many samples.",
        "common.training_engine.batchnorm:_average",
        wrong_code.unweighted_statistics,
        "tests/common/training_engine/test_batchnorm.py::test_running_statistics_are_the_mean_over_all_samples",
        "running statistics differ from those of the shards in turn",
    ),
    Wrong(
        "ResumeWithoutOptimiserState",
        "resume",
        "The momentum is not saved.",
        "common.training_engine:TrainingEngine.state",
        wrong_code.state_without_momentum,
        "tests/common/experiment/test_resume.py::test_one_rank_resumes_bit_for_bit",
        "metrics of the second epoch differ after a resume",
    ),
    Wrong(
        "ResumeWithoutEpoch",
        "resume",
        "A resumed run counts its epochs from 1 again, so it repeats the order of samples.",
        "common.data.sharding:GlobalBatchSampler.set_epoch",
        wrong_code.epochs_counted_from_the_start,
        "tests/common/experiment/test_resume.py::test_one_rank_resumes_bit_for_bit",
        "metrics of the second epoch differ after a resume",
    ),
    Wrong(
        "ClipBeforeAveraging",
        "clipping",
        "Each rank clips its own gradients, then they are averaged.",
        "common.training_engine:TrainingEngine.train_step",
        wrong_code.clip_before_averaging,
        "tests/common/sync/test_sync.py::test_other_cases_equal_one_process[clipping]",
        rf"2 ranks, step 1: .*{_DIFFERS}",
    ),
    Wrong(
        "ClipEachParameter",
        "clipping",
        "Each parameter's gradient norm is clipped, not the norm of all gradients together.",
        "common.training_engine.engine:clip_grads_with_norm_",
        wrong_code.clip_each_parameter,
        "tests/common/sync/test_sync.py::test_other_cases_equal_one_process[clipping]",
        rf"2 ranks, step 1: .*{_DIFFERS}",
    ),
    Wrong(
        "CheckpointWithoutHash",
        "checkpoint",
        "Nothing shows whether the file still holds what was saved.",
        "common.checkpoint:save_checkpoint",
        wrong_code.save_without_hash,
        f"{_CHECKPOINT}::test_altered_with_the_digest_left_as_it_was",
        "DID NOT RAISE",
    ),
    Wrong(
        "HashOfTheWeightsAlone",
        "checkpoint",
        "An altered optimiser state or step is not noticed.",
        "common.checkpoint:digest",
        wrong_code.hash_of_the_weights_alone,
        f"{_CHECKPOINT}::test_altered_with_the_digest_left_as_it_was",
        "DID NOT RAISE",
    ),
    Wrong(
        "CommunicatesEachMicroBatch",
        "accumulation",
        "``no_sync`` does nothing: every micro-batch is exchanged.",
        "common.sync.ddp:DDP.no_sync",
        wrong_code.no_sync_that_does_nothing,
        f"{_ENGINE}::test_ranks_communicate_once_an_optimiser_step_however_many_micro_batches[ddp]",
        "messages of a step with several micro-batches",
    ),
    Wrong(
        "MicroBatchesAddedUp",
        "accumulation",
        "The micro-batches' gradients are added up, not averaged.",
        "common.training_engine.engine:agreed_sizes",
        wrong_code.micro_batches_added_up,
        "tests/common/sync/test_sync.py::test_other_cases_equal_one_process[accumulation]",
        rf"2 ranks, step 1: .*{_DIFFERS}",
    ),
    _strategy(wrong_strategies.NoInitialBroadcast, group="seeds"),
    Wrong(
        "UnseededOrder",
        "seeds",
        "Each rank shuffles in its own order, so the shards overlap.",
        "common.data.sharding:epoch_order",
        wrong_code.unseeded_order,
        f"{_SHARDING}::test_each_sample_comes_exactly_once_an_epoch",
        "samples come never or twice",
    ),
    Wrong(
        "UnseededAugmentation",
        "seeds",
        "Crops and flips depend on the process that draws them.",
        "common.data.loaders:draw",
        wrong_code.unseeded_draw,
        f"{_SHARDING}::test_a_sample_is_augmented_alike_on_any_number_of_ranks",
        "another crop or flip on",
    ),
)
"""Every wrong implementation; names are unique."""
