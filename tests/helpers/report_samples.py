"""Invented comparisons for tests of the report; no number was measured.

The numbers follow a rule. A step of ``none`` on one node takes 1.0 s. On N nodes compute takes 1/N
of that, and a strategy's exchange takes ``WIRE[sync] * (N - 1)`` seconds. Three repeats differ so
much that their 95 % interval is 2 % to each side.
"""

import math

from msgspec.structs import asdict, replace

from common.profiling.records import GradientClaim, RankTimeline, SentMessage
from common.runs import RankRow, StepSeconds, TimelineFile
from lab.comparison.record import Cell, Comparison, Medians, PredictedCell, Prediction, Repeat

BYTES = 36_924_456
WIRE = {
    "gather_scatter": 0.08,
    "gather_scatter_flat": 0.07,
    "tree": 0.065,
    "ring": 0.055,
    "all_reduce": 0.05,
    "halving_doubling": 0.045,
    "overlapped": 0.02,
    "ddp": 0.01,
    "topk": 0.03,
    "ddp_fp16": 0.006,
    "ddp_powersgd": 0.004,
    "all_reduce_flat": 0.048,
}
SHRINK = {"topk": 0.04, "ddp_fp16": 0.5, "ddp_powersgd": 0.012}  # of the bytes, if not exact
SHARES = {"data": 0.01, "forward": 0.33, "backward": 0.64, "update": 0.02}
WAIT = 0.004
T = 4.302653 / math.sqrt(3)  # Student's t of three values, over the root of their number
MEMORY = {
    "parameters": BYTES,
    "gradients": BYTES,
    "optimizer_state": 2 * BYTES,
    "buckets": 0,
    "untrained": 30_000,
}


def sent(sync, nodes, rank):
    """Return the bytes that a rank sends in a step, roughly as the strategies do."""
    if nodes == 1:
        return 0.0
    if sync.startswith("gather_scatter"):
        return float(BYTES * (nodes - 1 if rank == 0 else 1))
    return 2 * (nodes - 1) / nodes * BYTES * SHRINK.get(sync, 1.0)


def step_seconds(sync, nodes, *, scale, weak):
    compute = scale / (1 if weak else nodes)
    wait = WAIT if nodes > 1 else 0.0
    wire = WIRE[sync] * (nodes - 1) * scale if nodes > 1 else 0.0
    seconds = {part: share * compute for part, share in SHARES.items()}
    return StepSeconds(
        **seconds, wait=wait, wire=wire, sync=wait + wire, step=compute + wait + wire
    )


def longer(seconds, share):
    return StepSeconds(**{name: value * (1 + share) for name, value in asdict(seconds).items()})


def cell(
    sync,
    nodes,
    *,
    repeats=3,
    batch=256,
    scaling="strong",
    scale=1.0,
    seeds=(0,),
    accuracy=None,
    losses=None,
    loss_shift=0.0,
    precision="fp32",
    load=0.5,
    iteration=0.0,
    rate=None,
    group=0,
    status="done",
    **entries,
):
    """Return a cell with these ``entries``; failed and pending cells have no numbers.

    losses : of each run from step 1 on; ``loss`` by default, with ``loss_shift`` from step 2 on
    because the gradients were added up and never divided. iteration : the mean iteration over the
    step; 0: no run recorded it.
    """
    weak = scaling == "weak"
    result = Cell(
        id=f"{sync}-n{nodes}" + (f"-{rate}" if rate else "") + (f"-g{group}" if group else ""),
        sync=sync,
        nodes=nodes,
        rate=rate,
        batch_size=batch * nodes if weak else batch,
        exact=sync not in SHRINK,
        group=group,
        status=status,
        repeats=[],
        **entries,
    )
    if status in ("failed", "pending"):
        return result
    seconds = step_seconds(sync, nodes, scale=scale, weak=weak)
    memory = (520 + 4 * nodes + len(sync)) * 1e6
    for repeat in range(repeats):
        seed = seeds[repeat % len(seeds)]
        away = repeat - (repeats - 1) // 2
        known = losses
        if known is None:
            known = [
                loss(sync, step, seed, nodes) + loss_shift * (step > 1) for step in range(1, 31)
            ]
        outcome = Repeat(
            folder=f"PartTwo-{sync}/{repeat}",
            seed=seed,
            status="done",
            ranks=[
                RankRow(
                    rank=rank,
                    host=f"node{rank}",
                    threads=1,
                    messages=34.0,
                    seconds=longer(seconds, 0.02 / T * away),
                    peak_memory_bytes=int(memory + (rank - (nodes - 1) / 2) * 4e6),
                    bytes_sent=sent(sync, nodes, rank),
                    memory=dict(MEMORY),
                    predicted_memory=dict(MEMORY),
                )
                for rank in range(nodes)
            ],
            losses=list(enumerate(known, start=1)),
            step_seconds=[
                (step, seconds.step * (3 if step == 1 else 1 + 0.02 * math.sin(step)))
                for step in range(1, 31)
            ],
            test_accuracy=accuracy and accuracy + 0.002 * away,
            test_loss=accuracy and 1.5,
            precision=precision,
            load_per_core=load,
            mean_iteration_seconds=iteration * (1 + 0.02 / T * away) * seconds.step or None,
            claim=claim(nodes, result.exact, 1 if loss_shift else 1 / nodes),
        )
        result.repeats.append(outcome)
    result.medians = Medians(
        **asdict(seconds),
        peak_memory_bytes=memory,
        root_bytes_sent=sent(sync, nodes, 0),
        others_bytes_sent=sent(sync, nodes, 1) if nodes > 1 else None,
    )
    result.intervals = {
        name: (None, None) if repeats == 1 else (value * 0.98, value * 1.02)
        for name, value in asdict(seconds).items()
    }
    return result


