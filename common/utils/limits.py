"""The type and the range of a setting, from its annotation, e.g. ``Annotated[int, Meta(ge=1)]``.

The settings of a run (common/config/schema.py) and the options of strategies (common/sync/plans)
are annotated in this way. msgspec checks a value, and ``what_to_give`` says in words what fits.
"""

import math
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from common.say import listed

MOST_INT = 2**31 - 1  # what C++ takes
Whole = Annotated[int, Meta(ge=0, le=MOST_INT)]
Positive = Annotated[int, Meta(ge=1, le=MOST_INT)]
AboveZero = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]

_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false"}


def kind_and_meta(annotation: Any) -> tuple[type, Meta]:
    """Return the type and the limits: int and Meta(ge=1) for ``Annotated[int, Meta(ge=1)] | None``.

    An annotation without limits gives an empty ``Meta``.
    """
    if is_optional(annotation):
        [annotation] = [member for member in get_args(annotation) if member is not NoneType]
    if get_origin(annotation) is Annotated:
        kind, meta = get_args(annotation)
        return kind, meta
    return annotation, Meta()


def is_optional(annotation: Any) -> bool:
    """Return whether the annotation is ``... | None``."""
    return get_origin(annotation) in (Union, UnionType)


def what_to_give(value: Any, annotation: Any) -> str | None:
    """Return what to give in place of a value that does not fit; None for one that does.

    A bool is not a number, nor is infinity, nor a whole number that 64 bits cannot hold.
    """
    if value is None and is_optional(annotation):
        return None
    kind, meta = kind_and_meta(annotation)
    if _fits(value, kind, meta):
        return None
    if kind in (str, Path):
        return f"give {meta.description}"
    limits = []
    if meta.ge is not None:
        limits.append(f"of at least {meta.ge}")
    if meta.gt is not None:
        limits.append(f"above {meta.gt}")
    is_huge = isinstance(value, int) and value > MOST_INT
    if meta.le is not None and (is_huge or meta.le != MOST_INT):
        limits.append(f"at most {meta.le}")
    return f"give {_EXPECTED[kind]} {listed(limits)}".strip()


def _fits(value: Any, kind: type, meta: Meta) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(value, int) and abs(value) >= 2**63:
        return False
    if kind is Path:
        kind = str
        value = str(value) if isinstance(value, Path) else value
    try:
        msgspec.convert(value, Annotated[kind, meta])
    except msgspec.ValidationError:
        return False
    return True
