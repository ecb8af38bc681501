"""Watches datasets: the index that reaches the innermost one, and a hash of what it returns.

A fetcher (in the script's process or in a loader's worker) asks the dataset for the samples of a
batch. Datasets wrap one another: Subset, random_split, a class of the script. While a batch is
fetched, every ``__getitem__`` notes which others it calls; the innermost call's index counts.
"""

import functools
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import Dataset, Subset, get_worker_info
from torch.utils.data._utils import fetch

from ..state import Probe
from .contents import CONTENTS, describe_item, hash_held

LOADER = "LAB_AUDIT_LOADER"
"""Holds the number of the loader whose workers are being started."""
# Indices of the n-th innermost dataset (of a ConcatDataset) begin at n times this.
SEVERAL = 1 << 40
_PLAIN = (list, tuple, torch.Tensor)
_NO_DATASETS = (list, tuple, dict, set, str, bytes, torch.Tensor, torch.nn.Module, type)


class DatasetCall:
    """A call of ``__getitem__`` (index: int) or ``__getitems__`` (a list), and those within it."""

    def __init__(self, dataset: Any, index: Any) -> None:
        self.dataset, self.index = id(dataset), index
        self.within: list[DatasetCall] = []
        self.contents: list[list[Any]] = []

    def leaves(self) -> "Iterator[tuple[int, Any]]":
        """Yield (id of the dataset, index) of the innermost calls in their order."""
        if self.within:
            for call in self.within:
                yield from call.leaves()
        elif isinstance(self.index, list):
            yield from ((self.dataset, index) for index in self.index)
        else:
            yield self.dataset, self.index


class CurrentFetch(threading.local):
    """What this thread fetches: the loader's number, the outermost calls, and the open one."""

    loader: int | None = None
    calls: list[DatasetCall] | None = None
    open: DatasetCall | None = None


current = CurrentFetch()


def replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that calls ``wrapper(original, *arguments)``."""
    original = getattr(owner, name, None)
    if original is None:  # this version of torch lacks it: the rest goes on without
        return

    @functools.wraps(original)
    def replaced(*arguments: Any, **named: Any) -> Any:
        return wrapper(original, *arguments, **named)

    setattr(owner, name, replaced)


def plain_index(index: Any) -> Any:
    """Return an index as an int if it is one, else as text."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return str(index)[:100]


