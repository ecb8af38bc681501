"""Recordings of ranks that never ran: what a probe would have written, with real numbers.

``Rank`` holds the records of one of them. ``train`` makes those of a small training, in which
``exchange`` says what each rank's optimiser gets from the gradients of all ranks; ``load`` makes
those of a script that draws samples.
"""

import numpy as np

from lab.audit.recording import RankRecords, Recording

SHAPES = {"conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "fc.weight": (10, 40), "fc.bias": (10,)}
COLUMNS = sum(int(np.prod(shape)) for shape in SHAPES.values())


class Rank(RankRecords):
    """The records of one rank; each takes a millisecond."""

    def __init__(self, rank):
        super().__init__(100 + rank, [], rank=rank)

    def record(self, kind, **fields):
        """Add one record."""
        record = {"k": kind, "t": len(self.records) / 1000, **fields}
        self.by_kind[kind].append(record)
        self.records.append(record)

    def keep(self, values):
        """Add numbers and return the reference to them."""
        begin = len(self._numbers)
        self._numbers = np.append(self._numbers, values)
        return [begin, len(self._numbers) - begin]

    def call(self, name="all_reduce", *, done=True, **fields):
        """Add the records of a call; ``done`` False: the rank waits in it for ever."""
        number = len(self.by_kind["call"])
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
    rank gets. ``changes`` are (kind, field, value) of records and losses; or value(rank, record).
    """
    ranks, rows = [Rank(rank) for rank in range(size)], []
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
            loss = {"node": "NllLossBackward0", "reduction": "mean", "arriving": 1.0}
            loss |= {"samples": 8, "target_hash": 0}
            forwards, at = [[8, one.rank, "module", "Net"]], ["main.py", 8, "loss.backward()"]
            one.record("backward", step=step, micro=0, forwards=forwards, loss=loss, at=at)
            one.call(step=step, size=size, bytes=4 * COLUMNS)
            numbers = {"own": mine[one.rank], "got": got[one.rank]}
            fields = {key: one.keep(values) for key, values in numbers.items()}
            fields |= {f"{key}_norm": float(np.linalg.norm(numbers[key])) for key in numbers}
            fields |= {"lr": [rate], "settings": {"lr": rate, "momentum": 0}, "optimizer": "SGD"}
            one.record("step", o=0, step=step, micro=1, scale=1, clips=[], **fields)
            one.record("stepped", o=0, step=step, state=None)
        weights = weights - rate * got
    for kind, field, value in changes:
        for rank in ranks:
            for record in rank.by_kind[kind]:
                target = record["loss"] if kind == "backward" else record
                target[field] = value(rank.rank, record) if callable(value) else value
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
        loader = {"dataset": "CIFAR10", "length": 960, "wraps": False, "replicas": size}
        loader |= {"sampler": "DistributedSampler", "batches": -(-len(draws(one.rank, 0)) // 16)}
        one.record("loader", l=0, **(loader | given))
        for epoch, steps in enumerate((6, second)):
            _load_epoch(one, draws(one.rank, epoch), epoch, steps, inner, content)
    return Recording(size, ranks)


def _load_epoch(one, draws, epoch, steps, inner, content):
    names, batches = {"l": 0, "epoch": epoch}, -(-len(draws) // 16)
    for b in range(min(steps, batches)):
        indices, step = draws[16 * b : 16 * b + 16], len(one.by_kind["step"])
        within = inner and [inner(one.rank, index) for index in indices]
        contents = [content(one.rank, i) if content else i * 7919 for i in within or indices]
        one.record("batch", **names, b=b, indices=indices, inner=within, contents=contents)
        loss = {"reduction": "mean", "arriving": 1.0, "samples": None}
        forwards = [[len(indices), None, "module", "Net"]]
        one.record("backward", step=step, micro=0, loss=loss, forwards=forwards)
        one.record("step", o=0, step=step, scale=1)
    one.record("epoch", **names, batches=min(steps, batches), cut=steps < batches)
    if rest := draws[16 * steps :]:
        within = inner and [inner(one.rank, index) for index in rest]
        one.record("rest", **names, indices=rest, inner=within)
        one.record("cut", step=steps)
