"""The code that this process runs, for the ranks to compare: two versions would average gradients of two trainings."""

import hashlib
from importlib.metadata import version
from pathlib import Path

_COMMON = Path(__file__).resolve().parents[1]


def code_facts() -> dict[str, str]:
    """Return ``source_digests`` and torch's version without what follows a ``+`` (the build for one CUDA or for CPUs)."""
    return {"torch": version("torch").split("+")[0], **source_digests()}


def source_digests() -> dict[str, str]:
    """Return the first 12 hex digits of the SHA-256 of each source file of ``common``, by path. Line ends don't count: git may
    change them between systems."""
    files = sorted(path for path in _COMMON.rglob("*.py") if not path.name.startswith("."))
    return {
        path.relative_to(_COMMON.parent).as_posix(): hashlib.sha256(
            path.read_bytes().replace(b"\r\n", b"\n")
        ).hexdigest()[:12]
        for path in files
    }
