"""Watches DataLoaders: which samples a script is given, in which order, and for what.

A sample is known by its index in the innermost dataset: Subsets, ConcatDatasets and a script's own
partitions are looked through. Whether that is the same sample on two ranks is told by what the
innermost datasets hold (``content`` of the record ``loader``) or, if they hold nothing that tells,
by the rows of the batches (``contents`` of the record ``batch``). Augmentation changes the rows.

``LoaderWatch`` sees epochs and batches in the script's process; what workers do is not watched.
Before each batch ``pace`` is asked, which may end the epoch by StopIteration.
"""

from __future__ import annotations

import functools
import math
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
LONGEST_LIST = 1000  # of a dataset's attributes, whose elements may be datasets or lists
HASHED = 64  # numbers of a tensor, and samples of a dataset
_NOBODYS = ("builtins", "collections", "multiprocessing", "numpy", "torch", "pandas", "h5py", "PIL")


# What batches and datasets hold


def contents_of(batch: Any, count: int) -> list[int] | None:
    """Return a CRC-32 of each sample of a batch; None if its tensors have no row for each."""
    if isinstance(batch, Mapping):
        batch = dict(batch)
    parts, _ = tree_flatten(batch)
    tensors = [part for part in parts if _has_rows(part, count)]
    hashes = []
    for row in zip(*tensors):
        hashes.append(zlib.crc32(repr([plain(value) for value in row]).encode()))
    return hashes or None


def _has_rows(value: Any, count: int) -> bool:
    """Return whether a part of a batch is a tensor with a row for each of its samples."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    if value.is_nested or value.is_complex() or value.dim() == 0:
        return False
    return value.numel() > 0 and len(value) == count


def _spread(values: Any) -> Any:
    """Return at most ``HASHED`` of the values, at equal distances."""
    distance = math.ceil(len(values) / HASHED)
    return values[:: max(1, distance)]


def held_content(dataset: Any) -> int | None:
    """Return a hash of what a dataset holds of some of its samples.

    None if that does not tell which samples these are. Arrays, images and paths of files tell;
    single labels and mere names of files do not, nor do samples of which most are equal.
    """
    length = len(dataset)
    rows = []
    texts = []
    try:
        held = [value for value in _attributes(dataset) if _is_sequence(value, length)]
        for index in _spread(range(length)):
            row = [getattr(sequence, "iloc", sequence)[index] for sequence in held]
            rows.append(row)
            texts.append(repr([plain(value) for value in row]))
    except Exception:  # the script's attributes may be of any class
        return None
    if not rows or not any(_tells(value) for value in rows[0]):
        return None
    mostly_equal = len(set(texts)) * 2 < len(texts)
    if mostly_equal or " at 0x" in texts[0]:  # addresses differ from rank to rank
        return None
    return zlib.crc32(repr(texts).encode(errors="replace"))


def _is_sequence(value: Any, length: int) -> bool:
    """Return whether a value has an element for each sample."""
    if isinstance(value, (list, tuple, range)):
        return len(value) == length
    return bool(getattr(value, "shape", ())[:1] == (length,))


def plain(value: Any) -> Any:
    """Return an element of a tensor, an array or a list as what repr() shows in full."""
    if isinstance(value, torch.Tensor):
        return _spread(value.detach().reshape(-1)).tolist()
    return value.tobytes() if hasattr(value, "tobytes") else value


def _tells(value: Any) -> bool:
    """Return whether an element of a list is, or contains, an array, an image or a file's name."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    for part in parts:
        if isinstance(part, str):
            if os.path.exists(part):
                return True
        elif getattr(part, "shape", getattr(part, "size", None)):
            return True
    return False


def _attributes(owner: Any) -> Iterator[Any]:
    """Yield what an object holds as attributes, and what short lists and dicts among them hold."""
    for value in list(getattr(owner, "__dict__", {}).values()):
        yield value
        if isinstance(value, dict) and len(value) <= LONGEST_LIST:
            yield from list(value.values())
        elif isinstance(value, (list, tuple)) and len(value) <= LONGEST_LIST:
            yield from value


