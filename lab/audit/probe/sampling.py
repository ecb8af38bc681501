"""Samples of tensors: the same coordinates on every rank, gathered where the tensor lives."""

import ctypes
import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .coordinates import coordinates


@lru_cache(maxsize=4096)
def index(numel: int, device: torch.device, first: int = 0, length: int | None = None) -> Tensor:
    """Return the kept coordinates of a flat parameter that lie in [first, first + length).

    Returns
    -------
    Tensor of shape (at most 512,), int64: counted from ``first``.
    """
    end = numel if length is None else first + length
    kept = [one - first for one in coordinates(numel) if first <= one < end]
    return torch.tensor(kept, dtype=torch.int64, device=device)


def take(tensor: Tensor, where: Tensor | None = None) -> Tensor:
    """Return a copy of the samples of a tensor, in its own dtype and on its own device.

    ``where`` holds flat coordinates, in logical order; without it ``coordinates`` of the
    tensor's size. ``torch.take`` follows any strides without copying the tensor.
    """
    with torch.no_grad():
        plain = dense(tensor)
        if where is None:
            where = index(plain.numel(), plain.device)
        return plain.take(where)


def dense(tensor: Tensor) -> Tensor:
    """Return a detached strided real tensor: of a complex one, the real part."""
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    return plain.real if plain.is_complex() else plain


def square_norm(tensor: Tensor) -> Tensor:
    """Return the sum of the squares of a tensor, a scalar on its device."""
    with torch.no_grad():
        plain = dense(tensor)
        small = plain.dtype in (torch.float16, torch.bfloat16) or not plain.is_floating_point()
        norm = torch.linalg.vector_norm(plain, dtype=torch.float32 if small else None)
        return norm * norm


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in float32 where the device has no float64."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def join(parts: Iterable[Tensor]) -> "array[float]":
    """Return all numbers of flat tensors in float64, with one transfer from each device."""
    found = [part.reshape(-1) for part in parts]
    result: array[float] = array("d")
    for run in _same_device(found):
        numbers = torch.cat(run).cpu().to(torch.float64).contiguous()
        result.frombytes(ctypes.string_at(numbers.data_ptr(), numbers.numel() * 8))
    return result


def _same_device(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split the tensors, in order, into runs that lie on one device."""
    runs: list[list[Tensor]] = []
    for part in parts:
        if runs and runs[-1][0].device == part.device:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def checksum(parts: Iterable[Tensor]) -> int:
    """Return the CRC32 of the numbers of flat tensors in float64."""
    return zlib.crc32(join(parts).tobytes())


def total(squares: Sequence[Tensor]) -> float:
    """Return the norm that belongs to sums of squares."""
    return sum(join(squares)) ** 0.5
