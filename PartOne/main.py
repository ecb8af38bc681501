"""Part One: train VGG-11 on CIFAR-10 with one process.

    python PartOne/main.py

There is no communication: this is the baseline for the other parts. To read the code, begin with
docs/examples/four_ways.py, which trains in all four ways on one page; then read ``run`` in
common/experiment/run.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.utils.dependencies import check_dependencies

check_dependencies()

from common.cli import main

if __name__ == "__main__":
    sys.exit(main("PartOne", path=sys.argv[0], description=__doc__, sync_choices=("none",)))