# Datasets that wrap others


def look_through(dataset: Any) -> tuple[list[Any], Sequence[int] | None]:
    """Return the innermost datasets, and the index within these of each sample, all different.

    The indices are None if they are not known. They are read from the attributes of the wrapping
    datasets, which are not asked for a sample: they may count these, or draw random numbers.
    """
    innermost: dict[int, Any] = {}
    try:
        indices = _read_indices(dataset, innermost)
    except Exception:  # the script's own class does what it likes
        indices = None
    if indices is not None and len(set(indices)) != len(indices):
        indices = None
    return list(innermost.values()), indices


def _read_indices(dataset: Any, innermost: dict[int, Any]) -> Sequence[int] | None:
    """Return the innermost indices of a dataset's samples; None if they are not known.

    ``innermost`` gets the datasets that wrap no others, by id. Raises ValueError for a dataset of
    several others that is no ConcatDataset.
    """
    length = len(dataset)
    attributes = [value for value in _attributes(dataset) if value is not dataset]
    within = [value for value in attributes if _is_dataset(value)]
    if not within:
        innermost[id(dataset)] = dataset
        number = list(innermost).index(id(dataset))
        first = number * SEVERAL
        return range(first, first + length)
    parts = [_read_indices(inner, innermost) for inner in within]
    if isinstance(dataset, ConcatDataset):
        known = [part for part in parts if part is not None]
        return [*chain(*known)] if len(known) == len(parts) else None
    (indices,) = parts  # raises ValueError for several
    return _chosen(dataset, indices)


def _chosen(dataset: Any, indices: Sequence[int] | None) -> Sequence[int] | None:
    """Return which of the indices within a dataset chooses, as a Subset does by its only list.

    Without such a list it has them all, as a dataset that transforms another one. None if it has
    several lists, or without one another number of samples.
    """
    length = len(dataset)
    lists = [value for value in vars(dataset).values() if _is_index_list(value, length)]
    if indices is None or len(lists) > 1:
        return None
    if lists:
        return [indices[int(index)] for index in lists[0]]
    return indices if len(indices) == length else None


def _is_dataset(value: Any) -> bool:
    """Return whether an object is a Dataset, or of a Python class that acts as one."""
    if isinstance(value, Dataset):
        return True
    if isinstance(value, Mapping) or type(value).__module__.split(".")[0] in _NOBODYS:
        return False
    methods = [getattr(type(value), name, None) for name in ("__getitem__", "__len__")]
    return all(isinstance(method, FunctionType) for method in methods)


def _is_index_list(value: Any, length: int) -> bool:
    """Return whether a value has an index for each sample."""
    try:
        return _is_sequence(value, length) and operator.index(value[0]) >= 0
    except TypeError:
        return False


# Loaders: epochs and batches


@dataclass
class LoaderFacts:
    """What the record ``loader`` says of a DataLoader.

    at, made : the script's lines that iterate over it and that made it.
    """

    dataset: str
    length: int | None
    batches: int | None
    sampler: str | None
    replicas: Any
    inner_length: int | None
    content: int | None
    at: list[Any] | None
    made: list[Any] | None = field(default=None, compare=False)


@dataclass(eq=False)
class WatchedLoader:
    """A DataLoader, or several alike that a script builds one after another, as for each epoch.

    epochs : the iterations over it so far.
    """

    number: int
    facts: LoaderFacts
    epochs: list[WatchedEpoch] = field(default_factory=list)

    @property
    def key(self) -> list[Any]:
        """Return what is the same of this loader on all ranks."""
        return [self.facts.made or self.facts.at, self.facts.dataset]

    def trained(self) -> list[WatchedEpoch]:
        """Return the epochs that serve training."""
        return [epoch for epoch in self.epochs if epoch.trains]


