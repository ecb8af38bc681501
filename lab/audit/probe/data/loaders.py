"""Watches DataLoaders: which samples a script is given, in which order, and for what.

``DataLoader.__iter__`` begins an epoch, ``__next__`` of its iterator gives a batch, and
``_next_index`` shows the sampler's indices, which run ahead of the batches if workers prefetch.
Before each batch ``stopping`` is asked; it ends the epoch by StopIteration or SystemExit.
"""

import importlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.data import DataLoader, IterableDataset, dataloader

from .. import passes
from ..state import Probe
from . import items
from .items import LOADER, ItemWatch, plain_index, replace

LONGEST_REST = 5_000_000  # indices; a sampler that gives more may be endless


class WatchedLoader:
    """A DataLoader, or several alike that a script builds one after another, as for each epoch.

    trained : epochs that served training, each with its number of batches so far.
    """

    def __init__(self, number: int, loader: "DataLoader[Any]", facts: dict[str, Any]) -> None:
        self.number, self.facts, self.epochs = number, facts, 0
        self.current = ref(loader)
        self.trained: dict[int, int] = {}


class WatchedEpoch:
    """One iteration over a loader.

    fresh : a batch was given since the last backward, and no forward without gradients followed.
    evaluating : the last forward after a batch of this epoch was without gradients.
    late : it began after the cut. over : it has ended, or was ended.
    """

    def __init__(self, loader: WatchedLoader, *, late: bool) -> None:
        self.loader, self.number, self.late = loader, loader.epochs, late
        self.given, self.given_late = 0, 0
        self.fresh, self.evaluating, self.over = False, False, False
        loader.epochs += 1

    @property
    def trains(self) -> bool:
        """Whether a backward or an update followed a batch of this epoch."""
        return self.number in self.loader.trained


