"""Compare exchanges of VGG-11's 37 MB of gradients on emulated nodes with the links' ideal time.

    python benchmarks/cluster.py --nodes 4 --rate 200mbit 1gbit

Each rate gets its own cluster (lab/cluster) with one network namespace per node; tbf shapes both
directions. All strategies take turns in one process group. Nothing computes: the gradients exist
already, as in benchmarks/sync.py.

- ideal: the seconds that the busiest link needs for its payload at the link's rate: 2(N-1)M/B
  through a root's link, 2(N-1)/N M/B in a ring. This includes neither headers nor latency; the
  headers of TCP, IP and Ethernet alone make it 1.06 times as long.
- over ideal: measured over ideal seconds, as the median of the rounds with a 95 % interval (10,000
  bootstrap samples).
- cores busy: the share of this machine's cores that was busy meanwhile, from /proc/stat. Near 100 %
  the machine is the limit, not the link.
- ready, open: seconds until the cluster was ready (torch imported once), and from the start of the
  nodes' programs until all had joined the process group.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from loader import SEED, describe_machine, parse_flags, whole_number
from sync import Exchange, shown

from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import process_group
from common.models import build_model
from common.sync.message_cost import GradientSize
from common.utils.processes import GRACE_SECONDS
from common.utils.system import tune_malloc
from lab.cluster import Cluster
from lab.units import parse_rate

_WARM_UP_ROUNDS = 2
_LIMIT_SECONDS = 1800.0
_THROUGH_ROOT = ("gather_scatter", "gather_scatter_flat")
_RINGS = ("all_reduce", "all_reduce_flat", "ring")


def measure(rank: int, size: int, master: str, *, rounds: int, output: Path) -> None:
    """Run one rank; rank 0 writes the seconds and the busy cores of each round, by strategy."""
    tune_malloc()
    torch.set_num_threads(1)
    torch.manual_seed(SEED + rank)
    with process_group(LaunchSpec(rank, size, master), backend="gloo", timeout_seconds=120):
        met = time.time()
        examples = [torch.randn_like(p) * 1e-3 for p in build_model("vgg11", 10).parameters()]
        exchanges = {name: Exchange(name, examples) for name in (*_THROUGH_ROOT, *_RINGS)}
        found = {name: {"seconds": [], "busy": []} for name in exchanges}
        for number in range(_WARM_UP_ROUNDS + rounds):
            in_turn = list(exchanges)
            if number % 2 == 0:
                in_turn.reverse()
            for name in in_turn:
                psutil.cpu_percent()
                seconds = exchanges[name].measure()
                if number >= _WARM_UP_ROUNDS:
                    found[name]["seconds"].append(seconds)
                    found[name]["busy"].append(psutil.cpu_percent())
    if rank == 0:
        output.write_text(json.dumps({"met": met, "found": found}))


def on_cluster(nodes: int, rate: str, rounds: int) -> dict:
    """Measure on a new cluster; return rank 0's results and the seconds until it was up."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found.json")
        began = time.monotonic()
        with Cluster(nodes, rate=rate, logs=Path(folder)) as cluster:
            ready = time.monotonic() - began
            started = time.time()
            cluster.start(
                [
                    "python",
                    __file__,
                    "--rank",
                    "{rank}",
                    "--master",
                    "{master}",
                    "--nodes",
                    str(nodes),
                    "--rounds",
                    str(rounds),
                    "--output",
                    str(output),
                ]
            )
            ends = cluster.wait(limit_seconds=_LIMIT_SECONDS, grace_seconds=GRACE_SECONDS)
            if any(end.status for end in ends):
                sys.exit(f"error: node {ends[0].node} failed:\n{cluster.output(ends[0].node)}")
        found = json.loads(output.read_text())
    return found | {"ready": ready, "met": found["met"] - started}


def ideal_seconds(name: str, nbytes: int, nodes: int, rate_bits: float) -> float:
    """Return the seconds that the busiest link needs for its payload."""
    copies = 2 * (nodes - 1)
    if name not in _THROUGH_ROOT:
        copies /= nodes
    return 8 * copies * nbytes / rate_bits


def main() -> None:
    """Measure and print; with --rank, run one of the nodes."""
    flags = {
        "--nodes": {"type": whole_number, "default": 4, "help": "number of nodes (default: 4)"},
        "--rate": {
            "nargs": "+",
            "default": ["200mbit", "1gbit"],
            "help": "rates of the links (default: 200mbit 1gbit)",
        },
        "--rounds": {
            "type": whole_number,
            "default": 7,
            "help": "rounds to measure, after two warm-up rounds (default: 7)",
        },
        "--rank": {"type": int, "help": argparse.SUPPRESS},
        "--master": {"help": argparse.SUPPRESS},
        "--output": {"type": Path, "help": argparse.SUPPRESS},
    }
    arguments = parse_flags(__doc__, flags)
    if arguments.rank is not None:
        measure(
            arguments.rank,
            arguments.nodes,
            arguments.master,
            rounds=arguments.rounds,
            output=arguments.output,
        )
        return
    nbytes = sum(GradientSize.of(build_model("vgg11", 10).parameters()))
    print(describe_machine())
    for rate in arguments.rate:
        found = on_cluster(arguments.nodes, rate, arguments.rounds)
        print(
            f"\n{arguments.nodes} nodes, {rate} in each direction, {nbytes / 1e6:.1f} MB, "
            f"{arguments.rounds} rounds; cluster ready after {found['ready']:.1f} s, process group "
            f"open {found['met']:.1f} s after the programs' start"
        )
        print(f"{'':<21}{'ideal s':<10}{'seconds':<28}{'over ideal':<26}cores busy")
        for name, rounds in found["found"].items():
            ideal = ideal_seconds(name, nbytes, arguments.nodes, parse_rate(rate))
            print(
                f"{name:<21}{ideal:<10.3f}{shown(rounds['seconds'], '.3f'):<28}"
                f"{shown([s / ideal for s in rounds['seconds']], '.2f'):<26}"
                f"{shown(rounds['busy'], '.0f')} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
