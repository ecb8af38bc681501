"""Run the steps of a call one after the other, each in a process with a limit; keep the results.

``run_steps`` does everything. It writes ``results.json`` whole after each change, so that a call
that is cut off leaves what it has measured. It imports neither torch nor this project, so it works,
and says what is wrong, where they do not. It imports psutil only when a step runs, so that gpu.py
can say first that it is missing.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psutil import Process

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_TABLE_LINES = 40
_MOST_LOG_BYTES = 400_000
"""Of each step, from the end of its output: twenty steps stay below 8 MB."""
_LAST_LINES = 25
_KILL_SECONDS = 10
_PR_SET_CHILD_SUBREAPER = 36

Reader = Callable[[str], dict[str, Any]]


def last_json_line(output: str) -> dict[str, Any]:
    """Return the JSON object that a child of gpu_book has printed last.

    Children print one after each part of their work, so a killed one has a result, too.
    """
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


@dataclass(frozen=True)
class Step:
    """One process.

    Parameters
    ----------
    command : arguments of the Python interpreter.
    limit_seconds : the process and all its children are killed after it.
    read : returns the result, given the output. The result's ``lines`` are what the table shows.
    not_here : why the step cannot run here; "" if it can.
    """

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    read: Reader = last_json_line
    not_here: str = ""


@dataclass
class Record:
    """What became of a step; ``status`` is waiting, running, ok, failed, killed or not run."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    status: str = "waiting"
    reason: str = ""
    seconds: float | None = None
    exit_status: int | None = None
    result: dict[str, Any] | None = None
    last_lines: list[str] = field(default_factory=list)


def run_steps(
    steps: Sequence[Step], out: Path, *, header: Mapping[str, Any], budget_seconds: float
) -> list[Record]:
    """Run all steps that fit in the budget; write results.json and stage.log to ``out``."""
    deadline = time.monotonic() + budget_seconds
    records = [Record(step.name, step.command, step.limit_seconds) for step in steps]
    adopt_orphans()
    for step, record in zip(steps, records, strict=True):
        left = deadline - time.monotonic()
        if step.not_here:
            record.status, record.reason = "not run", step.not_here
        elif step.limit_seconds > left:
            record.status = "not run"
            record.reason = f"not enough time (needs {step.limit_seconds:.0f} s, {left:.0f} s left)"
        else:
            record.status = "running"
            write_results(out, header, records)
            _run(step, record, out)
        write_results(out, header, records)
    return records


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that a limit reaches them, too."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write_results(out: Path, header: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Replace results.json at once: a reader finds the old or the new one, whole."""
    content = dict(header) | {"steps": [asdict(record) for record in records]}
    partial = out / "results.json.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(out / "results.json")


def _run(step: Step, record: Record, out: Path) -> None:
    """Run one step to its end or its limit, and fill its record."""
    before, began = set(_descendants()), time.monotonic()
    captured = out / "output.partial"
    with captured.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            record.exit_status = process.wait(timeout=step.limit_seconds)
        except subprocess.TimeoutExpired:
            record.status, record.reason = "killed", f"still running after {step.limit_seconds} s"
        finally:
            _kill(set(_descendants()) - before)  # nothing may hold the GPU during the next step
            record.reason += _wait_for_the_end(process)
    record.seconds = round(time.monotonic() - began, 1)
    text = captured.read_bytes()[-_MOST_LOG_BYTES:].decode(errors="replace")
    captured.unlink()
    with (out / "stage.log").open("a") as log:
        log.write(f"===== {step.name}: {' '.join(step.command)}\n{text}\n")
    record.last_lines = [line[:300] for line in text.splitlines()[-_LAST_LINES:]]
    try:
        record.result = step.read(text)
    except (ValueError, LookupError, OSError) as error:
        found = [line for line in record.last_lines if line.strip()] or ["no output"]
        record.reason = (
            record.reason or f"no result ({type(error).__name__}); last line: {found[-1]}"
        )
    if record.status == "running":
        record.status = "failed" if record.exit_status or record.result is None else "ok"


def _wait_for_the_end(process: subprocess.Popen) -> str:
    """Wait a limited time for a killed process; return what to add to the reason."""
    try:
        process.wait(timeout=_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return (
            f"; process {process.pid} has not ended within {_KILL_SECONDS} s of SIGKILL: it may "
            "hold the GPU during the next steps"
        )
    return ""


def _python_path() -> str:
    """Return this project's folder, the folder of gpu_book, and what the caller has set."""
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = [REPOSITORY, REPOSITORY / "benchmarks", *map(Path, given)]
    return os.pathsep.join(str(folder.resolve()) for folder in folders)


def _descendants() -> "list[Process]":
    import psutil

    return psutil.Process().children(recursive=True)


def _kill(processes: "set[Process]") -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=_KILL_SECONDS)


def table(records: Sequence[Record]) -> str:
    """Return at most 40 lines: a line a step, then the lines of its result."""
    lines = []
    for record in records:
        seconds = "" if record.seconds is None else f"{record.seconds:.0f} s"
        lines.append(f"{record.name:<22} {record.status:<8} {seconds:>6}  {record.reason}".rstrip())
        lines += [f"    {line}" for line in (record.result or {}).get("lines", ())]
    if len(lines) > MOST_TABLE_LINES:
        left_out = len(lines) - MOST_TABLE_LINES + 1
        lines[MOST_TABLE_LINES - 1 :] = [f"... {left_out} more lines: see results.json"]
    return "\n".join(line[:160] for line in lines)
