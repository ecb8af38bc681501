"""Measure what messages cost on the nodes at hand, for predictions of emulated nodes.

Start ``python -m lab.calibrate.link_probe --output FILE --kinds all_reduce ... --master-ip IP
--num-nodes N --rank R`` on each node; rank 0 writes the file (lab/predict/measured_links.py).
"""

import argparse
from pathlib import Path

import torch

from common.sync.message_cost import KINDS
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import encode
from lab.calibrate.link_measurements import measure_links


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
