"""Watches DataLoaders: which samples a script is given, in which order, and for what.

A sample is known by its index in the innermost dataset: Subsets, ConcatDatasets and a script's own
partitions are looked through. Whether that is the same sample on two ranks is told by what the
innermost datasets hold (``content`` of the record ``loader``) or, if they hold nothing that tells,
by the rows of the batches (``contents`` of the record ``batch``). Augmentation changes the rows.

``LoaderWatch`` sees epochs and batches in the script's process; what workers do is not watched.
Before each batch ``stopping`` is asked; it ends the epoch by StopIteration or SystemExit.
"""

from __future__ import annotations

import functools
import operator
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    dataloader,
    get_worker_info,
)

from .state import Probe, patch

# Indices of the n-th innermost dataset (of a ConcatDataset) begin at n times this.
SEVERAL = 1 << 40
LONGEST_REST = 5_000_000  # indices; a sampler that gives more may be endless
HASHED = 64  # numbers of a tensor, and samples of a dataset
_NOBODYS = ("builtins", "collections", "multiprocessing", "numpy", "torch", "pandas", "h5py", "PIL")


# What batches and datasets hold


def contents_of(batch: Any, count: int) -> list[int] | None:
    """Return a CRC-32 of each sample of a batch; None if its tensors have no row for each."""
    parts, _ = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [
        one
        for one in parts
        if isinstance(one, torch.Tensor)
        and one.layout == torch.strided
        and not (one.is_nested or one.is_complex())
        and one.numel()
        and one.dim()
        and len(one) == count
    ]
    texts = [repr([_plain(value) for value in row]) for row in zip(*tensors)]
    return [zlib.crc32(text.encode()) for text in texts] or None


