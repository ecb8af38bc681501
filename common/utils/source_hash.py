"""Digests of the code that this process runs, which the ranks compare.

Ranks with two versions of the code would average the gradients of two different trainings.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path

_COMMON = Path(__file__).resolve().parents[1]
_STEP = ("torch", *(f"common/{name}" for name in ("data/", "models/", "training")))
"""What decides the numbers of a step, its strategy aside: the start of paths, and torch."""


def code_facts() -> dict[str, str]:
    """Return ``source_digests`` and torch's version without its build, which follows a ``+``."""
    return {"torch": version("torch").split("+")[0], **source_digests()}


def step_digest() -> str:
    """Return a digest of the code that decides the numbers of a step, its strategy aside."""
    facts = {name: fact for name, fact in code_facts().items() if name.startswith(_STEP)}
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def source_digests() -> dict[str, str]:
    """Return the first 12 hex digits of the SHA-256 of each source file of ``common``, by path.

    Line ends don't count: git may change them between systems.
    """
    files = sorted(path for path in _COMMON.rglob("*.py") if not path.name.startswith("."))
    return {
        path.relative_to(_COMMON.parent).as_posix(): hashlib.sha256(
            path.read_bytes().replace(b"\r\n", b"\n")
        ).hexdigest()[:12]
        for path in files
    }
