"""What an audit looks at: each property of data-parallel training, and whether it held.

``PROPERTIES`` lists them in the order of a report. Each outcome of a check belongs to one, see
finding.py. A property that nothing says anything about does not occur in the program: it has no
row.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

State = Literal["held", "broken", "not seen"]

PROPERTIES: Mapping[str, str] = {
    "end": "the program comes to its end",
    "collectives": "all ranks call the same collectives",
    "gradients": "every update uses the mean of the ranks' gradients",
    "updates": "every gradient reaches the weights once, at its own scale",
    "weights": "the ranks start with equal weights and keep them equal",
    "loads": "what is loaded fits the model",
    "samples": "the ranks train on different samples",
    "coverage": "an epoch has each sample once",
    "order": "every epoch has another order",
    "batches": "the ranks have equally many batches",
    "in step": "the ranks skip batches and updates together",
    "augmentation": "the ranks make their samples with different random numbers",
    "evaluation": "evaluations count each sample once, and those of all ranks",
    "files": "no two ranks write one file at once",
    "global batch": "all ranks together train on the batch that was asked for",
    "clocks": "the times that the script prints are of whole steps",
}
"""What each says, by its name."""


class PropertyRow(msgspec.Struct):
    """What is said of a property.

    Parameters
    ----------
    name : a key of ``PROPERTIES``.
    state : "broken" if a fault says so; else "not seen" if anything of it could not be looked at,
        for the reasons in ``said``; else "held".
    said : what was looked at, or why not, or what is broken; sentences without a full stop.
    """

    name: str
    state: State
    said: Sequence[str]

    @property
    def claim(self) -> str:
        """What the property is, in words."""
        return PROPERTIES[self.name]


def property_rows(
    broken: Mapping[str, Sequence[str]],
    unseen: Mapping[str, Sequence[str]],
    held: Mapping[str, Sequence[str]],
) -> list[PropertyRow]:
    """Return a row for each property that occurs, in the order of ``PROPERTIES``.

    broken, unseen, held : what is said of it, by its name.
    """
    rows = []
    for name in PROPERTIES:
        said = [*broken.get(name, ()), *unseen.get(name, ()), *held.get(name, ())]
        if said:
            state: State = "held"
            if name in broken:
                state = "broken"
            elif name in unseen:
                state = "not seen"
            rows.append(PropertyRow(name, state, said))
    return rows