def _spread(values: Any) -> Any:
    return values[:: max(1, -(-len(values) // HASHED))]


def held_content(dataset: Any) -> int | None:
    """Return a hash of what a dataset holds of some of its samples.

    None if that does not tell which samples these are: single labels and file names that may be
    those of several folders do not, nor do samples of which most are equal.
    """
    length = len(dataset)
    try:
        held = [one for one in _attributes(dataset) if _is_sequence(one, length)]
        some = _spread(range(length))
        rows = [[getattr(one, "iloc", one)[index] for one in held] for index in some]
        texts = [repr([_plain(value) for value in row]) for row in rows]
    except Exception:  # the script's attributes may be of any class
        return None
    tells = any(_tells(value) for row in rows[:1] for value in row)
    if not tells or len(set(texts)) * 2 < len(texts) or " at 0x" in texts[0]:
        return None
    return zlib.crc32(repr(texts).encode(errors="replace"))


def _is_sequence(value: Any, length: int) -> bool:
    listed = isinstance(value, (list, tuple, range))
    shape = (len(value),) if listed else getattr(value, "shape", ())
    return bool(shape[:1] == (length,))


def _plain(value: Any) -> Any:
    """Return an element of a tensor, an array or a list as what repr() shows in full."""
    if isinstance(value, torch.Tensor):
        return _spread(value.detach().reshape(-1)).tolist()
    return value.tobytes() if hasattr(value, "tobytes") else value


def _tells(value: Any) -> bool:
    """Return whether an element of a list is, or contains, an array, an image or a file's name."""
    return any(
        os.path.exists(part)
        if isinstance(part, str)
        else bool(getattr(part, "shape", getattr(part, "size", None)))
        for part in (value if isinstance(value, (list, tuple)) else [value])
    )


def _attributes(one: Any) -> Iterator[Any]:
    """Yield what an object holds as attributes, and what short lists and dicts among them hold."""
    for value in list(getattr(one, "__dict__", {}).values()):
        yield value
        if isinstance(value, (list, tuple, dict)) and len(value) <= 1000:
            yield from list(value.values()) if isinstance(value, dict) else value


# Datasets that wrap others


def look_through(dataset: Any) -> tuple[list[Any], Sequence[int] | None]:
    """Return the innermost datasets, and the index within these of each sample, all different.

    The indices are None if they are not known. They are read from what the wrapping datasets hold.
    These are not asked for a sample: they may count their samples, or draw random numbers.
    """
    innermost: dict[int, Any] = {}
    try:
        indices = _read_indices(dataset, innermost)
    except Exception:  # the script's own class does what it likes
        indices = None
    known = indices is not None and len(set(indices)) == len(indices)
    return list(innermost.values()), indices if known else None


def _read_indices(dataset: Any, innermost: dict[int, Any]) -> Sequence[int] | None:
    """Return the innermost indices: of the only dataset within, at the only list of numbers.

    Without such a list, as in a dataset that transforms another one, both have equally many.
    ``innermost`` gets the datasets that wrap no others, by id.
    """
    length, held = len(dataset), list(_attributes(dataset))
    within = [one for one in held if one is not dataset and _is_dataset(one)]
    if not within:
        innermost[id(dataset)] = dataset
        first = list(innermost).index(id(dataset)) * SEVERAL
        return range(first, first + length)
    parts = [_read_indices(one, innermost) for one in within]
    if isinstance(dataset, ConcatDataset):
        return None if None in parts else [index for part in parts for index in part or ()]
    (inner,) = parts
    lists = [one for one in vars(dataset).values() if _is_index_list(one, length)]
    if inner is None or len(lists) > 1:
        return None
    if lists:
        return [inner[int(index)] for index in lists[0]]
    return inner if len(inner) == length else None


def _is_dataset(one: Any) -> bool:
    """Return whether an object is a Dataset, or of a Python class that acts as one."""
    methods = [getattr(type(one), name, None) for name in ("__getitem__", "__len__")]
    other = isinstance(one, Mapping) or type(one).__module__.split(".")[0] in _NOBODYS
    acts = not other and all(isinstance(method, FunctionType) for method in methods)
    return acts or isinstance(one, Dataset)


def _is_index_list(value: Any, length: int) -> bool:
    try:
        return _is_sequence(value, length) and operator.index(value[0]) >= 0
    except TypeError:
        return False


# Loaders: epochs and batches


@dataclass(eq=False)
class WatchedLoader:
    """A DataLoader, or several alike that a script builds one after another, as for each epoch.

    epochs : the iterations over it so far.
    """

    number: int
    facts: dict[str, Any]
    epochs: list[WatchedEpoch] = field(default_factory=list)


@dataclass(eq=False)
class WatchedEpoch:
    """One iteration over a loader.

    names : what its records call it.
    inner : the innermost index of each sample, if that is another and known.
    queue : the indices that the sampler has given ahead of the batches.
    given : its batches.
    over : it has ended, or was ended.
    trains : a backward or an update followed one of its batches.
    """

    loader: WatchedLoader
    names: dict[str, int]
    inner: Sequence[int] | None
    queue: list[list[Any]] = field(default_factory=list)
    given: int = 0
    over: bool = False
    trains: bool = False

    def find_inner(self, indices: list[Any] | None) -> list[int] | None:
        """Return the innermost indices of some samples, if they are others."""
        if self.inner is None or not all(isinstance(index, int) for index in indices or ()):
            return None
        return [self.inner[index] for index in indices or ()]


class LoaderWatch:
    """Writes the records of all loaders of this process.

    fresh : the epochs that gave a batch since the last backward, the newest last. Those of other
        loaders are no longer fresh after a forward without gradients.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.known: list[WatchedLoader] = []
        self.loaders: WeakKeyDictionary[Any, WatchedLoader] = WeakKeyDictionary()
        self.epochs: WeakKeyDictionary[Any, WatchedEpoch] = WeakKeyDictionary()  # by iterator
        self.fresh: list[WatchedEpoch] = []
        patch(dataloader._BaseDataLoaderIter, "__init__", self.begin)
        patch(dataloader._BaseDataLoaderIter, "_reset", self.begin)
        patch(dataloader._BaseDataLoaderIter, "__next__", self.give)
        patch(dataloader._BaseDataLoaderIter, "_next_index", self.take_indices)
        probe.listeners.append(self)

    def begin(self, original: Any, iterator: Any, loader: DataLoader[Any], *first: bool) -> None:
        """See an iterator begin: a new one, or with persistent workers the loader's only one."""
        if get_worker_info() is None and not any(first):
            self.probe.guard(self.begin_epoch)(iterator, loader)
        original(iterator, loader, *first)

    def begin_epoch(self, iterator: Any, loader: DataLoader[Any]) -> None:
        """Begin an epoch; a new loader may follow one that was thrown away."""
        if loader not in self.loaders:
            facts = {**_describe(loader), "at": self.probe.place()}
            alive = list(self.loaders.values())
            alike = [one for one in self.known if one.facts == facts and one not in alive]
            if not alike:
                alike = [WatchedLoader(len(self.known), facts)]
                self.known += alike
                self.probe.record("loader", l=alike[0].number, **facts)
            self.loaders[loader] = alike[0]
        watched, (_, inner) = self.loaders[loader], look_through(loader.dataset)
        others = None if isinstance(inner, range) else inner
        names = {"l": watched.number, "epoch": len(watched.epochs)}
        self.epochs[iterator] = epoch = WatchedEpoch(watched, names, others)
        watched.epochs.append(epoch)

    def give(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Give the script a batch, and record which."""
        epoch, cut = self.epochs.get(iterator), True
        if epoch is None:
            return original(iterator)
        try:
            self.probe.tell("batch_begin", epoch)
            cut = False
            batch = original(iterator)
        except (StopIteration, SystemExit):
            if not epoch.over:
                epoch.over = True
                self.probe.guard(self.end)(epoch, iterator, cut=cut)
            raise
        self.probe.guard(self.record_batch)(epoch, iterator, batch)
        return batch

    def record_batch(self, epoch: WatchedEpoch, iterator: Any, batch: Any) -> None:
        """Write the record ``batch``."""
        indices = contents = None
        if epoch.queue and getattr(iterator, "_in_order", True):
            indices = epoch.queue.pop(0)
            contents = self.probe.guard(contents_of)(batch, len(indices))
        self.probe.record(
            "batch",
            **epoch.names,
            b=epoch.given,
            indices=indices,
            inner=epoch.find_inner(indices),
            contents=contents,
        )
        epoch.given += 1
        self.fresh = [one for one in self.fresh if one.loader is not epoch.loader] + [epoch]

    def end(self, epoch: WatchedEpoch, iterator: Any, *, cut: bool) -> None:
        """Write the record ``epoch`` and, if it trains and was cut, ``rest`` unless endless."""
        self.probe.record("epoch", **epoch.names, batches=epoch.given, cut=cut)
        if cut and epoch.trains and not isinstance(iterator._dataset, IterableDataset):
            more = (index for batch in iterator._sampler_iter for index in plain_indices(batch))
            rest = [*chain(*epoch.queue), *islice(more, LONGEST_REST)]
            if len(rest) < LONGEST_REST:
                self.probe.record("rest", **epoch.names, indices=rest, inner=epoch.find_inner(rest))

    def take_indices(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Remember the indices of a batch, in the order in which the sampler gives them."""
        indices, epoch = original(iterator), self.epochs.get(iterator)
        if epoch is not None and not isinstance(iterator._dataset, IterableDataset):
            epoch.queue.append(self.probe.guard(plain_indices)(indices))
        return indices

    def forward(self, _module: torch.nn.Module) -> None:
        """Note that only the latest batch can be what training is for."""
        if not torch.is_grad_enabled():
            self.fresh = self.fresh[-1:]

    def backward_begin(self, *_: Any) -> None:
        """Note that the latest batches serve training: a backward or an update begins."""
        for epoch in (one for one in self.fresh if not (one.over or one.trains)):
            epoch.trains = True
            self.probe.record("trained", **epoch.names)
        self.fresh = []

    step_begin = backward_begin


def _describe(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the facts of the record ``loader``; the script's own batch sampler is asked first."""
    own, dataset = loader.batch_sampler, loader.dataset
    iterable = isinstance(dataset, IterableDataset)
    samplers = [] if iterable else [own, getattr(own, "sampler", loader.sampler)]
    samplers = [one for one in samplers if one is not None and type(one) is not BatchSampler]
    innermost, indices = look_through(dataset)
    known = [] if iterable or indices is None else innermost
    contents = [held_content(one) for one in known]
    return {
        "dataset": type(dataset).__name__,
        "length": None if iterable else _length(dataset),
        "batches": None if iterable else _length(loader),
        "sampler": type(samplers[0]).__name__ if samplers else None,
        "replicas": next(filter(None, (getattr(x, "num_replicas", None) for x in samplers)), None),
        "inner_length": sum(map(len, known)) if known else None,
        "content": zlib.crc32(repr(contents).encode()) if contents and all(contents) else None,
    }


def _length(of: Any) -> int | None:
    """Return len(), or None: a sampler or a dataset of the script need not have it."""
    try:
        return len(of)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def plain_indices(batch: Any) -> list[Any]:
    """Return the indices of a batch as a list; a loader without batches has a single one."""
    plain = batch.tolist() if isinstance(batch, torch.Tensor) else batch
    several = hasattr(plain, "__iter__") and not isinstance(plain, (str, bytes))
    indices = plain if several else [plain]
    return [int(one) if hasattr(one, "__index__") else str(one)[:100] for one in indices]


def watch(probe: Probe) -> None:
    """Watch all loaders of this process, what their batches are used for, and torch's Join."""
    LoaderWatch(probe)
    if torch.distributed.is_available():
        from torch.distributed.algorithms.join import Join

        patch(Join, "__enter__", functools.partial(probe.note, "join"))
