"""What a check is given and what it returns: ``CheckRequest``, ``CheckResult``. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

OK, WARNING, FAILURE = "ok", "warning", "failure"


@dataclass(frozen=True)
class CheckRequest:
    """Which run is planned; ``num_nodes`` and ``rank`` are given together, and with ``master_ip``."""

    master_ip: str | None
    master_port: int
    num_nodes: int | None
    rank: int | None
    dataset: str
    data_dir: Path
    output_dir: Path
    timeout_seconds: float


@dataclass(frozen=True)
class CheckResult:
    """What a check found: ``name`` of the check, ``status`` ok, warning or failure, a sentence, and the one thing to do."""

    name: str
    status: str
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> CheckResult:
    """Nothing stands in the way."""
    return CheckResult(name, OK, text)


def warning(name: str, text: str, remedy: str) -> CheckResult:
    """A run can start, but may be slow, or misleading, or stop later."""
    return CheckResult(name, WARNING, text, remedy)


def failure(name: str, text: str, remedy: str) -> CheckResult:
    """A run would fail."""
    return CheckResult(name, FAILURE, text, remedy)


def reason(error: OSError) -> str:
    """Return why a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error) or type(error).__name__).lower()
