"""Digests of nested values with tensors."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(value: Any) -> str:
    """Return the SHA-256 of nested dicts, lists and plain values with tensors.

    It covers types, shapes and every byte.
    """
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        sha.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        # The entries in their logical order, also of a transposed tensor or one in channels_last
        entries = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        sha.update(entries.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        sha.update(f"dict {len(value)}".encode())
        for key, entry in value.items():
            _feed(sha, key)
            _feed(sha, entry)
    elif isinstance(value, list | tuple):
        sha.update(f"list {len(value)}".encode())
        for entry in value:
            _feed(sha, entry)
    else:
        sha.update(f"{type(value).__name__} {value!r}".encode())
