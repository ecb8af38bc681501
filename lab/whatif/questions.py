"""Read and check questions.toml: what the page of ``lab whatif`` asks before it shows a picture.

questions.js computes the answers. Imports no torch.
"""

import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from string import Formatter
from typing import Any, Literal

import msgspec
from msgspec import Struct

from common.errors import UserError
from common.sync import STRATEGIES
from common.utils.registry import choices_text
from lab.whatif.data import State
from lab.whatif.measured import published_sets

_PATH = Path(__file__).with_name("questions.toml")
_NEEDS = {"ratio": "than", "longer": "than", "gain": "change", "best": "change"}
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


def load_questions(path: Path = _PATH) -> list[dict[str, Any]]:
    """Return the questions as the page reads them.

    Raises UserError with the question's number if an entry is unknown, missing or impossible.
    """
    presets = tomllib.loads(_PATH.with_name("presets.toml").read_text(encoding="utf-8"))
    starts = [*presets, *(found.id for found in published_sets())]
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["question"]
    questions = []
    for number, entry in enumerate(entries, 1):
        where = f"{path.name}, question {number}"
        try:
            question = msgspec.convert(entry, PageQuestion)
        except msgspec.ValidationError as error:
            raise UserError(f"{where}: {error}") from error
        for key, name, known in _names(question, starts):
            if name not in known:
                raise UserError(f"{where}: {key}: got {name!r}, {choices_text(name, known)}")
        questions.append(msgspec.to_builtins(question))
    return questions


def _names(
    question: PageQuestion, starts: Collection[str]
) -> Iterator[tuple[str, str, Collection[str]]]:
    """Yield each name in a question: where it stands, the name, and those that are known there."""
    keys = State.__struct_fields__
    yield "start", question.start, starts
    yield from (("changes", name, keys) for name in question.changes)
    for asked in (question.asked, *question.values.values()):
        yield "strategy", asked.strategy, STRATEGIES
        yield "strategy", asked.than.get("strategy", asked.strategy), STRATEGIES
        yield from (("than", name, [*keys, "strategy"]) for name in asked.than)
        yield from (("changes", name, keys) for name in asked.changes)
        needed = _NEEDS.get(asked.quantity)
        given = [name for name in _NEEDS.values() if getattr(asked, name)]
        if needed is not None:
            yield f"what {asked.quantity} needs", needed, given
    for sentence in (question.text, question.explanation):
        for _, field, _, _ in Formatter().parse(sentence):
            yield "a name in {}", field or "answer", ["answer", *question.values]
