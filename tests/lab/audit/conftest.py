"""Every test of the audit fails if the probe recorded ``trouble``: a fault of the probe itself."""

import os
import sys
from pathlib import Path

import pytest

from lab.audit.recording import RecordReader


@pytest.fixture(autouse=True)
def _the_probe_had_no_trouble(monkeypatch):
    troubles = []
    read_records = RecordReader.read

    def read(reader):
        further = read_records(reader)
        for one in reader.processes.values():
            troubles.extend(str(record["text"]) for record in one.by_kind["trouble"])
        return further

    monkeypatch.setattr(RecordReader, "read", read)
    yield
    assert not troubles, "the probe failed, and the script went on"


@pytest.fixture(autouse=True)
def _python_has_torch(monkeypatch):
    """``python`` in an audited command is the one on PATH: let it be that of the tests."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
