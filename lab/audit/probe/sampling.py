"""Samples of tensors: the same coordinates on every rank, gathered where the tensor lives."""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .coordinates import coordinates

# The first steps are sampled, then one in some.
_FIRST_STEPS = 64
_ONE_IN = 16
_DEEPEST = 4  # levels of lists, dicts and the like that are searched for tensors


@lru_cache(maxsize=4096)
def _index(numel: int, device: torch.device) -> Tensor:
    """Return the flat coordinates of the samples of a tensor with ``numel`` numbers."""
    return torch.tensor(coordinates(numel), dtype=torch.int64, device=device)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors within lists, tuples, dicts and dataclasses such as ModelOutput.

    depth : how many levels lie above ``value``.
    """
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, dict):
        value = getattr(value, "__dict__", None)
    if isinstance(value, Tensor):
        yield value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        for part in value:
            yield from tensors_in(part, depth + 1)


def take(tensor: Tensor) -> Tensor:
    """Return a copy of the samples of a tensor, in its own dtype and on its own device.

    ``torch.take`` follows any strides without copying the tensor.
    """
    plain = dense(tensor)
    return plain.take(_index(plain.numel(), plain.device))


def is_sampled(step: int) -> bool:
    """Return whether the numbers of a step are sampled, wherever in an epoch it lies."""
    return step < _FIRST_STEPS or step % _ONE_IN == 0


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, such as FSDP2's parameters."""
    return hasattr(tensor, "_local_tensor")


def dense(tensor: Tensor) -> Tensor:
    """Return a detached strided real tensor: of a complex one, the real part."""
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    return plain.real if plain.is_complex() else plain


def square_norm(tensor: Tensor) -> Tensor:
    """Return the sum of the squares of a tensor, a scalar on its device."""
    plain = dense(tensor)
    # 16 bits and integers are added up in float32
    precise = plain.is_floating_point() and plain.dtype not in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(plain, dtype=None if precise else torch.float32)
    return norm * norm


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in float32 where the device has no float64."""
    widest = torch.float32 if tensor.device.type == "mps" else torch.float64
    return tensor.to(widest)


def join(parts: Iterable[Tensor]) -> array[float]:
    """Return all numbers of flat tensors in float64, with one transfer from each device."""
    result: array[float] = array("d")
    for _, on_one_device in groupby(parts, key=lambda part: part.device):
        numbers = torch.cat([part.reshape(-1) for part in on_one_device]).cpu().to(torch.float64)
        # A list of Python's numbers takes a hundred times as long, and NumPy may be missing.
        size = numbers.numel() * numbers.element_size()
        result.frombytes(ctypes.string_at(numbers.data_ptr(), size))
    return result


def checksum(parts: Iterable[Tensor]) -> int:
    """Return the CRC32 of the numbers of flat tensors in float64."""
    return zlib.crc32(join(parts).tobytes())


def total(squares: Sequence[Tensor]) -> float:
    """Return the norm of several tensors together, from the sum of the squares of each."""
    return sum(join(squares)) ** 0.5
