"""What a check is given, ``CheckRequest``, and what it returns, ``CheckResult``."""

from dataclasses import dataclass
from pathlib import Path

# A run can start; a run can start, but may be slow, mislead or stop later; a run would fail.
OK, WARNING, FAILURE = "ok", "warning", "failure"


@dataclass(frozen=True)
class CheckRequest:
    """The planned run.

    master_ip : "" if none is given. num_nodes : 0 to check this machine alone; else ``master_ip``
    is given, too.
    """

    master_ip: str
    master_port: int
    num_nodes: int
    rank: int
    dataset: str
    data_dir: Path
    output_dir: Path
    timeout_seconds: float


@dataclass(frozen=True)
class CheckResult:
    """What a check found: its name, a status, a sentence, and what to do unless all is well."""

    name: str
    status: str
    text: str
    remedy: str = ""


def reason(error: OSError) -> str:
    """Return why a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    # socket.create_server appends "(while attempting to bind on address …)".
    return (error.strerror or str(error) or type(error).__name__).lower().split(" (while ")[0]
