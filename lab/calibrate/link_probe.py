"""Measure what messages cost on the nodes at hand, for predictions of emulated nodes.

Start ``python -m lab.calibrate.link_probe --output FILE --kinds all_reduce ... --master-ip IP
--num-nodes N --rank R`` on each node; rank 0 writes the file. ``network_from`` turns it into the
network of common/cost_model/event_model.py: an operation takes max(alpha1, ideal x 1.06 + alpha0),
with alpha1 from messages of 1 KB and alpha0 from messages of 2 MB. Adding and copying buffers is
timed while all ranks do it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from msgspec import Meta, Struct
from torch import Tensor

from common.cost_model.event_model import HEADERS, ByteSeconds, MessageSeconds, Network, Rate, loads
from common.profiling.link_measurements import (
    FLOAT_BYTES,
    barrier,
    message_call,
    over_ranks,
    time_memory,
)
from common.sync.message_cost import KINDS
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import Count, Ranks, Text, encode

SMALL, LARGE, LARGEST = 1_024, 2_000_000, 8_000_000
_SMALL_CALLS, _SMALL_ROUNDS, _LARGE_CALLS, _LARGE_ROUNDS, _WARM_UP_CALLS = 20, 5, 2, 3, 1
_Rows = Annotated[list[tuple[Count, MessageSeconds]], Meta(min_length=2, max_length=3)]
# Strategies use these in pairs: a rank sends out what it has collected. A send timed alone would
# seem to end as soon as the message is in a buffer.
_IN_PAIRS = {"gather": "scatter", "scatter": "gather", "reduce": "broadcast", "broadcast": "reduce"}


class MeasuredLinks(Struct):
    """What ``measure_links`` found, and the file of it.

    kinds : rows (bytes, seconds of one message) by kind of operation, the smallest first.
    sum, copy : seconds a byte in memory.
    """

    nodes: Ranks
    kinds: Annotated[dict[Text, _Rows], Meta(min_length=1)]
    sum: ByteSeconds
    copy: ByteSeconds


def measure_links(rank: int, size: int, *, kinds: Sequence[str], shaped: bool) -> MeasuredLinks:
    """Measure in the open process group. Collective.

    shaped : the links' rate is known, so one large message size is enough.
    """
    sizes = [
        (SMALL, _SMALL_CALLS, _SMALL_ROUNDS),
        *((nbytes, _LARGE_CALLS, _LARGE_ROUNDS) for nbytes in (LARGE, LARGEST)),
    ]
    found: dict[str, list[tuple[int, float]]] = {}
    for kind in sorted(kinds, key=KINDS.index):
        twin = _IN_PAIRS.get(kind)
        pair = [message_call(one, rank, size) for one in (kind, twin) if one is not None]
        found[kind] = found.get(twin or "") or [
            (nbytes, _seconds(pair, nbytes, calls=calls, rounds=rounds))
            for nbytes, calls, rounds in (sizes[:2] if shaped else sizes)
        ]
    per_byte = {
        name: over_ranks(
            statistics.median(seconds / nbytes for nbytes, seconds in rows), dist.ReduceOp.MAX
        )
        for name, rows in time_memory(torch.zeros(24_000_000)).items()
    }
    return MeasuredLinks(size, found, per_byte["sum"], per_byte["copy"])


def _seconds(
    calls_in_turn: Sequence[Callable[[Tensor], object]], nbytes: int, *, calls: int, rounds: int
) -> float:
    """Return the seconds of one call on the slowest rank, the median over rounds.

    The first calls of a round are not timed: an idle shaped link lets some bytes pass at once.
    """
    tensor = torch.zeros(nbytes // FLOAT_BYTES)
    taken = []
    for _ in range(rounds):
        barrier()
        for number in range(_WARM_UP_CALLS + calls):
            if number == _WARM_UP_CALLS:
                began = time.perf_counter()
            for call in calls_in_turn:
                call(tensor)
        taken.append(
            over_ranks(time.perf_counter() - began, dist.ReduceOp.MAX) / calls / len(calls_in_turn)
        )
    return statistics.median(taken)


def network_from(found: MeasuredLinks, *, rate_bits: float | None) -> Network:
    """Return the network from what ``measure_links`` returned.

    rate_bits : of the links in a second; None: from the measured times of the two large message
        sizes.
    """
    kinds = {}
    for kind, rows in found.kinds.items():
        (_, floor), *larger = rows
        points = [(seconds, *loads(kind, nbytes, found.nodes)[:2]) for nbytes, seconds in larger]
        seconds, messages, link_bytes = points[0]
        if rate_bits is not None:
            beta = 8 * HEADERS / rate_bits
        else:  # the slope between the two
            beta = max(0.0, (points[-1][0] - seconds) / (points[-1][2] - link_bytes))
        kinds[kind] = Rate(max(0.0, seconds - beta * link_bytes) / messages, beta, floor)
    first = next(iter(kinds.values()))
    return Network(first.alpha_seconds, first.beta_seconds_per_byte, found.sum, found.copy, kinds)


def main() -> None:
    """Run one rank with the flags of the command line."""
    from common.distributed.launch_env import LaunchSpec
    from common.distributed.process_group import process_group
    from common.utils.system import tune_malloc, usable_cores

    parser = argparse.ArgumentParser(prog="lab.calibrate.link_probe")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True)
    parser.add_argument("--shaped", action="store_true")
    parser.add_argument("--master-ip", required=True)
    for name in ("--master-port", "--num-nodes", "--rank"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    tune_malloc()
    with process_group(
        LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port), backend="gloo"
    ) as world:
        torch.set_num_threads(max(1, usable_cores() // world.local_size))
        found = measure_links(world.rank, world.size, kinds=args.kinds, shaped=args.shaped)
        if world.is_rank0:
            write_atomically(args.output, encode(found, indent=1))


if __name__ == "__main__":
    main()
