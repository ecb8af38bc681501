"""The program that judges what a driver's ranks returned: a request from stdin, verdicts to stdout.

Nothing of a submission is imported here, and nothing that its ranks printed is believed: the
course's driver makes their data again from the seeds, computes what is right, and compares.
``judged`` starts the program; it is a process of its own, because whatever the ranks printed may
end it.
"""

import argparse
import base64
import binascii
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

import lab
from common.errors import reason_of
from common.utils.atomic_files import read_regular
from common.utils.processes import how_ended
from common.utils.system import free_port
from lab.audit.isolation import end_processes
from lab.audit.runner import start_process
from lab.grade.driver.mark import MARK

if TYPE_CHECKING:  # torch is imported only in the process that judges
    import torch

    from lab.grade.driver.checks import Check, Message

RUNNER = Path(__file__).with_name("driver")
_LIMIT_SECONDS = 120.0
_TRIED_SECONDS = 300.0  # of the ranks that try_here starts
# Of what a rank printed; a check of the shipped courses returns up to half a megabyte.
_MOST_LOG = 2**25
_MOST_FLAWS = 100
_MOST_LEVELS = 20
SILENT = "a rank returned nothing"
_Line = Annotated[str, Meta(max_length=1000)]
_Seed = Annotated[int, Meta(ge=0, lt=2**62)]


class DrivenRun(msgspec.Struct):
    """Ranks that ran the checks.

    folder : with their logs. seeds : of each rank; common : of all of them.
    """

    folder: str
    seeds: list[_Seed]
    common: _Seed

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.seeds)

    def log(self, rank: int) -> Path:
        """Return the file of what a rank printed."""
        return Path(self.folder) / f"rank{rank}.log"

    @property
    def inputs(self) -> list[bytes]:
        """What each rank reads from stdin."""
        return [msgspec.json.encode({"seed": own, "common": self.common}) for own in self.seeds]


def new_run(folder: Path, size: int) -> DrivenRun:
    """Return a run with new secret numbers."""
    common, *own = (secrets.randbits(61) for _ in range(size + 1))
    return DrivenRun(str(folder), own, common)


class FoundInRun(msgspec.Struct):
    """What a check found in a run."""

    name: _Line
    evidence: _Line
    at: tuple[_Line, int] | None = None


class PartVerdict(msgspec.Struct):
    """What is wrong and right with the part in one run.

    Parameters
    ----------
    found : in the order of the checks.
    passed : the titles of the checks that found nothing.
    end : "done" after all checks; "fault" if one that was found ended them; "stopped" if something
        did that nobody can judge from here.
    stopped : that, on one line.
    """

    found: list[FoundInRun] = []
    passed: list[str] = []
    end: str = "done"
    stopped: str = ""

    def stop(self, reason: str) -> None:
        """End the judging for something that nobody can judge from here."""
        self.end = "stopped"
        self.stopped = reason[:1000]


class _Request(msgspec.Struct):
    driver: str
    part: str
    runs: list[DrivenRun]


