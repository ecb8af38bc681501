"""Part Three: the same training with PyTorch's own DistributedDataParallel.

    python PartThree/main.py --distributed --world-size 2     # two ranks on this machine

or on every machine, with its own --rank (0, 1, 2, 3):

    python PartThree/main.py --master-ip 10.0.0.1 --num-nodes 4 --rank 0

To read the code, begin with docs/examples/four_ways.py: loop and gradients on one page. Then read
``run`` in common/experiment/run.py.

What changes from Part Two: DistributedDataParallel averages the gradients in buckets while
``backward`` still computes the others (common/sync/ddp.py); on GPUs over NCCL, with automatic mixed
precision and a GPU for each rank (fewer are an error). Two more strategies send less, through
torch's own hooks: --sync ddp_fp16 and --sync ddp_powersgd. They change the gradients, which fp16's
loss scaling does not allow, so mixed precision is bf16 there. And two share out what every rank
else holds: the optimiser's state with --sync ddp_zero1, everything with --sync fsdp.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.utils.dependencies import check_dependencies

check_dependencies()

from common.cli import main
from common.sync import BUILT_IN

if __name__ == "__main__":
    sys.exit(main("PartThree", path=sys.argv[0], description=__doc__, sync_choices=BUILT_IN))
