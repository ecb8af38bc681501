"""``PartTwo/main.py`` with wrong code behind three names, for tests of reports."""

import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.cli import main
from common.sync import BY_HAND, STRATEGIES
from tests.helpers.wrong_strategies import Mean

WRONG = {
    "ring": f"{__name__}:Literal4",
    "tree": "tests.helpers.wrong_strategies:Sum",
    "halving_doubling": f"{__name__}:OwnOnRank1",
    "reduce_broadcast": "tests.helpers.wrong_strategies:OwnGradient",
}


class Literal4(Mean):
    """The sum is divided by a literal 4, which is right on four ranks only."""

    def average(self, gradient):
        dist.all_reduce(gradient)
        gradient /= 4


class OwnOnRank1(Mean):
    """Rank 1 sends its gradients and then steps with its own."""

    def average(self, gradient):
        own = gradient.clone()
        super().average(gradient)
        if dist.get_rank() == 1:
            gradient.copy_(own)


if __name__ == "__main__":
    for name, wrong in WRONG.items():
        STRATEGIES[name] = replace(STRATEGIES[name], implementation=wrong)
    sys.exit(main("PartTwo", path=sys.argv[0], description="", sync_choices=BY_HAND))
