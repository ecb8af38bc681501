"""``Finding``: something that an audit found, with its evidence; texts are in catalogue.toml."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lab.audit.recording import CodeLine

FAULT = "fault"


@dataclass(frozen=True)
class CatalogueEntry:
    """What is said about every finding of a name.

    severity : "fault" (exit status 1) or "notice".
    order : faults of a lower order come first: they explain others.
    evidence : a sentence with places for values, or several by kind.
    explains : the findings that follow from it, and are left out where both are found in a run.
    unequal : with it the ranks train something else than one process would.
    """

    name: str
    severity: str
    order: int
    title: str
    cause: str
    cure: str
    evidence: str | Mapping[str, str] = ""
    explains: Sequence[str] = ()
    unequal: bool = False

    @property
    def fails(self) -> bool:
        """Whether the ranks wait for each other, or fail, because of it."""
        return "collectives-differ" in (self.name, *self.explains)


@dataclass(frozen=True)
class Finding:
    """A fault or a notice of one name in a run, or in several runs of different sizes.

    Parameters
    ----------
    evidence : sentences with numbers, ranks and steps; the first is the strongest.
    at : the line of the script that shows it.
    sure : "certain" if the numbers leave no other explanation, else "likely".
    sizes : the numbers of ranks at which it was found.
    value : a number to compare with those of other sizes.
    """

    name: str
    evidence: tuple[str, ...]
    at: CodeLine | None = None
    sure: str = "certain"
    sizes: tuple[int, ...] = ()
    value: float | None = None

    @property
    def entry(self) -> CatalogueEntry:
        """The catalogue's texts. Raises KeyError for a name that it lacks."""
        return catalogue()[self.name]


def found(
    name: str,
    at: CodeLine | None = None,
    *,
    kind: str | None = None,
    sure: bool = True,
    compare: float | None = None,
    **values: object,
) -> Finding:
    """Return a finding whose evidence is the catalogue's sentence with ``values`` in its places.

    kind : which of the catalogue's sentences, where it has several.
    compare : a number to compare with those of other sizes.
    """
    evidence = catalogue()[name].evidence
    sentence = evidence if isinstance(evidence, str) else evidence[kind or ""]
    text = sentence.format(**values)
    return Finding(name, (text,), at, "certain" if sure else "likely", value=compare)


@dataclass(frozen=True)
class Right:
    """Something that was checked and is right.

    text : one short sentence without a full stop, e.g. "every rank trains on different samples".
    """

    text: str


@dataclass(frozen=True)
class Unknown:
    """Something that could not be checked: ``text`` says what, and why."""

    text: str


Outcome = Finding | Right | Unknown


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Return the entries of catalogue.toml by name."""
    content = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    return {
        name: CatalogueEntry(name=name, order=order, **texts)
        for order, (name, texts) in enumerate(content.items())
    }


def merge(found: list[Finding]) -> list[Finding]:
    """Return one finding a name, faults first, with the evidence and sizes of all of them."""
    merged: dict[str, Finding] = {}
    for one in found:
        known = merged.get(one.name)
        merged[one.name] = (
            one
            if known is None
            else replace(
                known,
                evidence=tuple(dict.fromkeys([*known.evidence, *one.evidence])),
                at=known.at or one.at,
                sure="certain" if "certain" in (known.sure, one.sure) else "likely",
                sizes=tuple(sorted({*known.sizes, *one.sizes})),
            )
        )
    return sorted(merged.values(), key=lambda one: (one.entry.severity != FAULT, one.entry.order))
