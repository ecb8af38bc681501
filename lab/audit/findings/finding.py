"""``Finding``: something that an audit found, with its evidence; texts are in catalogue.toml."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from common.say import counts
from lab.audit.records import CodeLine
from lab.evidence import CURES

FAULT = "fault"


@dataclass(frozen=True)
class CatalogueEntry:
    """What is said about every finding of a name.

    severity : "fault" (exit status 1) or "notice".
    broken : the property that does not hold, see properties.py; "" for a notice.
    evidence : a sentence with places for values, or several by kind.
    explains : the findings that follow from it, and are left out where both are found in a run.
    unequal : with it the ranks train something else than one process would.
    """

    name: str
    severity: str
    title: str
    cause: str
    cure: str
    broken: str = ""
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
    condition : what it supposes and the records leave open, as "the ranks are replicas".
    """

    name: str
    evidence: tuple[str, ...]
    at: CodeLine | None = None
    sure: str = "certain"
    sizes: tuple[int, ...] = ()
    value: float | None = None
    condition: str = ""

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
    sureness = "certain" if sure else "likely"
    return Finding(name, (sentence.format(**values),), at, sureness, value=compare)


@dataclass(frozen=True)
class Right:
    """Something that was looked at and is right.

    of : the property that holds there, see properties.py.
    text : one short sentence without a full stop, e.g. "every rank trains on different samples".
    """

    of: str
    text: str


@dataclass(frozen=True)
class Unknown:
    """Something that was not seen: ``of`` which property, see properties.py; ``text`` says why."""

    of: str
    text: str


Outcome = Finding | Right | Unknown


def gravest(outcomes: Iterable[Outcome | None]) -> Outcome | None:
    """Return the first finding, else what is unknown, else what is right; None without any."""
    order = (Finding, Unknown, Right)
    told = [outcome for outcome in outcomes if outcome is not None]
    return min(told, key=lambda outcome: order.index(type(outcome)), default=None)


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Return the entries of catalogue.toml by name, in its order, with the cures of the rules."""
    content = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    for name, cure in CURES.items():
        content[name]["cure"] = cure
    return {name: CatalogueEntry(name, **texts) for name, texts in content.items()}


def merge(found: Sequence[Finding]) -> list[Finding]:
    """Return one finding a name, in the catalogue's order, with the evidence and sizes of all."""
    merged = []
    for name in catalogue():
        same = [finding for finding in found if finding.name == name]
        if same:
            merged.append(_merge_same(same))
    return merged


def _merge_same(same: Sequence[Finding]) -> Finding:
    """Return findings of one name as one."""
    certain = any(finding.sure == "certain" for finding in same)
    sentences: dict[str, set[int]] = {}  # each once, with the numbers of ranks that it speaks of
    for finding in same:
        for sentence in finding.evidence:
            sentences.setdefault(sentence, set()).update(finding.sizes)
    sizes = {size for finding in same for size in finding.sizes}
    return replace(
        same[0],
        evidence=tuple(_on_ranks(held, sentence) for sentence, held in sentences.items()),
        at=next((finding.at for finding in same if finding.at), None),
        sure="certain" if certain else "likely",
        sizes=tuple(sorted(sizes)),
    )


def _on_ranks(sizes: set[int], sentence: str) -> str:
    """Return a sentence with the numbers of ranks of the runs in which it holds."""
    return f"on {counts(sizes, 'rank')}: {sentence}" if sizes else sentence
