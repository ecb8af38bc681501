"""Read questions.toml: what the page of ``lab whatif`` asks before it shows a picture.

questions.js computes the answers. Imports no torch.
"""

import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

_PATH = Path(__file__).with_name("questions.toml")
Unit = Literal["times", "s", "ms", "MB", "%", "nodes", "of 100"]


class Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    """A quantity of a strategy's step in the question's state with ``changes``.

    quantity : "step" and "compute" are times of a step, "exposed" the share of a step that waits
        for messages, "bytes" those that rank 0 sends; "speedup", "efficiency" as in lab predict.
        "ratio" is how many times as fast the step is as in the state with ``than``, "longer" the
        inverse. "gain" is that of ``change``, "best" the share of clusters in which ``change`` is
        the best purchase. "half" is the first number of nodes with an efficiency below 50 %.
    than, changes : keys of the state; ``than`` may also name another strategy.
    """

    quantity: Literal[
        "step", "compute", "exposed", "bytes", "speedup", "efficiency", "ratio", "longer", "gain",
        "best", "half",
    ]  # fmt: skip
    strategy: str
    than: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    change: Literal["network", "compute", "nodes", "no messages"] | None = None
    unit: Unit = "times"


class PageQuestion(Struct, forbid_unknown_fields=True, kw_only=True):
    """A question; questions.toml explains the entries."""

    id: str
    lesson: str
    text: str
    start: str
    changes: dict[str, Any]
    asked: Asked
    unit: Unit
    range: tuple[float, float]
    measured: str | None = None
    explanation: str
    values: dict[str, Asked]


def load_questions() -> list[dict[str, Any]]:
    """Return the questions as the page reads them."""
    entries = tomllib.loads(_PATH.read_text(encoding="utf-8"))["question"]
    questions: list[dict[str, Any]] = msgspec.to_builtins(
        msgspec.convert(entries, list[PageQuestion])
    )
    return questions
