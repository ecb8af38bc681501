"""What messages take on the nodes at hand: the part of a prediction for emulated nodes that must be measured there, in seconds.

On each node ``python -m lab.calibrate.link_probe --output FILE --kinds all_reduce ... --master-ip
IP --num-nodes N --rank R``; rank 0 writes the file. ``network_from`` makes of it what
common/cost_model/event_model.py needs: for each kind of operation max(alpha1, ideal x 1.06 +
alpha0), alpha1 from messages of 1 KB, alpha0 from messages of 2 MB, and for buffers in memory what
they take while all ranks copy.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.cost_model.event_model import HEADERS, Network, Rate, loads
from common.profiling.link_measurements import message_call, time_memory
from common.sync.message_cost import KINDS
from common.utils.atomic_files import write_atomically

SMALL, LARGE, LARGEST = 1_024, 2_000_000, 8_000_000
_SMALL_CALLS, _SMALL_ROUNDS, _LARGE_CALLS, _LARGE_ROUNDS, _WARM_UP_CALLS = 20, 5, 2, 3, 1
_IN_PAIRS = {"gather": "scatter", "scatter": "gather", "reduce": "broadcast", "broadcast": "reduce"}
"""As the strategies use them: what one rank collects it also gives out. A sender alone would be timed until it has filled a
buffer."""


def measure_links(rank: int, size: int, *, kinds: Sequence[str], shaped: bool) -> dict[str, Any]:
    """Measure in the open process group; return "nodes", for each kind [bytes, seconds of one] rows, and seconds a byte that is
    summed and copied. Collective.

    shaped : the links' rate is known, so that messages of one size tell the rest.
    """
    sizes = [(SMALL, _SMALL_CALLS, _SMALL_ROUNDS), (LARGE, _LARGE_CALLS, _LARGE_ROUNDS)]
    sizes += [] if shaped else [(LARGEST, _LARGE_CALLS, _LARGE_ROUNDS)]
    found: dict[str, list[list[float]]] = {}
    for kind in KINDS:
        if kind not in kinds:
            continue
        pair = [
            message_call(one, rank, size) for one in (kind, _IN_PAIRS.get(kind)) if one is not None
        ]
        twin = _IN_PAIRS.get(kind)
        found[kind] = (
            found[twin]
            if twin in found
            else [
                [nbytes, _seconds(pair, nbytes, calls=calls, rounds=rounds)]
                for nbytes, calls, rounds in sizes
            ]
        )
    memory = time_memory(torch.zeros(24_000_000))
    per_byte = {
        name: _slowest(statistics.median(seconds / nbytes for nbytes, seconds in rows))
        for name, rows in memory.items()
    }
    return {"nodes": size, "kinds": found, "sum": per_byte["sum"], "copy": per_byte["copy"]}


def _seconds(
    calls_in_turn: Sequence[Callable[[Tensor], object]], nbytes: int, *, calls: int, rounds: int
) -> float:
    """Seconds of one call, the median over rounds of ``calls`` in a row on the slowest rank. The first ones of a row are
    not timed: a link that was idle lets some bytes pass at once."""
    tensor, taken = torch.zeros(nbytes // 4), []
    for _ in range(rounds):
        dist.all_reduce(torch.zeros(1))
        for number in range(_WARM_UP_CALLS + calls):
            if number == _WARM_UP_CALLS:
                began = time.perf_counter()
            for call in calls_in_turn:
                call(tensor)
        taken.append(_slowest(time.perf_counter() - began) / calls / len(calls_in_turn))
    return statistics.median(taken)


def _slowest(seconds: float) -> float:
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def network_from(found: Mapping[str, Any], *, rate_bits: float | None) -> Network:
    """Return the network that ``measure_links`` found, on links of ``rate_bits`` a second; None: as fast as they were there."""
    kinds = {}
    for kind, rows in found["kinds"].items():
        (_, floor), *larger = rows
        points = [(seconds, *loads(kind, nbytes, found["nodes"])[:2]) for nbytes, seconds in larger]
        seconds, messages, link_bytes = points[0]
        if rate_bits is not None:
            beta = 8 * HEADERS / rate_bits
        else:
            beta = max(0.0, (points[-1][0] - seconds) / (points[-1][2] - link_bytes))
        kinds[kind] = Rate(max(0.0, seconds - beta * link_bytes) / messages, beta, floor)
    first = next(iter(kinds.values()))
    return Network(
        first.alpha_seconds, first.beta_seconds_per_byte, found["sum"], found["copy"], kinds
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Be one rank, from the command line; return the exit status."""
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
    args = parser.parse_args(arguments)
    tune_malloc()
    with process_group(
        LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port), backend="gloo"
    ) as world:
        torch.set_num_threads(max(1, usable_cores() // world.local_size))
        found = measure_links(world.rank, world.size, kinds=args.kinds, shaped=args.shaped)
        if world.is_rank0:
            write_atomically(args.output, json.dumps(found, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