def judged(driver: str, part: str, runs: Sequence[DrivenRun]) -> list[PartVerdict]:
    """Return the verdict on each run, from a process of its own."""
    request = msgspec.json.encode(_Request(driver, part, list(runs)))
    root = str(Path(lab.__file__).parents[1])
    command = [sys.executable, "-P", "-m", "lab.grade.judge"]
    try:
        ended = subprocess.run(
            command,
            input=request,
            capture_output=True,
            timeout=_LIMIT_SECONDS,
            cwd="/",
            env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        reason = f"what the ranks returned was not judged within {_LIMIT_SECONDS:g} s"
        return [PartVerdict(end="stopped", stopped=reason) for _ in runs]
    if ended.returncode != 0:
        *_, last = ended.stderr.decode(errors="replace").splitlines() or ["no message"]
        reason = f"the program that judges {how_ended(ended.returncode)}: {last[:300]}"
        return [PartVerdict(end="stopped", stopped=reason) for _ in runs]
    *_, answer = ended.stdout.splitlines()  # a driver may print
    return msgspec.json.decode(answer, type=list[PartVerdict])


# --- in the process that judges ---


def main() -> int:
    """Judge the runs that stdin describes; with arguments, run a file's ranks here first."""
    if len(sys.argv) > 1:
        return try_here(sys.argv[1:])
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    verdicts = verdicts_on(request.driver, request.part, request.runs)
    print(f"\n{msgspec.json.encode(verdicts).decode()}")
    return 0


def try_here(arguments: Sequence[str]) -> int:
    """Run a part's checks on a file, show the ranks' output, and print the verdict."""
    parser = argparse.ArgumentParser(prog="python -m lab.grade.judge", description=__doc__)
    parser.add_argument("driver", help="the course's driver")
    parser.add_argument("part", help="a name in its PARTS")
    parser.add_argument("script", help="the student's file")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    driver = Path(args.driver).resolve()
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder), args.ranks)
        started: list[subprocess.Popen[bytes]] = []
        port = str(free_port(address="127.0.0.1"))
        for rank, given in enumerate(run.inputs):
            place = ["127.0.0.1", port, str(args.ranks), str(rank)]
            words = [sys.executable, str(RUNNER), str(driver), args.part, *place, args.script]
            started.append(start_process(words, os.environ, Path.cwd(), run.log(rank), given))
        limit = time.monotonic() + _TRIED_SECONDS
        while time.monotonic() < limit and any(process.poll() is None for process in started):
            time.sleep(0.1)
        end_processes([process.pid for process in started], Path(folder), grace_seconds=0.0)
        for rank in range(len(started)):
            for line in run.log(rank).read_text(errors="replace").splitlines():
                if line and not line.startswith(MARK):
                    print(f"rank {rank} | {line}")
        [verdict] = verdicts_on(str(driver), args.part, [run])
    for title in verdict.passed:
        print(f"passed: {title}")
    for found in verdict.found:
        print(f"{found.name}: {found.evidence}")
    if verdict.stopped:
        print(f"stopped: {verdict.stopped}")
    return 0 if verdict.end == "done" and not verdict.found else 1


def verdicts_on(driver: str, part: str, runs: Sequence[DrivenRun]) -> list[PartVerdict]:
    """Return the verdict on each run, from this process."""
    from lab.grade.driver.running import load_driver

    module = load_driver(driver)
    return [_verdict(module, part, run) for run in runs]


class _Error(msgspec.Struct):
    """As ``StudentError`` in driver/running.py."""

    text: _Line
    at: tuple[_Line, int] | None
    unfinished: bool
    follows: bool


class _Record(msgspec.Struct):
    """As ``CheckRecord`` in driver/running.py."""

    check: Annotated[int, Meta(ge=0, lt=1000)]
    values: Any
    error: _Error | None


def _verdict(driver: ModuleType, part: str, run: DrivenRun) -> PartVerdict:
    """Judge one check after another, until one was not run to its end on all ranks."""
    checks: Sequence[Check] = driver.PARTS[part]
    of_ranks = [_records(run.log(rank)) for rank in range(run.size)]
    verdict = PartVerdict()
    if not checks:
        verdict.stop("the driver has no checks for this part")
    for number, check in enumerate(checks):
        found = [records[number] for records in of_ranks if number in records]
        errors = [record.error for record in found if record.error]
        if errors:
            _judge_error(errors, check, verdict)
        elif len(found) < run.size:
            verdict.stop(f"{check.title}: {SILENT}")
        else:
            _judge_values([record.values for record in found], check, run, verdict)
        if verdict.end != "done":
            break
    return verdict


def _judge_values(
    values: Sequence[Any], check: "Check", run: DrivenRun, verdict: PartVerdict
) -> None:
    """Add what a check finds in what all ranks returned."""
    try:
        flaws = _flaws(check, values, run)
    except Exception as error:
        traceback.print_exc()
        verdict.stop(
            f"{check.title}: what the ranks returned cannot be judged ({reason_of(error)})"
        )
        return
    verdict.found += flaws
    if not flaws:
        verdict.passed.append(check.title)


