"""A strategy as a contributor adds it: class, plan with an option, record.

``python own_strategy.py lab ...`` runs lab with it, and ``python own_strategy.py ...`` PartTwo.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
from msgspec import Meta

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tests  # its model "tiny"
from common.sync import STRATEGIES, Strategy, offered_by
from common.sync.base import FlatSync
from common.sync.message_cost import Operation
from common.sync.plans.base import ReplicatedPlan, option
from common.sync.plans.pieces import SentStep

NAME = "ddpish"  # begins like those of PartThree, which it is none of


@dataclass(kw_only=True)
class PiecesPlan(ReplicatedPlan):
    """Several all_reduces for each flat buffer."""

    pieces: Annotated[int, Meta(ge=1, le=8)] = option(2, "messages that carry a flat buffer")

    def operations(self, sizes: Sequence[int], ranks: int) -> list[Operation]:
        found = []
        for buffer in SentStep(sizes, ranks, vars(self)).pieces("buffer"):
            quotient, longer_ones = divmod(buffer.entries, self.pieces)
            for number in range(self.pieces):
                entries = quotient + 1 if number < longer_ones else quotient
                nbytes = entries * buffer.itemsize
                found.append(Operation("all_reduce", nbytes, copied_bytes=nbytes))
        return found


class Pieces(FlatSync):
    """An all_reduce for each piece of a flat buffer."""

    plan: PiecesPlan

    def sum_over_ranks(self, total):
        for piece in total.tensor_split(self.plan.pieces):
            dist.all_reduce(piece)


RECORD = Strategy(
    implementation="tests.helpers.own_strategy:Pieces",
    plan="tests.helpers.own_strategy:PiecesPlan",
    part="PartTwo",
    label="in pieces",
)

if __name__ == "__main__":
    STRATEGIES[NAME] = RECORD  # before the flags are made
    assert tests
    if sys.argv[1] == "lab":
        from lab.cli import main

        sys.exit(main(sys.argv[2:]))
    from common.cli import main as main_of_part

    choices = offered_by("PartTwo")
    sys.exit(main_of_part("PartTwo", path=sys.argv[0], description="", sync_choices=choices))
