"""Part One: VGG-11 on CIFAR-10 on a single node.

    python PartOne/main.py

One process, no communication: the baseline that the other parts are compared with. The walk from
here on is ``run`` in common/experiment/run.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.utils.dependencies import check_dependencies

check_dependencies()

from common.cli import main

if __name__ == "__main__":
    sys.exit(main("PartOne", path=sys.argv[0], description=__doc__, sync_choices=("none",)))
