"""Every test of the audit fails if the probe recorded ``trouble``: a fault of the probe itself."""

import os
import sys
from pathlib import Path

import pytest

from lab.audit import runner
from lab.audit.recording import RecordReader
from lab.audit.records import Trouble
from lab.cli import main


@pytest.fixture(autouse=True)
def _the_probe_had_no_trouble(monkeypatch):
    troubles = []
    read_records = RecordReader.read

    def read(reader):
        further = read_records(reader)
        for one in reader.processes.values():
            troubles.extend(trouble.text for trouble in one.of(Trouble))
        return further

    monkeypatch.setattr(RecordReader, "read", read)
    yield
    assert not troubles, "the probe failed, and the script went on"


@pytest.fixture(autouse=True)
def _python_has_torch(monkeypatch):
    """``python`` in an audited command is the one on PATH: let it be that of the tests."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def audit(tmp_path, capsys, monkeypatch):
    """Run ``lab audit`` in this process; return the exit status, the output and the errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_CERTAIN_SECONDS", 0.5)

    def run(*arguments):
        status = main(["audit", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refusal(audit):
    """Run ``lab audit`` and return the one line that says why it cannot be done."""

    def run(*arguments):
        status, out, err = audit(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run
