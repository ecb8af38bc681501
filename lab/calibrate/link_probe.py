"""Measure what messages cost on the nodes at hand, for predictions of emulated nodes.

Start ``python -m lab.calibrate.link_probe --output FILE --all all_reduce ... --master-ip IP
--num-nodes N --rank R`` on each node; rank 0 writes the file (lab/predict/measured_links.py). With
``--ranks-per-node K`` the kinds after ``--node`` are measured inside all nodes at once, those after
``--leaders`` between the first ranks of the nodes.
"""

import argparse
from pathlib import Path
from typing import Any, get_args

import torch

from common.distributed.node_groups import open_group_of
from common.sync.message_cost import KINDS, Among
from common.sync.node_layout import NodeLayout
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import encode
from lab.calibrate.link_measurements import RankGroup, measure_links
from lab.flags import add_flags
from lab.predict.measured_links import ProbedLinks


def main() -> None:
    """Run one rank with the flags of the command line."""
    from common.distributed.launch_env import LaunchSpec
    from common.distributed.process_group import process_group
    from common.utils.system import tune_malloc, usable_cores

    parser = argparse.ArgumentParser(prog="lab.calibrate.link_probe")
    number = {"type": int, "required": True}
    flags: dict[str, dict[str, Any]] = {
        "--output": {"type": Path, "required": True},
        **{
            f"--{among}": {"nargs": "*", "choices": KINDS, "default": []}
            for among in get_args(Among)
        },
        "--ranks-per-node": {"type": int, "default": 1},
        "--shaped": {"action": "store_true"},
        "--master-ip": {"required": True},
        **dict.fromkeys(("--master-port", "--num-nodes", "--rank"), number),
    }
    add_flags(parser, flags)
    args = parser.parse_args()
    tune_malloc()
    with process_group(
        LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port), backend="gloo"
    ) as world:
        torch.set_num_threads(max(1, usable_cores() // world.local_size))
        found = ProbedLinks()
        for among, group in _groups(world.rank, world.size, args.ranks_per_node).items():
            if kinds := getattr(args, among):
                # Only a node's link has a known rate.
                shaped = args.shaped and among != "node"
                links = measure_links(
                    world.rank, world.size, kinds=kinds, shaped=shaped, among=group
                )
                setattr(found, among, links)
        if world.is_rank0:
            write_atomically(args.output, encode(found, indent=1))


def _groups(rank: int, size: int, ranks_per_node: int) -> dict[Among, RankGroup]:
    """Return the groups of this rank. Collective."""
    layout = NodeLayout.even(size, ranks_per_node)
    groups: dict[Among, RankGroup] = {"all": RankGroup(range(size))}
    if ranks_per_node > 1:
        for node in range(len(layout.sizes)):
            ranks = layout.ranks_of(node)
            group = open_group_of(ranks)
            if rank in ranks:
                groups["node"] = RankGroup(ranks, group)
        groups["leaders"] = RankGroup(layout.leaders, open_group_of(layout.leaders))
    return groups


if __name__ == "__main__":
    main()
