"""Which numbers of a tensor the probe keeps: the same ones on every rank."""

from __future__ import annotations

COORDINATES = 512
_GOLDEN = 0.6180339887498949


def coordinates(numel: int) -> list[int]:
    """Return the flat coordinates of a parameter that the probe keeps: the same on every rank.

    All up to ``COORDINATES``, else that many, spread by the golden ratio so that no column or
    channel is favoured.
    """
    if numel <= COORDINATES:
        return list(range(numel))
    fractions = [index * _GOLDEN % 1.0 for index in range(COORDINATES)]
    return [int(fraction * numel) for fraction in fractions]
