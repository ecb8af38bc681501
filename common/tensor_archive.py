"""Read a file of ``torch.save`` that nobody vouches for: tensors and plain values, and no more.

``torch.load(weights_only=True)`` runs no foreign code, but a file of 2 kB can make it, or what
follows, take gigabytes and minutes: compressed members, calls such as ``bytearray(10**11)``,
tensors of stride 0, nested tuples as keys. So this module reads the pickle itself. It accepts only
what ``torch.save`` writes for tensors, dicts, lists and plain values, and limits their amount.
"""

import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_PICKLED_BYTES = 2**24
_MOST_VALUES = 2_000_000  # a checkpoint of VGG-11 has 3,000
_MOST_DEPTH = 50
_MOST_KEY = 2**31
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_LITERALS = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")


def read_archive(content: bytes) -> Any:
    """Return what ``torch.save`` wrote; its tensors are copies, on the CPU.

    Takes the memory of the tensors, which is at most ``len(content)``, and at most 300 MB for all
    else. Raises pickle.UnpicklingError if it holds more than tensors and plain values, and another
    exception of any kind if it is damaged.
    """
    records = _records(content)
    folder = _folder(list(records))
    if bytes(records.get(f"{folder}byteorder", b"little")) != b"little":
        raise ValueError("it was written on a machine with another byte order")
    value = _Unpickler(records, folder).load(bytes(records[f"{folder}data.pkl"]))
    _check_amount(value, most_bytes=2 * len(content) + 2**20)
    return value


def read_plain_values(path: Path) -> Any:
    """Return what ``torch.save`` wrote, with None for each tensor; reads only a little of the file.

    Nothing is verified. Raises as ``read_archive``.
    """
    with zipfile.ZipFile(path) as archive:
        folder = _folder(archive.namelist())
        member = archive.getinfo(f"{folder}data.pkl")
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed")
        with archive.open(member) as file:
            value = _PlainUnpickler({}, folder).load(file.read(_MOST_PICKLED_BYTES + 1))
    _check_amount(value, most_bytes=_MOST_PICKLED_BYTES)
    return value


def _folder(names: list[str]) -> str:
    """Return the folder within the archive, e.g. "archive/"."""
    return next(name for name in names if name.endswith("/data.pkl")).removesuffix("data.pkl")


def _records(content: bytes) -> dict[str, memoryview]:
    """Return the files of a zip archive by name, without a copy; their CRC-32 is right."""
    view = memoryview(content)
    records: dict[str, memoryview] = {}
    with zipfile.ZipFile(BytesIO(content)) as archive:
        members = archive.infolist()
    if sum(member.file_size for member in members) > len(content):
        raise ValueError("its parts overlap or are compressed")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.filename in records:
            raise ValueError(f"its part {member.filename[:40]!r} is compressed or there twice")
        signature, *lengths = _LOCAL_HEADER.unpack_from(content, member.header_offset)
        begin = member.header_offset + _LOCAL_HEADER.size + sum(lengths)
        record = view[begin : begin + member.file_size]
        if signature != b"PK\x03\x04" or zlib.crc32(record) != member.CRC:
            raise ValueError(f"the CRC-32 of {member.filename[:40]!r} is wrong")
        records[member.filename] = record
    return records


@dataclass(frozen=True)
class _Global:
    """A class or function that the pickle names, which is not imported."""

    name: str


