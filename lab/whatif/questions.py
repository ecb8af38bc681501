"""Read and check questions.toml: what the page of ``lab whatif`` asks before it shows a picture.

questions.js computes the answers. Imports no torch.
"""

import tomllib
from collections.abc import Collection
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from common.errors import UserError, file_errors
from common.sync import STRATEGIES
from common.utils.registry import choices_text
from lab.whatif.data import State
from lab.whatif.measured import published_sets

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
    preset: str | None = None
    set: str | None = None
    changes: dict[str, Any]
    asked: Asked
    unit: Unit
    range: tuple[float, Annotated[float, Meta(gt=0)]]
    measured: str | None = None
    explanation: str
    values: dict[str, Asked]


def questions_path() -> Path:
    """Return the questions that come with the project."""
    return Path(__file__).with_name("questions.toml")


def load_questions(path: Path | None = None) -> list[dict[str, Any]]:
    """Return the questions as the page reads them; None: those of the project.

    Raises UserError with the question's number if an entry is unknown, missing or impossible.
    """
    path = path or questions_path()
    with file_errors(f"{path} cannot be read"):
        text = path.read_text(encoding="utf-8")
    try:
        entries = tomllib.loads(text).get("question", [])
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    presets = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
    sets = [found.id for found in published_sets()]
    questions = []
    for number, entry in enumerate(entries, 1):
        where = f"{path.name}, question {number}"
        try:
            question = msgspec.convert(entry, PageQuestion)
        except msgspec.ValidationError as error:
            raise UserError(f"{where}: {error}") from error
        _check_name(question.preset, presets, f"{where}: preset")
        _check_name(question.set, sets, f"{where}: set")
        _check(question, where)
        questions.append(msgspec.to_builtins(question))
    return questions


def _check(question: PageQuestion, where: str) -> None:
    """Raise UserError if the entries of a question do not fit each other."""
    if (question.preset is None) == (question.set is None):
        raise UserError(f"{where}: give a preset or a set to begin with, one of them")
    for name in question.changes:
        _check_name(name, State.__struct_fields__, f"{where}: changes")
    for asked in (question.asked, *question.values.values()):
        _check_asked(asked, where)
    for sentence in (question.text, question.explanation):
        for _, field, _, _ in Formatter().parse(sentence):
            _check_name(field, ["answer", *question.values], f"{where}: a name in {{}}")
    least, most = question.range
    if least >= most:
        raise UserError(f"{where}: range: got {least:g} to {most:g}, give the smaller number first")


def _check_asked(asked: Asked, where: str) -> None:
    other = dict(asked.than)
    for strategy in (asked.strategy, other.pop("strategy", asked.strategy)):
        _check_name(strategy, STRATEGIES, f"{where}: strategy")
    for name in other | asked.changes:
        _check_name(name, State.__struct_fields__, f"{where}: than or changes")
    needed = _NEEDS.get(asked.quantity)
    if needed is not None and not getattr(asked, needed):
        raise UserError(f"{where}: the quantity {asked.quantity} needs {needed!r}")


def _check_name(name: str | None, known: Collection[str], where: str) -> None:
    if name is not None and name not in known:
        raise UserError(f"{where}: got {name!r}, {choices_text(name, list(known))}")