def set_times(entry, seconds, low=None, high=None):
    """Give a cell of three repeats the step with this 95 % interval; of one repeat without one."""
    steps = [seconds]
    if high is not None:
        apart = (high - seconds) / T
        steps = [seconds - apart, seconds, seconds + apart]
    entry.repeats = entry.repeats[: len(steps)]
    for run, step in zip(entry.repeats, steps, strict=True):
        for rank in run.ranks:
            rank.seconds = replace(rank.seconds, step=step)
    entry.medians.step = seconds


def claim(nodes, exact, weight):
    """Return what a run records of its first step: each gradient counts ``weight`` times."""
    if nodes == 1:
        return None
    if not exact:
        return GradientClaim(step=0, why_not="the strategy is lossy")
    return GradientClaim(step=1, weights=[[weight] * nodes] * nodes, residue=2e-8)


def on(nodes, *syncs, **options):
    """Return a cell of each strategy."""
    return [cell(sync, nodes, **options) for sync in syncs]


def loss(sync, step, seed, nodes):
    """Return a step's loss: exact strategies differ in the seventh digit, lossy ones visibly."""
    base = 0.9 + 1.5 * math.exp(-step / 12) + 0.06 * math.sin(1.7 * step + seed)
    base += 0.01 * math.log2(nodes)
    place = list(WIRE).index(sync) if sync in WIRE else 0
    if sync not in SHRINK:
        return base + 1e-7 * (step - 1) * place
    return base + 0.006 * place * (1 - math.exp(-step / 10)) * (1 + 0.5 * math.sin(step))


def timeline(sync, nodes, *, overlapped=False):
    """Return a step in which each rank's backward pass ends 4 ms after the previous rank's."""
    ranks = []
    for rank in range(nodes):
        end = 0.40 + 0.004 * rank
        first, apart, length = 0.40 + 0.004 * (nodes - 1), 0.0108, 0.012
        if overlapped:
            first, apart, length = 0.22, 0.0315, 0.049
        begins = [first + index * apart for index in range(6)]
        sends = [
            SentMessage("all_reduce", BYTES // 6, BYTES / 6, begin, begin + length)
            for begin in begins
        ]
        last = max(end, sends[-1].end)
        sections = {
            "data": [(0.0, 0.006)],
            "forward": [(0.006, 0.14)],
            "backward": [(0.14, end)],
            "sync": [(end, last)],
            "update": [(last, last + 0.01)],
        }
        ranks.append(RankTimeline(rank, sections, sends))
    return TimelineFile(format=1, sync=sync, step=36, ranks=ranks)


def predicted(entry, error):
    """Return a prediction with the relative error ``error``, in scope up to two nodes."""
    nodes = entry.nodes
    return PredictedCell(
        step_seconds=entry.medians.step * (1 + error),
        compute_seconds=1 / nodes,
        sync_seconds=0.1,
        in_scope=nodes <= 2,
        why="" if nodes <= 2 else "more ranks than cores",
        bytes_sent=[sent(entry.sync, nodes, rank) for rank in range(nodes)],
    )


def results(
    syncs=("gather_scatter", "all_reduce", "ring", "overlapped", "ddp", "ddp_fp16"),
    nodes=(1, 2, 4),
    *,
    predict=True,
    emulated=False,
    **options,
):
    """Return a whole comparison; ``options`` go to every ``cell``."""
    cells = [cell("none", 1, **options)] if 1 in nodes else []
    several = [count for count in nodes if count > 1]
    for count in several:
        cells += on(count, *syncs, oversubscribed=count > 2, **options)
    prediction = Prediction(
        made="2026-11-21T14:59:58",
        calibration={"made": "2026-11-21T14:50:00", "alpha": 1.2e-4, "beta": 9e-10},
        cells={
            entry.id: predicted(entry, 0.05 + 0.04 * (index % 6))
            for index, entry in enumerate(cells)
            if entry.medians
        },
    )
    warnings = []
    if max(nodes) > 2:
        warnings.append("4 ranks share 2 cores: times are not those of machines.")
    command = ["lab compare --nodes", *map(str, nodes), "--sync", *syncs]
    return Comparison(
        kind="compare",
        created="2026-11-21T15:00:00",
        finished=True,
        emulated=emulated,
        settings={
            **{"dataset": "cifar10", "model": "vgg11", "batch_size": 256, "steps": 30, "warmup": 5},
            "scaling": options.get("scaling", "strong"),
            "repeats": options.get("repeats", 3),
            "nodes": list(nodes),
            "sync": list(syncs),
            "rates": [None],
            "until_accuracy": None,
            "command": " ".join(command),
        },
        environment={
            **{"system": "Linux-6.1-x86_64", "cpu": "a processor", "usable_cores": 2, "gpus": []},
            **{"torch": "2.15.0", "git_commit": "0" * 40, "git_changes": False},
        },
        warnings=warnings,
        prediction=prediction if predict else None,
        cells=cells,
        timelines={
            f"{sync}-n{count}": timeline(sync, count, overlapped=sync in ("overlapped", "ddp"))
            for sync in syncs[:4]
            for count in several
        },
    )
