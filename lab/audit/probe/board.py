"""What the ranks tell each other without a collective: files in the folder of the run.

A script's collectives are its own, so the probe must not add any. Files are enough: the ranks of an
audit share a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

_TICK_SECONDS = 0.02


class Board:
    """Notes and decisions of all ranks of a run.

    A note is one process's own; a decision is the same for all: that of the first one that decides.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, subject: Any, value: Any) -> None:
        """Leave a note on a subject; the first one of a process stays."""
        self._place(f"note-{_name(subject)}-{os.getpid()}", value)

    def notes(self, subject: Any, *, awaited: int = 0, seconds: float = 0.0) -> list[Any]:
        """Return all notes on a subject, after waiting up to some seconds for their number."""
        limit = time.monotonic() + seconds
        while True:
            found = list(self._folder.glob(f"note-{_name(subject)}-*"))
            if len(found) >= awaited or time.monotonic() > limit:
                return [json.loads(path.read_text()) for path in found]
            time.sleep(_TICK_SECONDS)

    def decide(self, subject: Any, proposal: Any) -> Any:
        """Return what is decided on a subject: the proposal, unless another one came before."""
        self._place(f"decision-{_name(subject)}", proposal)
        return self.decided(subject)

    def decided(self, subject: Any) -> Any:
        """Return what is decided on a subject; None if nothing is."""
        try:
            return json.loads((self._folder / f"decision-{_name(subject)}").read_text())
        except FileNotFoundError:
            return None

    def _place(self, name: str, value: Any) -> None:
        """Write a file whole, so that nobody reads half of it; one that is there stays."""
        draft = self._folder / f"draft-{os.getpid()}"
        draft.write_text(json.dumps(value))
        with contextlib.suppress(FileExistsError):
            os.link(draft, self._folder / name)
        draft.unlink()


def _name(subject: Any) -> str:
    """Return a file's name for a subject, the same in every process."""
    return format(zlib.crc32(repr(subject).encode()), "08x")
