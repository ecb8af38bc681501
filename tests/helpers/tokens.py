"""A rank that meets the others by the command line's flags, for tests of what launchers pass on.

    python tokens.py --master-ip A --master-port P --num-nodes N --rank R [--drop R]

Prints a digest of its token, then "met" or why it was refused. --drop : this rank has no token.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.distributed.launch_env import LaunchSpec
from common.distributed.meeting import meet
from common.errors import GroupError

parser = argparse.ArgumentParser()
parser.add_argument("--master-ip")
for name in ("--master-port", "--num-nodes", "--rank"):
    parser.add_argument(name, type=int)
parser.add_argument("--drop", type=int)
args = parser.parse_args()
launch = LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port)
print("token", hashlib.sha256(launch.token.encode()).hexdigest() if launch.token else "none")
if args.drop == args.rank:
    launch = LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port, token="")
try:
    store, _ = meet(launch, 8.0)
    store.add("ended", 1)
    deadline = time.monotonic() + 10
    while (
        launch.rank == 0
        and store.add("ended", 0) < launch.world_size
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)  # the others still use rank 0's store
    print("met")
except GroupError as error:
    print(error)
