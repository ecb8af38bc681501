"""Invented results of ``lab compare`` for tests of the report; no number was measured.

The numbers follow a rule. A step of ``none`` on one node takes 1.0 s. On N nodes compute takes 1/N
of that, and a strategy's exchange takes ``WIRE[sync] * (N - 1)`` seconds. Repeats differ by -1 %, 0
and +1 %.
"""

import math

BYTES = 36_924_456
ALL = (
    "gather_scatter",
    "gather_scatter_flat",
    "reduce_broadcast",
    "all_reduce",
    "all_reduce_flat",
    "tree",
    "ring",
    "halving_doubling",
    "overlapped",
    "ddp",
    "ddp_fp16",
    "ddp_powersgd",
    "topk",
    "local_sgd",
)
WIRE = {
    "gather_scatter": 0.08,
    "gather_scatter_flat": 0.07,
    "reduce_broadcast": 0.06,
    "all_reduce": 0.05,
    "all_reduce_flat": 0.04,
    "tree": 0.065,
    "ring": 0.055,
    "halving_doubling": 0.045,
    "overlapped": 0.02,
    "ddp": 0.01,
    "ddp_fp16": 0.006,
    "ddp_powersgd": 0.004,
    "topk": 0.03,
    "local_sgd": 0.005,
}
LOSSY = ("ddp_fp16", "ddp_powersgd", "topk", "local_sgd")
SHARES = {"data": 0.01, "forward": 0.33, "backward": 0.64, "update": 0.02}
WAIT = 0.004


def sent(sync, nodes, rank):
    """Return the bytes that a rank sends in a step, roughly as the strategies do."""
    if sync.startswith("gather_scatter") or sync == "reduce_broadcast":
        return BYTES * (nodes - 1 if rank == 0 else 1)
    shrink = {"ddp_fp16": 0.5, "ddp_powersgd": 0.012, "topk": 0.02 * nodes, "local_sgd": 0.125}.get(
        sync, 1.0
    )
    return 2 * (nodes - 1) / nodes * BYTES * shrink


def memory(sync, nodes):
    """Return the bytes of a rank's tensors with AdamW; ``topk`` keeps a residual."""
    return {
        "parameters": BYTES,
        "gradients": BYTES,
        "optimizer_state": 2 * BYTES // (nodes if sync == "sharded" else 1),
        "buckets": BYTES if sync == "topk" else 0,
        "untrained": 30_000,
    }


