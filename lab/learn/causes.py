"""Say why an averaging is wrong, from what each rank's gradient is made of.

``shares_of`` writes what a rank ended with as a sum of all ranks' own gradients; ``cause_of`` names
the mistake that such sums show, with the audit's name for it and the audit's advice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.say import listed, ranks_text
from lab.audit.findings.finding import catalogue

_TOLERANCE = 1e-4
MEAN_IN_A_COPY = "the mean never reaches parameter.grad: nothing brings it back, or a copy gets it"


def told(finding: str, sentence: str, evidence: str, cure: str | None = None) -> str:
    """Return a cause in one sentence, its evidence, and the audit's advice and name for it.

    cure : what to do, if that is not what the audit's catalogue says.
    """
    advice = cure or catalogue()[finding].cure
    return f"{sentence}: {evidence}. {advice} (lab audit calls this {finding}.)"


def shares_of(found: Tensor, given: Tensor) -> Tensor | None:
    """Return how much of each given gradient is in ``found``; None if it is no sum of them.

    found : of shape (n,). given : of shape (gradients, n). The result: of shape (gradients,).
    """
    found = found.double()
    given = given.double()
    shares = torch.linalg.lstsq(given @ given.T, given @ found).solution
    apart = (shares @ given - found).norm()
    scale = found.norm() + (shares.abs() @ given.norm(dim=1))
    return None if apart > _TOLERANCE * scale else shares


@dataclass(frozen=True)
class GradientPart:
    """A part of the gradients on all ranks.

    name : as a message calls it, e.g. "0.weight".
    rows : by rank what it ended with: ``shares_of`` the ranks' own gradients.
    """

    name: str
    rows: Sequence[Tensor | None]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def matrix(self) -> Tensor:
        """The shares, of shape (ranks, ranks); NaN in the rows of ranks that hold no such sum."""
        unknown = torch.full((self.size,), torch.nan, dtype=torch.float64)
        return torch.stack([unknown if row is None else row for row in self.rows])

    @property
    def right(self) -> bool:
        """Whether every rank holds the mean."""
        return _close(self.matrix, torch.full((self.size, self.size), 1 / self.size))

    def evidence(self) -> str:
        """Return what the first rank that does not hold the mean ended with."""
        for rank, row in enumerate(self.rows):
            if row is None:
                return (
                    f"rank {rank} ends with numbers in {self.name} that are no sum of the ranks' "
                    "gradients there"
                )
            if not _close(row, torch.full((self.size,), 1 / self.size)):
                return f"rank {rank} ends with {_sum_of(row)} in {self.name}"
        raise AssertionError("this part is right")


def parts_of(after: Tensor, before: Tensor, lengths: Mapping[str, int]) -> list[GradientPart]:
    """Return the parts of gradients.

    after, before : what each rank ended with and its own gradient, both of shape (ranks, n).
    lengths : of the consecutive parts, by name.
    """
    widths = list(lengths.values())
    split_after = after.split(widths, dim=1)
    split_before = before.split(widths, dim=1)
    parts: list[GradientPart] = []
    for name, found, given in zip(lengths, split_after, split_before, strict=True):
        parts.append(GradientPart(name, [shares_of(row, given) for row in found]))
    return parts


def cause_of(parts: Sequence[GradientPart], *, exchanged: bool = True) -> str | None:
    """Return what is wrong with gradients that should be the mean; None if nothing is.

    exchanged : whether the ranks sent each other anything.
    """
    wrong = [part for part in parts if not part.right]
    if not wrong:
        return None
    part = wrong[0]
    keep_own = all(bool(_own_alone(other.matrix).all()) for other in wrong)
    if len(wrong) < len(parts) and keep_own:
        names = listed(other.name for other in wrong)
        sentence = f"only some parameters are averaged; left out: {names}"
        return told("some-parameters", sentence, part.evidence())
    return _cause_of_part(part, exchanged=exchanged)


def _cause_of_part(part: GradientPart, *, exchanged: bool) -> str:
    """Return what is wrong with a part."""
    size = part.size
    matrix = part.matrix
    if matrix.isnan().any():
        return told(
            "not-the-mean",
            "another part has got into a gradient, or not only gradients",
            part.evidence(),
        )
    if _close(matrix, matrix[0, 0].expand(size, size)):
        return _wrong_factor(part, float(matrix[0].sum()))
    own = _own_alone(matrix)
    if own.all():
        return _own_gradient(part, exchanged=exchanged)
    means = [_close(row, torch.full((size,), 1 / size)) for row in matrix]
    if any(means):
        having = ranks_text(rank for rank in range(size) if means[rank])
        return told("own-gradient", f"the mean comes to {having} only", part.evidence())
    if _close(matrix, matrix[0].expand(size, size)):
        return _unequal_weights(part, matrix[0])
    if _close(matrix.diagonal(), torch.zeros(size)) and not _one_gradient(matrix).all():
        return told(
            "not-the-mean", "each rank leaves its own gradient out of the sum", part.evidence()
        )
    if _one_gradient(matrix).all():
        return told(
            "not-the-mean",
            "each rank gets one rank's gradient, and nothing is added up",
            part.evidence(),
        )
    return told(
        "not-the-mean", f"the ranks' gradients count unequally, not 1/{size} each", part.evidence()
    )


def _wrong_factor(part: GradientPart, times: float) -> str:
    """Return the cause if all ranks hold a multiple of the mean."""
    size = part.size
    evidence = f"rank 0 ends with {times:.3f} times the mean on {size} ranks, in {part.name}"
    divisor = size / times if times else 0.0
    if abs(times) < _TOLERANCE:
        return told("not-the-mean", "the gradients are zero after the averaging", evidence)
    if abs(divisor - 1) < _TOLERANCE:
        evidence = (
            f"rank 0 ends with the sum, {times:.3f} times the mean on {size} ranks, in {part.name}"
        )
        return told("sum-not-mean", "the gradients are added up and never divided", evidence)
    if abs(divisor - size**2) < _TOLERANCE * size:
        return told("averaged-twice", f"the sum is divided by {size} twice", evidence)
    if abs(divisor - round(divisor)) < _TOLERANCE * size:
        sentence = f"the sum is divided by {round(divisor)}, not by the number of ranks"
        return told("literal-divisor", sentence, evidence)
    return told("not-the-mean", "every gradient is multiplied by a wrong number", evidence)


def _own_gradient(part: GradientPart, *, exchanged: bool) -> str:
    """Return the cause if each rank ends with its own gradient."""
    if not exchanged:
        return told("group-unused", "the ranks exchange nothing", part.evidence())
    return told("own-gradient", MEAN_IN_A_COPY, part.evidence())


def _unequal_weights(part: GradientPart, weights: Tensor) -> str:
    """Return the cause if all ranks hold one sum in which the gradients do not count alike."""
    size = part.size
    usual = float(weights.median())
    if _close(weights.sort().values[:-1], torch.zeros(size - 1)):
        rank = int(weights.argmax())
        return told("own-gradient", f"every rank gets rank {rank}'s gradient", part.evidence())
    if size == 2:
        usual = float(weights.min())
    odd = [rank for rank in range(size) if abs(float(weights[rank]) - usual) > _TOLERANCE]
    rank = odd[0]
    ratio = float(weights[rank]) / usual
    sentence = f"rank {rank}'s gradient counts {ratio:.3g} times as much as the others'"
    if abs(ratio) < _TOLERANCE:
        sentence = f"rank {rank}'s own gradient is missing from the sum"
    elif abs(ratio - 2) < _TOLERANCE:
        sentence = f"rank {rank}'s gradient is counted twice"
    return told("not-the-mean", sentence, part.evidence(), "Count each rank's gradient once.")


def _own_alone(matrix: Tensor) -> Tensor:
    """Return for each rank whether it holds a multiple of its own gradient."""
    others = matrix - torch.diag(matrix.diagonal())
    return others.abs().amax(dim=1) < _TOLERANCE


def _one_gradient(matrix: Tensor) -> Tensor:
    """Return for each rank whether it holds a multiple of one rank's gradient."""
    return (matrix.abs() > _TOLERANCE).sum(dim=1) <= 1


def _close(found: Tensor, right: Tensor) -> bool:
    return bool(((found - right).abs() < _TOLERANCE).all())


def _sum_of(shares: Tensor) -> str:
    """Return a sum such as "1.000 g0 + 0.000 g1", and what g0 is."""
    told = " + ".join(f"{share:z.3f} g{rank}" for rank, share in enumerate(shares.tolist()))
    size = len(shares)
    return f"{told} (g0 is rank 0's own gradient; right is {1 / size:.3f} of each)"