class _Unpickler:
    """Runs the instructions that ``torch.save`` uses, on a stack of values."""

    def __init__(self, records: dict[str, memoryview], folder: str) -> None:
        self._records, self._folder = records, folder
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self, pickled: bytes) -> Any:
        if len(pickled) > _MOST_PICKLED_BYTES:
            raise ValueError(f"its names and plain values take {len(pickled):,} bytes")
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if count > _MOST_VALUES:
                raise ValueError(f"it has more than {_MOST_VALUES:,} values")
            self._run(opcode.name, argument)
        return self._stack.pop()

    def _run(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "STOP":
                pass
            case _ if name in _LITERALS:
                stack.append(argument)
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._pop(to_mark=True)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(int(name[-1]))))
            case "APPEND" | "APPENDS":
                values = self._pop(1, to_mark=name == "APPENDS")
                _expect(stack[-1], list).extend(values)
            case "SETITEM" | "SETITEMS":
                values = self._pop(2, to_mark=name == "SETITEMS")
                target = _expect(stack[-1], dict)
                for key, value in zip(values[::2], values[1::2], strict=True):
                    target[_checked_key(key)] = value
            case "GLOBAL":
                stack.append(_Global(argument))
            case "BINPERSID":
                stack.append(self._storage(*_expect(stack.pop(), tuple)))
            case "REDUCE":
                function, arguments = self._pop(2)
                stack.append(self._call(_expect(function, _Global).name, arguments))
            case "BUILD":  # attributes of a state dict, which it does not need
                stack.pop()
                _expect(stack[-1], OrderedDict)
            case _:
                raise pickle.UnpicklingError(f"it has an instruction {name}")

    def _pop(self, count: int = 0, *, to_mark: bool = False) -> list[Any]:
        begin = self._marks.pop() if to_mark else len(self._stack) - count
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    def _storage(
        self, kind: str, storage: _Global, key: str, _device: str, numel: int
    ) -> tuple[torch.UntypedStorage, torch.dtype]:
        """Return a copy of a record and the type of its entries."""
        dtype = _DTYPES[_expect(storage, _Global).name.removeprefix("torch ")]
        record = self._records[f"{self._folder}data/{key}"]
        if kind != "storage" or numel * dtype.itemsize != len(record):
            raise ValueError(f"data/{key} has {len(record)} bytes, not {numel} entries of {dtype}")
        if key not in self._storages:
            copy = torch.empty(len(record), dtype=torch.uint8)
            copy.numpy()[:] = np.frombuffer(record, np.uint8)
            self._storages[key] = copy.untyped_storage()
        return self._storages[key], dtype

    def _call(self, name: str, arguments: Any) -> Any:
        match name, arguments:
            case "collections OrderedDict", ():
                return OrderedDict()
            case "collections Counter", (dict() as counts,):
                return Counter(counts)
            case "torch Size", (tuple() as size,):
                return size
            case "torch._utils _rebuild_tensor_v2", (of_storage, offset, size, stride, *_):
                storage, dtype = _expect(of_storage, tuple)
                return _tensor(storage, dtype, offset, size, stride)
            case "torch._utils _rebuild_parameter", (Tensor() as tensor, *_):
                return tensor
        raise pickle.UnpicklingError(f"it calls {name}")


class _PlainUnpickler(_Unpickler):
    """Skips the tensors."""

    def _storage(self, *_: Any) -> Any:
        return None

    def _call(self, name: str, arguments: Any) -> Any:
        return None if name.startswith("torch._utils ") else super()._call(name, arguments)


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: Any, stride: Any
) -> Tensor:
    """Return a view of a storage. ValueError if it reaches beyond it, or is larger than it."""
    if min(offset, *size, *stride, 0) < 0 or len(size) != len(stride):
        raise ValueError(f"a tensor has offset {offset}, shape {size} and strides {stride}")
    entries = storage.nbytes() // dtype.itemsize
    numel = prod(size)
    end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if numel and (numel > entries or end > entries):
        raise ValueError(f"a tensor of shape {size} is larger than its data")
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise pickle.UnpicklingError(f"it has a {type(value).__name__} in place of a {kind}")
    return value


def _checked_key(key: Any) -> Any:
    # A tuple that contains itself twice, that one again twice, and so on, takes hours to hash.
    if isinstance(key, str) or (isinstance(key, int) and abs(key) < _MOST_KEY):
        return key
    raise pickle.UnpicklingError(f"it has a {type(key).__name__} as a name")


def _check_amount(value: Any, *, most_bytes: int) -> None:
    """Raise if nested values have too much depth or data, where shared ones count every time."""
    data_bytes = count = 0
    waiting = [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if isinstance(value, Tensor):
            data_bytes += value.nbytes
        elif isinstance(value, str):
            data_bytes += len(value)
        elif isinstance(value, dict | list | tuple):
            inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            count += len(inner)
            waiting += [(one, depth + 1) for one in inner]
        elif not isinstance(value, int | float | None):
            raise pickle.UnpicklingError(f"it has a {type(value).__name__}")
        if depth > _MOST_DEPTH or data_bytes > most_bytes or count > _MOST_VALUES:
            raise ValueError("its values are nested too deeply, or repeated too often")
