"""Part Two: the same training on several ranks, gradients averaged by hand.

    python PartTwo/main.py --sync gather_scatter --master-ip 10.0.0.1 --num-nodes 4 --rank 0     # and 1, 2, 3
    python PartTwo/main.py --sync all_reduce     --master-ip 10.0.0.1 --num-nodes 4 --rank 0
    torchrun --nproc-per-node 2 PartTwo/main.py --sync all_reduce

What changes against Part One: each rank takes its share of every global batch, and between
``backward`` and the optimiser's step the gradients are averaged. Each way of ``--sync`` is a file
of one screen in common/sync/: the assignment's gather_scatter and all_reduce, and beside them what
improves on these (one flat buffer, trees, rings, buckets that are sent during ``backward``) and
what saves messages by sending less (topk, local_sgd).
"""  # noqa: E501 - shown by --help

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.utils.dependencies import check_dependencies

check_dependencies()

from common.cli import main
from common.sync import BY_HAND

if __name__ == "__main__":
    sys.exit(main("PartTwo", path=sys.argv[0], description=__doc__, sync_choices=BY_HAND))
