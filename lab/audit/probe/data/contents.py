"""Hashes and labels of samples, of what the usual datasets return and hold."""

import zlib
from array import array
from typing import Any

import torch

HASHED = 512  # numbers of a sample
CONTENTS = ("targets", "labels", "tensors", "samples", "data", "images", "y", "x")


def describe_item(item: Any) -> list[Any]:
    """Return [label or None, hash or None] of a sample."""
    parts = list(item.values()) if isinstance(item, dict) else item
    if not isinstance(parts, (list, tuple)):
        parts = [item]
    label = _number(parts[-1]) if len(parts) > 1 else None
    if isinstance(item, dict):
        names = [name for name in ("label", "labels", "target", "targets", "y") if name in item]
        label = _number(item[names[0]]) if names else None
    return [label, next((code for part in parts if (code := _hash(part)) is not None), None)]


def _number(value: Any) -> float | int | None:
    if isinstance(value, (int, float)):
        return value
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        found = value.item() if size == 1 else None
        return found if isinstance(found, (int, float)) else None
    return None


def _hash(value: Any) -> int | None:
    """Return the CRC-32 of up to ``HASHED`` spread numbers of a tensor, an array or an image."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 0 or value.is_sparse:
            return None
        flat = value.detach().reshape(-1)
        some = flat[:: -(-flat.numel() // HASHED)]
        some = torch.view_as_real(some).reshape(-1) if some.is_complex() else some
        return zlib.crc32(array("d", some.double().tolist()).tobytes())
    if hasattr(value, "reshape") and hasattr(value, "tobytes"):
        flat = value.reshape(-1)
        return zlib.crc32(flat[:: max(1, -(-len(flat) // HASHED))].tobytes())
    if hasattr(value, "tobytes"):
        return zlib.crc32(value.tobytes())
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    return zlib.crc32(repr(value[:HASHED]).encode()) if isinstance(value, list) else None


def hash_held(dataset: Any, name: str) -> int | None:
    """Return a hash of spread elements of an attribute; None if it is no sequence."""
    held = getattr(dataset, "__dict__", {}).get(name)
    if isinstance(held, list | tuple) and held and isinstance(held[0], torch.Tensor):
        return _hash(held[-1])  # the targets of a TensorDataset
    if isinstance(held, list) and held:
        return zlib.crc32(repr(held[:: -(-len(held) // HASHED)]).encode())
    return _hash(held)
