"""The name of what gradients are, where they are not the mean; for drivers' checks."""

from collections.abc import Mapping, Sequence

import numpy as np

from common.utils.gradient_fit import side_by_side
from lab.evidence import explain_parameters, judge_parameters


def named_evidence(
    lengths: Mapping[str, int], own: Sequence[Sequence[float]], got: Sequence[Sequence[float]]
) -> tuple[str, str]:
    """Return the finding, and a sentence with the evidence.

    lengths : how many numbers there are of each parameter, by name.
    own, got : by rank the numbers of all parameters, one after another.
    """
    computed, received = (_finite(numbers) for numbers in (own, got))
    parts = explain_parameters(computed, received, side_by_side(lengths.values()))
    judgement = judge_parameters(dict(zip(lengths, parts, strict=True)))
    if judgement.right:
        return "not-the-mean", "some numbers are not the mean"
    return judgement.finding or "not-the-mean", judgement.sentence


def _finite(numbers: Sequence[Sequence[float]]) -> np.ndarray:
    """Return numbers as an array (ranks, numbers), with NaN for infinity."""
    array = np.array(numbers, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)