class LoaderWatch:
    """Writes the records of all loaders of this process."""

    def __init__(self, probe: Probe, fetched: ItemWatch) -> None:
        self.probe, self.items = probe, fetched
        self.loaders: list[WatchedLoader] = []
        self.epochs: WeakKeyDictionary[Any, WatchedEpoch] = WeakKeyDictionary()
        self.queues: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self.newest: WatchedEpoch | None = None  # alive, also after next(iter(loader))
        self.open: WeakSet[WatchedEpoch] = WeakSet()
        base = getattr(dataloader, "_BaseDataLoaderIter", None)
        replace(DataLoader, "__iter__", self.begin)
        if base is not None:
            replace(base, "__next__", self.give)
            replace(base, "_next_index", self.take_indices)
            replace(base, "_reset", self.reset)
        probe.hear("forward", self.after_forward)
        probe.hear("backward_begin", self.train)
        probe.hear("step_begin", self.train)

    def begin(self, original: Callable[..., Any], loader: "DataLoader[Any]") -> Any:
        """Begin an epoch. Workers find the loader's number in their environment."""
        if torch.utils.data.get_worker_info() is not None:
            return original(loader)
        watched = self.probe.guard(self.find)(loader)
        if watched is None:
            return original(loader)
        os.environ[LOADER] = str(watched.number)
        try:
            iterator = original(loader)
        finally:
            os.environ.pop(LOADER, None)
        if isinstance(iterator, getattr(dataloader, "_BaseDataLoaderIter", ())):
            self.epochs[iterator] = epoch = WatchedEpoch(watched, late=self.probe.cutting)
            self.open.add(epoch)
        return iterator

    def find(self, loader: "DataLoader[Any]") -> WatchedLoader:
        """Return what is known of a loader; a new one may follow one that was thrown away."""
        for known in self.loaders:
            if known.current() is loader:
                return known
        facts = {**_describe(loader), "at": self.probe.place()}
        for known in self.loaders:
            if known.current() is None and known.facts == facts:
                known.current = ref(loader)
                return known
        watched = WatchedLoader(len(self.loaders), loader, facts)
        self.loaders.append(watched)
        self.probe.record("loader", l=watched.number, **facts)
        return watched

    def give(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Give the script a batch, and record which."""
        epoch = self.epochs.get(iterator)
        if epoch is None:
            return original(iterator)
        try:
            if self.probe.stopping is not None:
                self.probe.stopping.before_batch(epoch)
        except (StopIteration, SystemExit):
            if not epoch.over:
                self.end(epoch, cut=True)
                self.probe.guard(self.drain)(epoch, iterator)
            raise
        items.current.loader = epoch.loader.number
        try:
            batch = original(iterator)
        except StopIteration:
            if not epoch.over:
                self.end(epoch, cut=False)
            raise
        self.probe.guard(self.record_batch)(epoch, iterator)
        return batch

    def record_batch(self, epoch: WatchedEpoch, iterator: Any) -> None:
        """Write the record ``batch``."""
        queue = self.queues.get(iterator)
        in_order = getattr(iterator, "_in_order", True)
        indices = plain_indices(queue.popleft()) if queue else None
        if not in_order or isinstance(getattr(iterator, "_dataset", None), IterableDataset):
            indices = None
        self.probe.record(
            "batch",
            l=epoch.loader.number,
            epoch=epoch.number,
            b=epoch.given,
            indices=indices,
        )
        epoch.given += 1
        epoch.given_late += self.probe.cutting
        for other in self.open:
            other.fresh = other.fresh and other.loader is not epoch.loader
        epoch.fresh = True
        if epoch.trains:
            epoch.loader.trained[epoch.number] = epoch.given
        self.newest = epoch

    def end(self, epoch: WatchedEpoch, *, cut: bool) -> None:
        """Write the record ``epoch``."""
        epoch.over = True
        self.probe.record(
            "epoch", l=epoch.loader.number, epoch=epoch.number, batches=epoch.given, cut=cut
        )

    def drain(self, epoch: WatchedEpoch, iterator: Any) -> None:
        """Write the record ``rest``: take the indices that the sampler would still have given."""
        sampler = getattr(iterator, "_sampler_iter", None)
        queue = self.queues.get(iterator)
        if sampler is None or isinstance(getattr(iterator, "_dataset", None), IterableDataset):
            return
        left = [index for batch in queue or () for index in plain_indices(batch)]
        more = (index for batch in sampler for index in plain_indices(batch))
        left.extend(islice(more, LONGEST_REST))
        indices = left if len(left) < LONGEST_REST else None
        inner = self.items.inner_indices(iterator._dataset, indices or [])
        self.probe.record(
            "rest", l=epoch.loader.number, epoch=epoch.number, indices=indices, inner=inner
        )

    def take_indices(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Remember the indices of a batch, in the order in which the sampler gives them."""
        index = original(iterator)
        self.queues.setdefault(iterator, deque()).append(index)
        return index

    def reset(self, original: Callable[..., Any], iterator: Any, *rest: Any, **named: Any) -> Any:
        """Forget the indices of an epoch that a loader with persistent workers leaves behind."""
        self.queues.pop(iterator, None)
        return original(iterator, *rest, **named)

    def after_forward(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """Note what the batches were given for."""
        if self.newest is not None:
            self.newest.evaluating = not torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            for epoch in self.open:
                epoch.fresh = epoch.fresh and epoch is self.newest

    def train(self, *_: Any) -> None:
        """Note that the latest batches serve training: a backward or an update begins."""
        for epoch in list(self.open):
            if epoch.fresh and not epoch.over and not epoch.trains:
                epoch.loader.trained[epoch.number] = epoch.given
                self.probe.record("trained", l=epoch.loader.number, epoch=epoch.number)
            epoch.fresh = False


def plain_indices(batch: Any) -> list[Any]:
    """Return the indices of a batch as a list; a loader without batches has a single one."""
    if isinstance(batch, torch.Tensor):
        batch = batch.tolist()
    if isinstance(batch, (str, bytes, int)) or not hasattr(batch, "__iter__"):
        return [plain_index(batch)]
    return [plain_index(index) for index in batch]


def _length(of: Any) -> int | None:
    """Return len(), or None: a sampler or a dataset of the script need not have it."""
    try:
        return len(of)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _samplers(loader: "DataLoader[Any]") -> Iterator[Any]:
    """Yield what chooses the indices, the script's own batch sampler first."""
    own = loader.batch_sampler
    if own is not None and type(own) is not torch.utils.data.BatchSampler:
        yield own
    yield from (getattr(own, "sampler", None), loader.sampler)


def _describe(loader: "DataLoader[Any]") -> dict[str, Any]:
    samplers = [one for one in _samplers(loader) if one is not None]
    iterable = isinstance(loader.dataset, IterableDataset)

    def ask(name: str) -> Any:
        return next((getattr(one, name) for one in samplers if hasattr(one, name)), None)

    return {
        "dataset": type(loader.dataset).__name__,
        "length": None if iterable else _length(loader.dataset),
        "batch_size": loader.batch_size or ask("batch_size"),
        "batches": None if iterable else _length(loader),
        "sampler": None if iterable or not samplers else type(samplers[0]).__name__,
        "replicas": ask("num_replicas"),
        **items.describe_innermost(loader.dataset),
    }


def _watch_join(probe: Probe) -> None:
    """Record that ranks with fewer batches wait for the others."""

    def enter(original: Callable[..., Any], context: Any) -> Any:
        probe.record("join", at=probe.place())
        return original(context)

    if torch.distributed.is_available():
        join = importlib.import_module("torch.distributed.algorithms.join")
        replace(join.Join, "__enter__", enter)


def watch(probe: Probe) -> None:
    """Watch all loaders of this process, and what their batches are used for."""
    LoaderWatch(probe, ItemWatch(probe))
    _watch_join(probe)
    passes.watch(probe)
