"""The messages that ranks exchange besides gradients: JSON and raw bytes, which cannot run code.

``collectives`` sends them. A plain message is JSON with a schema. A state, e.g. a strategy's
residuals, is JSON with a reference for each tensor, and then all tensors' bytes. Whatever a rank
sends, the receivers' only error is one GroupError that names that rank.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from msgspec import Meta
from torch import Tensor

from common.errors import GroupError, UserError
from common.utils.typed_json import Count, decode

T = TypeVar("T")

MOST_BYTES = 16 * 2**20
"""The longest plain message; the project's own are below 1 MiB."""

_TENSOR = "$tensor"  # the key of a reference to a tensor
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


@dataclass(frozen=True)
class TensorLayout:
    """A tensor's type, e.g. "float32", and shape."""

    dtype: str
    shape: Annotated[list[Count], Meta(max_length=16)]

    @property
    def nbytes(self) -> int:
        """The size of its entries."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class StateHeader:
    """A state without its tensors' bytes. ``plain`` is JSON, in which NaN and infinity stay."""

    plain: str
    tensors: Annotated[list[TensorLayout], Meta(max_length=65_536)]

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(layout.nbytes for layout in self.tensors)


def broken_message(rank: int, what: str) -> GroupError:
    """Return the error for a message of ``rank``; ``what`` follows "rank 1's message"."""
    return GroupError(
        f"rank {rank}'s message{what}. Start every rank with the same version of this project. If "
        f"all have it, another program may have joined as rank {rank}"
    )


def read_message(content: bytes, schema: type[T], *, rank: int) -> T:
    """Return the message of ``rank`` as a ``schema``. Raises GroupError if it does not fit."""
    try:
        return decode(content, schema, name="")
    except UserError as error:
        raise broken_message(rank, str(error)) from error


def pack_state(state: Mapping[str, Any]) -> tuple[StateHeader, Tensor]:
    """Return a state's header and the bytes of its tensors, in one uint8 tensor on the CPU.

    state : tensors and plain values in nested dicts with text keys and lists. Tuples become lists.
    Raises TypeError for anything else.
    """
    tensors: list[Tensor] = []

    def reference(value: Any) -> dict[str, int]:
        if not isinstance(value, Tensor) or _name_of(value) not in _DTYPES:
            raise TypeError(f"a state holds tensors and plain values, not {value!r:.60}")
        tensors.append(value.detach().cpu())
        return {_TENSOR: len(tensors) - 1}

    plain = json.dumps(dict(state), default=reference)
    layouts = [TensorLayout(_name_of(tensor), list(tensor.shape)) for tensor in tensors]
    empty = torch.empty(0, dtype=torch.uint8)
    content = torch.cat([empty, *(tensor.reshape(-1).view(torch.uint8) for tensor in tensors)])
    return StateHeader(plain, layouts), content


def check_header(header: StateHeader, *, rank: int, most_bytes: int) -> None:
    """Raise GroupError unless the tensors of ``rank`` are of known types, and not too large."""
    for layout in header.tensors:
        if layout.dtype not in _DTYPES:
            raise broken_message(
                rank, f" has a tensor of type {layout.dtype!r:.30}, not one of {', '.join(_DTYPES)}"
            )
        # A size of 0 must not hide others that are too large for torch.
        if math.prod(max(1, size) for size in layout.shape) > most_bytes:
            raise broken_message(rank, f" has a tensor of shape {layout.shape}: that is too large")
    if header.nbytes > most_bytes:
        raise broken_message(
            rank, f" has tensors of {header.nbytes:,} bytes; up to {most_bytes:,} are expected"
        )


def unpack_state(header: StateHeader, content: Tensor, *, rank: int) -> dict[str, Any]:
    """Return the state of ``rank`` from its header, checked before, and its tensors' bytes.

    content : uint8 tensor of ``header.nbytes`` entries, on the CPU.
    """
    parts = content.split([layout.nbytes for layout in header.tensors])
    tensors = [
        # A copy: its memory begins where its type requires.
        part.clone().view(_DTYPES[layout.dtype]).view(layout.shape)
        for part, layout in zip(parts, header.tensors, strict=True)
    ]

    def resolve(entries: dict[str, Any]) -> Any:
        return tensors[entries[_TENSOR]] if entries.keys() == {_TENSOR} else entries

    try:
        state = json.loads(header.plain, object_hook=resolve)
        if isinstance(state, dict):
            return state
        found: object = type(state).__name__
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        found = error
    raise broken_message(rank, f": expected a state, got {found}")


def check_alike(states: Sequence[Mapping[str, Any]], mine: Mapping[str, Tensor]) -> None:
    """Raise GroupError unless each rank has tensors of the names, types and shapes of ``mine``.

    Their last dimensions may differ.
    """
    expected = {name: _form(tensor) for name, tensor in mine.items()}
    for rank, state in enumerate(states):
        found = {
            name: _form(value) if isinstance(value, Tensor) else type(value).__name__
            for name, value in state.items()
        }
        if found != expected:
            raise broken_message(rank, f": expected {expected!r:.200}, got {found!r:.200}")


def _form(tensor: Tensor) -> str:
    """Return type and shape without the last size, e.g. "int64 (3, *)"."""
    sizes = [*map(str, tensor.shape[:-1]), *["*"][: tensor.dim()]]
    return f"{_name_of(tensor)} ({', '.join(sizes)})"


def _name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
