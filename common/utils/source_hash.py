"""Which code this process runs, and how it differs from the code of another one.

Ranks with two versions of the code would average the gradients of two different trainings. Training
compares ``code_facts`` on all ranks; ``lab launch`` compares those of its hosts, ``lab run-cell``
those of its plan, and ``lab doctor`` shows ``code_digest``.
"""

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from common.say import listed

_COMMON = Path(__file__).resolve().parents[1]


def code_facts(*more: str) -> dict[str, str]:
    """Return torch's version without its build, which follows a ``+``, and ``source_digests``."""
    return {"torch": version("torch").split("+")[0], **source_digests(*more)}


def code_differences(mine: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return the files that differ between two ``code_facts``, and my versions; "" if none do."""
    differing = sorted({name for name, _ in mine.items() ^ others.items()})
    described = []
    for name in differing:
        described.append(name if "/" in name else f"{name} {mine.get(name)}")
    return listed(described, most=3)


def code_digest() -> str:
    """Return 12 hex digits of a SHA-256 over ``source_digests``."""
    return hashlib.sha256(repr(source_digests()).encode()).hexdigest()[:12]


def source_digests(*more: str) -> dict[str, str]:
    """Return the first 12 hex digits of the SHA-256 of each source file of ``common``, by path.

    Line ends don't count: git may change them between systems. more : other files of the checkout;
    an installed copy lacks some.
    """
    files = sorted(path for path in _COMMON.rglob("*.py") if not path.name.startswith("."))
    files += [path for path in map(_COMMON.parent.joinpath, more) if path.is_file()]
    digests = {}
    for path in files:
        content = path.read_bytes().replace(b"\r\n", b"\n")
        name = path.relative_to(_COMMON.parent).as_posix()
        digests[name] = hashlib.sha256(content).hexdigest()[:12]
    return digests
