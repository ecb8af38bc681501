"""What a wrong average is called: the titles of the audit's catalogue, and what was seen.

``explain_average`` names what each rank's gradient has become; ``cause`` writes the sentence.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lab.audit.findings.finding import catalogue

Numbers = NDArray[np.float64]
_NEAR = 1e-6


def cause(name: str, what: str) -> str:
    """Return the catalogue's title of a fault, and what shows it here."""
    return f"{catalogue()[name].title}: {what}"


def explain_average(after: Sequence[Numbers], before: Numbers, *, where: str = "") -> str | None:
    """Say what is wrong with the ranks' gradients, which should be their mean; None if nothing is.

    after : by rank, of shape (n,). before : the ranks' own gradients, of shape (ranks, n), without
    two that are alike. where : which numbers these are, e.g. " in 0.weight".
    """
    found = np.stack(list(after))
    size = len(before)
    weights, *_ = np.linalg.lstsq(before.T, found.T)
    shares = np.asarray(weights.T, dtype=np.float64)  # found = shares @ before
    scale = float(np.abs(before).max())
    if not np.allclose(shares @ before, found, rtol=1e-4, atol=1e-5 * scale):
        return cause(
            "not-the-mean",
            f"the numbers{where} are no sum of the ranks' gradients there. Has another part, or an "
            "older gradient, got into them?",
        )
    mean: Numbers = np.full(size, 1 / size)
    right = [_near(row, mean) for row in shares]
    if all(right):
        return None
    own = np.eye(size)
    keeps_own = [_near(shares[rank], own[rank]) for rank in range(size)]
    if all(keeps_own):
        return cause(
            "own-gradient",
            f"every rank keeps its own gradient{where}. Does the mean reach parameter.grad itself, "
            "or only a copy of it?",
        )
    if all(good or kept for good, kept in zip(right, keeps_own, strict=True)):
        return cause(
            "not-the-mean",
            f"only {_ranks(right)} gets the mean{where}; {_ranks(keeps_own)} keeps its own "
            "gradient. How does the mean come back to every rank?",
        )
    if np.abs(shares - shares[0]).max() < _NEAR:
        return _explain_equal(shares[0], where)
    return cause("not-the-mean", f"{_rows(shares)}{where}, where g0 is rank 0's own gradient")


def _explain_equal(shares: Numbers, where: str) -> str:
    """Say what is wrong with a sum that all ranks get alike. shares : of shape (ranks,)."""
    size = len(shares)
    counted = np.abs(shares) > _NEAR
    rank = int(shares.argmax())
    if counted.sum() == 1 and abs(float(shares[rank]) - 1) < _NEAR:
        return cause(
            "own-gradient", f"every rank ends with rank {rank}'s own{where}. Nothing is averaged"
        )
    if not counted.all():
        left_out = _ranks([not some for some in counted.tolist()])
        return cause(
            "not-the-mean",
            f"the gradient of {left_out} is left out{where}: {_rows(shares[None])}. Does a rank's "
            "own gradient count?",
        )
    if float(shares.max() - shares.min()) > _NEAR:
        most = int(shares.argmax())
        times = float(shares[most] / shares.min())
        return cause(
            "not-the-mean",
            f"rank {most} counts {times:.3g} times as much as others{where}: {_rows(shares[None])}",
        )
    return _explain_multiple(float(shares.sum()), size, where)


def _explain_multiple(times: float, size: int, where: str) -> str:
    """Say what is wrong with a multiple of the mean."""
    on = f"{times:.3f} times the mean on {size} ranks{where}"
    if abs(times - size) < _NEAR * size:
        return cause("sum-not-mean", f"it is the sum, {on}. Divide it by the number of ranks, once")
    if abs(times * size - 1) < _NEAR:
        return cause("averaged-twice", f"{on}. Divide the sum by the number of ranks, once")
    divisor = round(size / times)
    if divisor > 1 and abs(size / times - divisor) < _NEAR * divisor:
        return cause(
            "literal-divisor",
            f"the sum is divided by {divisor}: {on}. Divide it by dist.get_world_size()",
        )
    return cause("not-the-mean", on)


def _near(row: Numbers, wanted: Numbers) -> bool:
    return bool(np.abs(row - wanted).max() < _NEAR)


def _ranks(chosen: Sequence[bool]) -> str:
    """Return the ranks of which it holds, e.g. "rank 1" or "each of ranks 1 and 2"."""
    numbers = [str(rank) for rank, holds in enumerate(chosen) if holds]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"each of ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _rows(shares: Numbers) -> str:
    """Return sums in words, e.g. "rank 0 ends with 1.000 g0 + 0.000 g1"; a single one alone."""
    rows = []
    for rank, row in enumerate(shares.tolist()):
        terms = " + ".join(f"{share:z.3f} g{other}" for other, share in enumerate(row))
        rows.append(terms if len(shares) == 1 else f"rank {rank} ends with {terms}")
    return "; ".join(rows)
