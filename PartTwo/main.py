"""Part Two: the same training on several ranks, which average their gradients by hand.

    python PartTwo/main.py --distributed --world-size 2     # two ranks on this machine

or on every machine, with its own --rank (0, 1, 2, 3):

    python PartTwo/main.py --master-ip 10.0.0.1 --num-nodes 4 --rank 0 --sync all_reduce

To read the code, begin with docs/examples/four_ways.py: loop and gradients on one page. Then read
``run`` in common/experiment/run.py.

What changes from Part One: each rank computes its share of every global batch. Between
``backward`` and the optimiser's step, the ranks average their gradients. Each strategy of --sync
is a short file in common/sync/: the assignment's gather_scatter and all_reduce; faster ones (flat
buffers, trees, rings, buckets sent during ``backward``); and two that send less (topk, local_sgd).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.utils.dependencies import check_dependencies

check_dependencies()

from common.cli import main
from common.sync import BY_HAND

if __name__ == "__main__":
    sys.exit(main("PartTwo", path=sys.argv[0], description=__doc__, sync_choices=BY_HAND))
