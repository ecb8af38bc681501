"""The page of ``lab whatif``, written once, and a Chromium for each module that opens it."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lab.cli import main
from tests.helpers.browser import chromium
from tests.helpers.whatif_states import shared_folder


@dataclass(frozen=True)
class WhatIf:
    """The page's file, and the data that Python wrote into it."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def data(self) -> dict[str, Any]:
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.text)
        assert found
        return json.loads(found[1])

    def preset(self, name: str) -> dict[str, Any]:
        """Return the state of a preset."""
        return next(preset["state"] for preset in self.data["presets"] if preset["id"] == name)


@pytest.fixture(scope="session")
def what_if(tmp_path_factory, worker_id):
    """The page, made once for all workers, in a file with spaces and umlauts in its path."""
    base = shared_folder(tmp_path_factory, worker_id)
    path = base / "what if, für Übungen" / "Was wäre, wenn.html"
    with FileLock(base / "what-if.lock", timeout=120):
        if not path.exists():
            assert main(["whatif", "--out", str(path)]) == 0
    return WhatIf(path)


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started
