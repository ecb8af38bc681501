"""What code this process runs, for the ranks to compare: two versions of it average gradients of two different trainings."""

import hashlib
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parent


def code_facts() -> dict[str, str]:
    """Return torch's version and the beginning of the SHA-256 of each source file of ``common``, by its path.

    Line ends don't count, which git may change between systems, nor what follows a ``+`` in the version (the build for
    one CUDA or for CPUs).
    """
    files = sorted(path for path in _ROOT.rglob("*.py") if not path.name.startswith("."))
    return {"torch": torch.__version__.split("+")[0],
            **{path.relative_to(_ROOT.parent).as_posix():
               hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()[:12] for path in files}}