def cell(
    sync,
    nodes,
    *,
    repeats=3,
    status="done",
    message=None,
    batch=256,
    scaling="strong",
    group=0,
    rate=None,
    scale=1.0,
    seeds=(0,),
    steps=30,
    oversubscribed=False,
    accuracy=None,
    wait=WAIT,
    loss_shift=0.0,
):
    """Return one cell; failed and pending cells have no numbers."""
    name = f"{sync}-n{nodes}" + (f"-{rate}" if rate else "")
    result = {
        "id": name + (f"-g{group}" if group else ""),
        "sync": sync,
        "nodes": nodes,
        "rate": rate,
        "batch_size": batch * nodes if scaling == "weak" else batch,
        "exact": sync not in LOSSY,
        "group": group,
        "oversubscribed": oversubscribed,
        "status": status,
        "message": message,
        "repeats": [],
        "median": None,
        "interval": None,
    }
    if status in ("failed", "pending"):
        return result
    compute = scale / (1 if scaling == "weak" else nodes)
    wire = 0.0 if nodes == 1 else WIRE[sync] * (nodes - 1) * scale
    wait = 0.0 if nodes == 1 else wait
    middle = {
        **{part: share * compute for part, share in SHARES.items()},
        "wait": wait,
        "wire": wire,
        "sync": wait + wire,
        "step": compute + wait + wire,
        "peak_memory_bytes": (520 + 4 * nodes + len(sync)) * 1e6,
        "root_bytes_sent": 0.0 if nodes == 1 else sent(sync, nodes, 0),
        "others_bytes_sent": None if nodes == 1 else sent(sync, nodes, 1),
    }
    counted = ("peak_memory_bytes", "root_bytes_sent", "others_bytes_sent")
    for repeat in range(repeats):
        factor = 1 + 0.01 * (repeat - (repeats - 1) // 2)
        seed = seeds[repeat % len(seeds)]
        ranks = [
            {
                "rank": rank,
                "host": f"node{rank}",
                "threads": 1,
                "messages": 34.0,
                "seconds": {
                    key: value * factor for key, value in middle.items() if key not in counted
                },
                "peak_memory_bytes": int(
                    middle["peak_memory_bytes"] + (rank - (nodes - 1) / 2) * 4e6
                ),
                "bytes_sent": 0.0 if nodes == 1 else sent(sync, nodes, rank),
                "memory": memory(sync, nodes),
                "predicted_memory": memory(sync, nodes),
            }
            for rank in range(nodes)
        ]
        result["repeats"].append(
            {
                "folder": f"PartTwo-{sync}/{repeat}",
                "seed": seed,
                "status": "done",
                "ranks": ranks,
                "losses": [
                    [step, loss(sync, step, seed, nodes) + (loss_shift if step > 1 else 0.0)]
                    for step in range(1, steps + 1)
                ],
                "test_accuracy": None
                if accuracy is None
                else accuracy + 0.002 * (repeat - (repeats - 1) / 2),
                "seconds_to_accuracy": None,
                "steps_to_accuracy": None,
            }
        )
    result["median"] = middle
    result["interval"] = {
        key: [None, None]
        if repeats == 1 or value is None
        else [value, value]
        if key in counted
        else [value * 0.98, value * 1.02]
        for key, value in middle.items()
    }
    return result


def loss(sync, step, seed, nodes):
    """Return a step's loss: exact strategies differ in the seventh digit, lossy ones visibly."""
    base = (
        0.9
        + 1.5 * math.exp(-step / 12)
        + 0.06 * math.sin(1.7 * step + seed)
        + 0.01 * math.log2(nodes)
    )
    if sync in LOSSY:
        return base + 0.02 * (1 + LOSSY.index(sync)) * (1 - math.exp(-step / 10)) * (
            1 + 0.5 * math.sin(step)
        )
    return base + 1e-7 * (step - 1) * (ALL.index(sync) if sync in ALL else 0)


def timeline(sync, nodes, *, messages=6, overlapped=False):
    """Return a step in which each rank's backward pass ends 4 ms after the previous rank's."""
    ranks = []
    for rank in range(nodes):
        end = 0.40 + 0.004 * rank
        begin, size = (0.22, 0.035) if overlapped else (0.40 + 0.004 * (nodes - 1), 0.012)
        sends = [
            {
                "kind": "all_reduce",
                "bytes": BYTES // messages,
                "sent_bytes": BYTES / messages,
                "begin": begin + index * size * 0.9,
                "end": begin + index * size * 0.9 + size * (1 if not overlapped else 1.4),
            }
            for index in range(messages)
        ]
        last = max(send["end"] for send in sends)
        ranks.append(
            {
                "rank": rank,
                "messages": sends,
                "sections": {
                    "data": [[0.0, 0.006]],
                    "forward": [[0.006, 0.14]],
                    "backward": [[0.14, end]],
                    "sync": [[end, max(last, end)]],
                    "update": [[max(last, end), max(last, end) + 0.01]],
                },
            }
        )
    return {"format": 1, "step": 36, "sync": sync, "ranks": ranks}


def predicted(entry, error):
    """Return a prediction with the relative error ``error``, in scope up to two nodes."""
    nodes = entry["nodes"]
    return {
        "step_seconds": entry["median"]["step"] * (1 + error),
        "compute_seconds": 1 / nodes,
        "sync_seconds": 0.1,
        "in_scope": nodes <= 2,
        "why": "" if nodes <= 2 else "more ranks than cores",
        "bytes_sent": [
            0.0 if nodes == 1 else sent(entry["sync"], nodes, rank) for rank in range(nodes)
        ],
    }


def results(
    syncs=(
        "gather_scatter",
        "all_reduce",
        "ring",
        "overlapped",
        "ddp",
        "ddp_fp16",
    ),
    nodes=(1, 2, 4),
    *,
    predict=True,
    emulated=False,
    accuracy=None,
    **options,
):
    """Return a whole comparison; ``options`` go to every ``cell``."""
    cells = [cell("none", 1, accuracy=accuracy, **options)] if 1 in nodes else []
    cells += [
        cell(sync, count, accuracy=accuracy, oversubscribed=count > 2, **options)
        for count in nodes
        if count > 1
        for sync in syncs
    ]
    calibration = {"made": "2026-11-21T14:50:00", "alpha": 1.2e-4, "beta": 9e-10, "gamma": 3e-10}
    prediction = {
        "made": "2026-11-21T14:59:58",
        "calibration": calibration,
        "cells": {
            entry["id"]: predicted(entry, 0.05 + 0.04 * (index % 6))
            for index, entry in enumerate(cells)
            if entry["median"]
        },
    }
    return {
        "format": 1,
        "kind": "compare",
        "created": "2026-11-21T15:00:00",
        "finished": True,
        "emulated": emulated,
        "settings": {
            "dataset": "cifar10",
            "model": "vgg11",
            "scaling": options.get("scaling", "strong"),
            "batch_size": 256,
            "steps": 30,
            "warmup": 5,
            "repeats": options.get("repeats", 3),
            "seeds": list(options.get("seeds", (0,))),
            "nodes": list(nodes),
            "sync": list(syncs),
            "rates": [None],
            "until_accuracy": None,
            "command": "lab compare --nodes "
            + " ".join(map(str, nodes))
            + " --sync "
            + " ".join(syncs),
        },
        "environment": {
            "python": "3.11.7",
            "system": "Linux-6.1-x86_64",
            "cpu": "a processor",
            "cores": 2,
            "usable_cores": 2,
            "threads": 1,
            "gpus": [],
            "cuda": None,
            "torch": "2.15.0",
            "git_commit": "0" * 40,
            "git_changes": False,
        },
        "warnings": [
            "4 ranks share 2 cores: compute and waiting times on 4 nodes are not those of four "
            "machines."
        ]
        if max(nodes) > 2
        else [],
        "differences": [],
        "prediction": prediction if predict else None,
        "cells": cells,
        "timelines": {
            f"{sync}-n{count}": timeline(sync, count, overlapped=sync in ("overlapped", "ddp"))
            for sync in syncs[:4]
            for count in nodes
            if count > 1
        },
    }