class ItemWatch:
    """Writes the records ``items``."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.most = 20 * int(probe.settings.get("steps") or 6)
        self.fetched: dict[int, int] = {}
        self.seen: dict[int, dict[int, Any]] = {}
        self.numbers: dict[int, dict[int, int]] = {}
        self.wrapped: WeakSet[type] = WeakSet()
        replace(fetch._MapDatasetFetcher, "fetch", self.fetch)

    def wanted(self, dataset: Any) -> bool:
        """Return whether to record this batch."""
        self.fetched[id(dataset)] = self.fetched.get(id(dataset), 0) + 1
        return self.fetched[id(dataset)] <= self.most

    def fetch(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        """Fetch a batch of a map-style dataset."""
        dataset = fetcher.dataset
        if current.calls is not None or not self.wanted(dataset):
            return original(fetcher, index)
        self.probe.guard(self.prepare)(dataset)
        calls: list[DatasetCall] = []
        current.calls, current.open = calls, None
        try:
            batch = original(fetcher, index)
        finally:
            current.calls = None
        outer = list(index) if hasattr(index, "__iter__") else [index]
        if (rows := self.probe.guard(self.rows)(dataset, outer, calls)) is not None:
            self.record(rows)
            self.seen.setdefault(id(dataset), {}).update((row[0], row[1]) for row in rows)
        return batch

    def record(self, rows: list[list[Any]]) -> None:
        """Write the record ``items``."""
        loader = os.environ.get(LOADER) if get_worker_info() is not None else current.loader
        self.probe.record("items", l=None if loader is None else int(loader), rows=rows)

    def rows(self, dataset: Any, outer: list[Any], calls: list[DatasetCall]) -> list[list[Any]]:
        """Return [outer index, innermost index or None, label, hash] of each sample."""
        plain = [plain_index(index) for index in outer]
        if not calls and isinstance(dataset, _PLAIN):
            return [[index, index, *describe_item(dataset[index])] for index in plain]
        contents = [content for call in calls for content in call.contents]
        if len(calls) == len(outer):
            inner = [next(call.leaves()) for call in calls]
        else:
            inner = [leaf for call in calls for leaf in call.leaves()]
        numbers = self.numbers[id(dataset)]
        innermost = [_innermost(numbers, *leaf) for leaf in inner]
        if len(innermost) != len(outer):
            innermost = [None] * len(outer)
        if len(contents) != len(outer):
            contents = [[None, None]] * len(outer)
        return [[*row, *content] for *row, content in zip(plain, innermost, contents, strict=True)]

    def prepare(self, dataset: Any) -> None:
        """Wrap the classes of a dataset and of those that it wraps, and number the innermost."""
        if id(dataset) in self.numbers:
            return
        numbers = self.numbers[id(dataset)] = {}
        for one, wraps_others in _datasets(dataset):
            if not wraps_others:
                numbers.setdefault(id(one), len(numbers))
            for cls in type(one).__mro__:
                if cls not in self.wrapped and cls not in (object, Dataset):
                    self.wrapped.add(cls)
                    _wrap_class(cls)

    def inner_indices(self, dataset: Any, outer: list[Any]) -> list[Any] | None:
        """Return the innermost index of each outer one as the lists of Subsets have it, or None.

        The lists of other classes count if this process has seen them agree with what was fetched.
        """
        listed, trusted = _listed_indices(dataset)
        seen = self.seen.get(id(dataset), {})
        if not listed or not (trusted or seen):
            return None
        try:
            if any(listed_index(listed, index) != inner for index, inner in seen.items()):
                return None
            return [listed_index(listed, index) for index in outer]
        except (IndexError, TypeError):
            return None


def listed_index(listed: list[Any], index: Any) -> Any:
    """Return the index that a chain of lists makes of an outer one."""
    for indices in listed:
        index = int(indices[index])
    return index


def _listed_indices(dataset: Any) -> tuple[list[Any], bool]:
    """Return the lists of indices from a dataset down to the innermost, and if all are Subset's.

    A dataset that wraps another without such a list is taken to keep the index.
    """
    listed: list[Any] = []
    trusted = True
    for _ in range(10):
        within = [one for one in _attributes(dataset) if _is_dataset(one)]
        if not within:
            return listed, trusted
        if len({id(one) for one in within}) > 1:
            break
        lists = [getattr(dataset, name, None) for name in ("indices", "index", "idxs", "indexes")]
        found = [one for one in lists if hasattr(one, "__getitem__") and hasattr(one, "__len__")]
        trusted = trusted and type(dataset) is Subset
        listed.extend(found[:1])
        dataset = within[0]
    return [], False


def describe_innermost(dataset: Any) -> dict[str, Any]:
    """Return the length and a hash of the contents of the innermost datasets."""
    innermost = [one for one, wraps_others in _datasets(dataset) if not wraps_others]
    codes = [code for one in innermost for name in CONTENTS if (code := hash_held(one, name))]
    lengths = [len(one) for one in innermost if hasattr(one, "__len__")]
    return {
        "inner_length": sum(lengths) if len(lengths) == len(innermost) else None,
        "content": zlib.crc32(repr(codes).encode()) if codes else None,
    }


def _innermost(numbers: dict[int, int], dataset: int, index: Any) -> Any:
    """Return the index, shifted by the dataset's number; None if others should lie within it."""
    if dataset not in numbers:
        return None
    plain = plain_index(index)
    return plain + SEVERAL * numbers[dataset] if isinstance(plain, int) else plain


def _datasets(dataset: Any) -> Iterator[tuple[Any, bool]]:
    """Yield a dataset and those that it reaches by its attributes, and whether it wraps others."""
    seen: set[int] = set()

    def walk(one: Any, depth: int) -> Iterator[tuple[Any, bool]]:
        seen.add(id(one))
        within = [other for other in _attributes(one) if _is_dataset(other)]
        yield one, bool(within)
        for other in within:
            if id(other) not in seen and depth < 10:
                yield from walk(other, depth + 1)

    if _is_dataset(dataset):
        yield from walk(dataset, 0)


def _attributes(one: Any) -> Iterator[Any]:
    for value in list(getattr(one, "__dict__", {}).values()):
        if isinstance(value, (list, tuple)) and len(value) <= 1000:
            yield from value
        elif isinstance(value, dict) and len(value) <= 1000:
            yield from value.values()
        else:
            yield value


def _is_dataset(one: Any) -> bool:
    """Return whether an object is a Dataset, or of a Python class that acts as one."""
    if isinstance(one, Dataset):
        return True
    cls = type(one)
    if isinstance(one, _NO_DATASETS) or not hasattr(cls, "__getitem__"):
        return False
    top = cls.__module__.partition(".")[0]
    known = top in sys.stdlib_module_names or top in ("numpy", "torch", "pandas", "h5py", "PIL")
    return not known and hasattr(cls, "__len__") and bool(cls.__flags__ & (1 << 9))  # a heap type


def _wrap_class(cls: type) -> None:
    for name in ("__getitem__", "__getitems__"):
        if callable(original := cls.__dict__.get(name)) and cls.__flags__ & (1 << 9):
            setattr(cls, name, _noting(original, several=name == "__getitems__"))


def _noting(original: Callable[..., Any], *, several: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(self: Any, index: Any, *rest: Any, **named: Any) -> Any:
        if current.calls is None:
            return original(self, index, *rest, **named)
        before = current.open
        call = DatasetCall(self, list(index) if several else index)
        (current.calls if before is None else before.within).append(call)
        current.open = call
        try:
            item = original(self, index, *rest, **named)
        finally:
            current.open = before
        if before is None:
            call.contents = (
                [describe_item(one) for one in item] if several else [describe_item(item)]
            )
        return item

    return noting
