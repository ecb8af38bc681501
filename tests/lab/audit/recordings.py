"""Recordings of ranks that never ran: what a probe would have written, with real numbers.

``Rank`` holds the records of one of them. ``train`` makes those of a small training, in which
``exchange`` says what each rank's optimiser gets from the gradients of all ranks; ``load`` makes
those of a script that draws samples.
"""

import json

import numpy as np

from lab.audit.recording import RankRecords, Recording
from lab.audit.records import CollectiveCall, Step, decode_record

SHAPES = {"conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "fc.weight": (10, 40), "fc.bias": (10,)}
COLUMNS = sum(int(np.prod(shape)) for shape in SHAPES.values())

LOSS = {"node": "NllLossBackward0", "reduction": "mean", "arriving": 1.0}
LOSS |= {"samples": None, "target_hash": None}
"""A loss as the probe writes it, of whose samples nothing is known."""

FIELDS = {
    "start": {"python": "3.11.7", "executable": None, "variables": {}, "hint": None},
    "cut": {"step": 6, "replaced": []},
    "error": {"after_cut": False, "at": None},
    "end": {"status": None, "after_cut": False},
    "group": {"rank": 0, "world": 2, "at": None},
    "mesh": {"at": None},
    "hook": {"at": None},
    "call": {"c": 0, "step": 0, "at": None},
    "done": {"c": 0, "seconds": 0.0, "own_thread": False, "error": None},
    "ddp": {"at": None},
    "backward": {"step": 0, "micro": 0, "forwards": [], "loss": None, "synced": None}
    | {"seconds": 0.0, "exposed_seconds": None, "at": None},
    "params": {"optimizer": "SGD", "built": 0},
    "step": {"o": 0, "step": 0, "optimizer": "SGD", "lr": [0.1], "settings": {}, "scale": 1.0}
    | {"clips": [], "at": None},
    "stepped": {"seconds": 0.0, "state": None},
    "loader": {"at": None, "inner_length": None, "content": None},
    "batch": {"contents": None},
}
"""What a record of a kind has where a test says nothing else."""


def probe_fields(k, **fields):
    """Return a record as the probe writes it, with these fields."""
    return {"k": k, "t": 0.0, **FIELDS.get(k, {}), **fields}


def probe_record(kind, **fields):
    """Return a record as it is read, with these fields of the probe's."""
    return decode_record(json.dumps(probe_fields(kind, **fields)))


class Rank(RankRecords):
    """The records of one rank; each takes a millisecond.

    ``changes`` are (kind, field, value) of records, or for backward of its loss; or value(rank,
    record).
    """

    def __init__(self, rank, changes=()):
        super().__init__(100 + rank, [], rank=rank)
        self.changes = changes

    def record(self, kind, **fields):
        """Add one record."""
        content = probe_fields(kind, **({"t": len(self.records) / 1000} | fields))
        for changed, field, value in self.changes:
            if changed == kind:
                target = content["loss"] if kind == "backward" else content
                target[field] = value(self.rank, content) if callable(value) else value
        self.add(decode_record(json.dumps(content)))

    def keep(self, values):
        """Add numbers and return the reference to them."""
        begin = len(self._numbers)
        self._numbers = np.append(self._numbers, values)
        return [begin, len(self._numbers) - begin]

    def call(self, name="all_reduce", *, done=True, **fields):
        """Add the records of a call; ``done`` False: the rank waits in it for ever."""
        number = len(self.of(CollectiveCall))
        known = {"op": "SUM", "size": 2, "group": None, "bytes": 40, "dtype": "float32"}
        known |= {"shape": [10], "step": 1, "peer": None, "async": False, "content": "gradient"}
        known |= {"within": None, "at": ["main.py", 9, "all_reduce"]}
        self.record("call", c=number, name=name, **(known | fields))
        if done:
            self.record("done", c=number, seconds=0.1, error=fields.get("error"))


def gradients(rank, step):
    """Return a rank's own gradient of a step as float32 would hold it: correlated over ranks."""
    common = np.random.default_rng([7, step]).standard_normal(COLUMNS)
    own = np.random.default_rng([rank, step]).standard_normal(COLUMNS)
    return (common + own).astype(np.float32).astype(np.float64)


def mean(own, step):
    """Return the right exchange's result, rounded to float32."""
    total = own.astype(np.float32).sum(axis=0) / np.float32(len(own))
    return np.repeat(total[None].astype(np.float64), len(own), axis=0)


def train(exchange=mean, *, size=3, steps=4, own=gradients, rate=0.1, changes=()):
    """Return the recording of a training by SGD.

    ``exchange`` takes the ranks' own gradients (ranks, columns) and the step, and returns what each
    rank gets. ``changes`` are those of ``Rank``.
    """
    ranks, rows = [Rank(rank, changes) for rank in range(size)], []
    for index, (name, shape) in enumerate(SHAPES.items()):
        rows.append([f"0.0.{index}", name, list(shape), "float32", int(np.prod(shape)), index])
    for one in ranks:
        one.record("group", rank=one.rank, world=size, at=None)
        one.record("params", o=0, built=0, rows=rows)
    weights = np.repeat(np.linspace(-1, 1, COLUMNS)[None], size, axis=0)
    for step in range(steps + 1):
        for one in ranks:
            one.record("weights", o=0, step=step, values=one.keep(weights[one.rank]))
        mine = np.array([own(rank, step) for rank in range(size)])
        got = exchange(mine, step)
        for one in ranks if step < steps else ():
            loss = LOSS | {"samples": 8, "target_hash": 0}
            forwards, at = [[8, one.rank, "module"]], ["main.py", 8, "loss.backward()"]
            one.record("backward", step=step, micro=0, forwards=forwards, loss=loss, at=at)
            one.call(step=step, size=size, bytes=4 * COLUMNS)
            numbers = {"own": mine[one.rank], "got": got[one.rank]}
            fields = {key: one.keep(values) for key, values in numbers.items()}
            fields |= {f"{key}_norm": float(np.linalg.norm(numbers[key])) for key in numbers}
            fields |= {"lr": [rate], "settings": {"lr": rate, "momentum": 0}, "optimizer": "SGD"}
            one.record("step", o=0, step=step, micro=1, scale=1, clips=[], **fields)
            one.record("stepped", o=0, step=step, state=None)
        weights = weights - rate * got
    return Recording(size, ranks)


def load(draws, facts=None, *, inner=None, content=None, size=2, second=2):
    """Return the recording of a script that is cut after six steps and ``second`` of epoch 2.

    ``draws(rank, epoch)`` returns the outer indices, 16 a batch; ``inner(rank, index)`` the one in
    the innermost dataset; ``content(rank, inner index)`` the hash of the sample that was given.
    ``facts``, or ``facts(rank)``, replace those of a DistributedSampler in the record ``loader``.
    """
    ranks = [Rank(rank) for rank in range(size)]
    for one in ranks:
        given = facts(one.rank) if callable(facts) else facts or {}
        loader = {"dataset": "CIFAR10", "length": 960, "replicas": size}
        loader |= {"sampler": "DistributedSampler", "batches": -(-len(draws(one.rank, 0)) // 16)}
        one.record("loader", l=0, **(loader | given))
        for epoch, steps in enumerate((6, second)):
            _load_epoch(one, draws(one.rank, epoch), epoch, steps, inner, content)
    return Recording(size, ranks)


def _load_epoch(one, draws, epoch, steps, inner, content):
    names, batches = {"l": 0, "epoch": epoch}, -(-len(draws) // 16)
    for b in range(min(steps, batches)):
        indices, step = draws[16 * b : 16 * b + 16], len(one.of(Step))
        within = inner and [inner(one.rank, index) for index in indices]
        contents = [content(one.rank, i) if content else i * 7919 for i in within or indices]
        one.record("batch", **names, b=b, indices=indices, inner=within, contents=contents)
        forwards = [[len(indices), None, "module"]]
        one.record("backward", step=step, micro=0, loss=dict(LOSS), forwards=forwards)
        one.record("step", o=0, step=step, scale=1)
    one.record("epoch", **names, batches=min(steps, batches), cut=steps < batches)
    if rest := draws[16 * steps :]:
        within = inner and [inner(one.rank, index) for index in rest]
        one.record("rest", **names, indices=rest, inner=within)
        one.record("cut", step=steps)