def _records(log: Path) -> dict[int, _Record]:
    """Return the last record of each check in a rank's output."""
    found: dict[int, _Record] = {}
    if not log.exists():
        return found
    text = read_regular(log, last_bytes=_MOST_LOG).decode(errors="replace")
    for line in text.split("\n"):
        if line.startswith(MARK):
            try:
                content = json.loads(line.removeprefix(MARK))  # with NaN and infinity
                record = msgspec.convert(content, _Record)
            except (ValueError, RecursionError):  # the student's own line
                continue
            found[record.check] = record
    return found


def _judge_error(errors: Sequence[_Error], check: "Check", verdict: PartVerdict) -> None:
    """Count an error as found where it can only be the student's mistake."""
    first = next((error for error in errors if not error.follows), errors[0])
    name = None
    if first.unfinished:
        name = "not-implemented"
    # Once a check has run the same code, the environment has all that it needs.
    elif verdict.passed and not first.follows:
        name = check.raises_as
    verdict.stopped = first.text
    verdict.end = "stopped" if name is None else "fault"
    if name is not None:
        verdict.found.append(FoundInRun(name, first.text, first.at))


def _flaws(check: "Check", values: Sequence[Any], run: DrivenRun) -> list[FoundInRun]:
    """Return what a check finds, the first of each name."""
    from lab.grade.driver.checks import Rank, Returned

    returned: list[Returned] = []
    for number, (seed, of_rank) in enumerate(zip(run.seeds, values, strict=True)):
        rank = Rank(number, run.size, seed, run.common)
        returned.append(Returned(rank, decoded(of_rank)))
    found: dict[str, FoundInRun] = {}
    for flaw in check.judge(returned):
        place = None if flaw.at is None else (flaw.at[0][:1000], flaw.at[1])
        found.setdefault(flaw.name, FoundInRun(flaw.name, flaw.evidence[:1000], place))
        if len(found) == _MOST_FLAWS:
            break
    return list(found.values())


# --- what ranks returned ---


def decoded(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """Return what ``encoded`` in driver/values.py made. Raises ValueError for anything else."""
    if levels == 0:
        raise ValueError(f"values in more than {_MOST_LEVELS} levels")
    match value:
        case ["plain", None | bool() | int() | float() | str() as plain]:
            return plain
        case ["tensor", list() as shape, str() as content]:
            return _tensor(shape, content)
        case ["message", {"name": str(), "nbytes": int(), "phase": str()} as fields]:
            return _message(fields)
        case ["dict", list() as entries]:
            return {str(key): decoded(entry, levels - 1) for key, entry in entries}
        case ["list", list() as entries]:
            return [decoded(entry, levels - 1) for entry in entries]
    raise ValueError("values that no rank of the runner writes")


def _tensor(shape: list[Any], content: str) -> "torch.Tensor":
    import torch

    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("a tensor without a shape")
    try:
        whole = bytearray(base64.b64decode(content, validate=True))
    except binascii.Error as error:
        raise ValueError("a tensor that is not base64") from error
    if len(whole) != 4 * math.prod(shape):
        raise ValueError("a tensor whose shape does not fit")
    if not whole:
        return torch.empty(shape)
    return torch.frombuffer(whole, dtype=torch.float32).reshape(shape)


def _message(fields: dict[str, Any]) -> "Message":
    from lab.grade.driver.checks import Message

    at = fields.get("at")
    match at:
        case [str() as file, int() as line]:
            at = (file[:1000], line)
        case None:
            pass
        case _:
            raise ValueError("a message from no line")
    peer = fields.get("peer")
    if not (peer is None or type(peer) is int):
        raise ValueError("a message to no rank")
    return Message(fields["name"], fields["nbytes"], fields["phase"], peer, at)


if __name__ == "__main__":
    sys.exit(main())