@dataclass(eq=False)
class WatchedEpoch:
    """One iteration over a loader.

    names : the fields of its records that name it: l and epoch.
    inner : the innermost index of each sample; None if it is the same or not known.
    queue : by batch, the indices that the sampler has given and the script has not got yet.
    given : how many batches the script got.
    limit : how many it gets at most, see pace.py; None: all.
    over : it has ended, or was ended.
    trains : a backward or an update followed one of its batches.
    """

    loader: WatchedLoader
    names: dict[str, int]
    inner: Sequence[int] | None
    queue: list[list[Any]] = field(default_factory=list)
    given: int = 0
    limit: int | None = None
    over: bool = False
    trains: bool = False

    def find_inner(self, indices: list[Any] | None) -> list[int] | None:
        """Return the innermost indices of some samples, if they are others."""
        outer = indices or []
        if self.inner is None or not all(isinstance(index, int) for index in outer):
            return None
        return [self.inner[index] for index in outer]


class LoaderWatch:
    """Writes the records of all loaders of this process.

    known : all loaders so far, by their number.
    loaders : the loaders that still live, by torch's DataLoader.
    made : the script's line that made a loader, by torch's DataLoader.
    epochs : the epochs, by torch's iterator.
    latest : the epoch of the latest batch.
    fresh : the epochs that gave a batch since the last backward, the newest last. Those of other
        loaders are no longer fresh after a forward without gradients.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.known: list[WatchedLoader] = []
        self.loaders: WeakKeyDictionary[Any, WatchedLoader] = WeakKeyDictionary()
        self.made: WeakKeyDictionary[Any, list[Any] | None] = WeakKeyDictionary()
        self.epochs: WeakKeyDictionary[Any, WatchedEpoch] = WeakKeyDictionary()
        self.fresh: list[WatchedEpoch] = []
        self.latest: WatchedEpoch | None = None
        patch(DataLoader, __init__=self.make)
        patch(
            dataloader._BaseDataLoaderIter,
            __init__=self.begin,
            _reset=self.begin,
            __next__=self.give,
            _next_index=self.take_indices,
        )
        probe.listeners.append(self)

    def make(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        """Remember the line that makes a DataLoader."""
        original(loader, *args, **kwargs)
        self.made[loader] = self.probe.place()

    def begin(self, original: Any, iterator: Any, loader: DataLoader[Any], *first: bool) -> None:
        """See an iterator begin: a new one, or with persistent workers the loader's only one.

        first : what torch's ``_reset`` gets: True within ``__init__``, which is seen already.
        """
        if get_worker_info() is None and not any(first):
            self.probe.guard(self.begin_epoch)(iterator, loader)
        original(iterator, loader, *first)

    def begin_epoch(self, iterator: Any, loader: DataLoader[Any]) -> None:
        """Begin an epoch of a loader."""
        if loader not in self.loaders:
            self.loaders[loader] = self.find_loader(loader)
        watched = self.loaders[loader]
        _, inner = look_through(loader.dataset)
        if isinstance(inner, range):  # nothing is selected: the sampler's indices are the innermost
            inner = None
        names = {"l": watched.number, "epoch": len(watched.epochs)}
        epoch = WatchedEpoch(watched, names, inner)
        self.epochs[iterator] = epoch
        watched.epochs.append(epoch)
        self.probe.tell("epoch_begin", epoch, loader)

    def find_loader(self, loader: DataLoader[Any]) -> WatchedLoader:
        """Return the watched loader that a new DataLoader continues, else record a new one.

        It continues one with the same facts whose own DataLoader has been thrown away.
        """
        facts = _describe(loader, self.probe.place())
        facts.made = self.made.get(loader)
        alive = list(self.loaders.values())
        for watched in self.known:
            if watched.facts == facts and watched not in alive:
                return watched
        watched = WatchedLoader(len(self.known), facts)
        self.known.append(watched)
        self.probe.record("loader", l=watched.number, **vars(facts))
        return watched

    def give(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Give the script a batch, and record which."""
        epoch = self.epochs.get(iterator)
        if epoch is None:
            return original(iterator)
        cut = True
        try:
            self.probe.tell("batch_begin", epoch)  # ``pace`` may end the epoch
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
        # workers may give the batches in another order than the sampler
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
        self.latest = epoch
        self.fresh = [other for other in self.fresh if other.loader is not epoch.loader]
        self.fresh.append(epoch)

    def end(self, epoch: WatchedEpoch, iterator: Any, *, cut: bool) -> None:
        """Write the record ``epoch`` and, if it was cut, ``rest`` unless endless."""
        self.probe.record("epoch", **epoch.names, batches=epoch.given, cut=cut)
        if cut and not isinstance(iterator._dataset, IterableDataset):
            more = chain.from_iterable(map(plain_indices, iterator._sampler_iter))
            rest = [*chain(*epoch.queue), *islice(more, LONGEST_REST)]
            if len(rest) < LONGEST_REST:
                self.probe.record("rest", **epoch.names, indices=rest, inner=epoch.find_inner(rest))

    def cut(self) -> None:
        """End the epoch of the latest batch, since the script is ended."""
        for iterator, epoch in list(self.epochs.items()):
            if epoch is self.latest and not epoch.over:
                epoch.over = True
                self.end(epoch, iterator, cut=True)

    def take_indices(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Remember the indices of a batch, in the order in which the sampler gives them."""
        indices = original(iterator)
        epoch = self.epochs.get(iterator)
        if epoch is not None and not isinstance(iterator._dataset, IterableDataset):
            epoch.queue.append(self.probe.guard(plain_indices)(indices))
        return indices

    def forward(self, _module: torch.nn.Module) -> None:
        """Note that only the latest batch can be what training is for."""
        if not torch.is_grad_enabled():
            self.fresh = self.fresh[-1:]

    def backward_begin(self, *_: Any) -> None:
        """Note that the latest batches serve training: a backward or an update begins."""
        for epoch in self.fresh:
            if not (epoch.over or epoch.trains):
                epoch.trains = True
                self.probe.record("trained", **epoch.names)
        self.fresh = []

    step_begin = backward_begin


def _describe(loader: DataLoader[Any], at: list[Any] | None) -> LoaderFacts:
    """Return the facts of a loader that the script's line ``at`` iterates over."""
    dataset = loader.dataset
    facts = LoaderFacts(
        dataset=type(dataset).__name__,
        length=None,
        batches=None,
        sampler=None,
        replicas=None,
        inner_length=None,
        content=None,
        at=at,
    )
    if isinstance(dataset, IterableDataset):
        return facts
    facts.length = _length(dataset)
    facts.batches = _length(loader)
    samplers = _samplers(loader)
    if samplers:
        facts.sampler = type(samplers[0]).__name__
    replicas = [getattr(sampler, "num_replicas", None) for sampler in samplers]
    facts.replicas = next(filter(None, replicas), None)
    innermost, indices = look_through(dataset)
    if indices is not None:
        facts.inner_length = sum(map(len, innermost))
        contents = [held_content(inner) for inner in innermost]
        if all(contents):
            facts.content = zlib.crc32(repr(contents).encode())
    return facts


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the script's own batch sampler, and the sampler within it or of the loader."""
    batch_sampler = loader.batch_sampler
    both = (batch_sampler, getattr(batch_sampler, "sampler", loader.sampler))
    return [sampler for sampler in both if type(sampler) not in (BatchSampler, type(None))]


def _length(of: Any) -> int | None:
    """Return len(), or None: a sampler or a dataset of the script need not have it."""
    try:
        return len(of)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def plain_indices(batch: Any) -> list[Any]:
    """Return the indices of a batch as a list; a loader without batches has a single one."""
    if isinstance(batch, torch.Tensor):
        batch = batch.tolist()
    if not hasattr(batch, "__iter__") or isinstance(batch, (str, bytes)):
        batch = [batch]
    return [int(index) if hasattr(index, "__index__") else str(index)[:100] for index in batch]


def watch(probe: Probe) -> None:
    """Watch all loaders of this process, what their batches are used for, and torch's Join."""
    LoaderWatch(probe)
    if torch.distributed.is_available():
        from torch.distributed.algorithms.join import Join

        patch(Join, __enter__=functools.partial(probe.note, "join"))
