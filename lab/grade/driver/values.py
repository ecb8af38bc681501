"""What a rank returns, as JSON: tensors in 32 bits, messages, plain values, dicts and lists."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from .checks import Message


def encoded(value: Any) -> list[Any]:
    """Return a value as what json can write: its kind, then what it holds."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    if isinstance(value, torch.Tensor):
        flat = value.detach().to("cpu", torch.float32).reshape(-1).contiguous()
        content = bytes(flat.view(torch.uint8).tolist())  # numpy may be missing
        return ["tensor", list(value.shape), base64.b64encode(content).decode()]
    if isinstance(value, Message):
        return ["message", asdict(value)]
    if isinstance(value, Mapping):
        return ["dict", [[str(key), encoded(entry)] for key, entry in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["list", [encoded(entry) for entry in value]]
    raise TypeError(f"a check returned a {type(value).__name__}: return tensors and plain values")
