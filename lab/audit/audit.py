"""The whole audit: run the script at each size, read the records, check, and report."""

import argparse
import contextlib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, count, file_errors
from lab.audit.cli import CLOCK_STEPS, STEPS, check_flags
from lab.audit.command import AuditCommand, parse_command
from lab.audit.failures import explain_failure
from lab.audit.findings import run_checks
from lab.audit.isolation import record_folder, run_network
from lab.audit.performance import measure
from lab.audit.recording import ADVICE, Recording, read_recording
from lab.audit.report import print_audit, write_json, write_page
from lab.audit.result import AuditResult, verdict
from lab.audit.runner import AuditRun, RunSettings, run_audit_size
from lab.processes.prefixed_output import console, say
from lab.units import parse_rate


@dataclass(frozen=True)
class AuditedRun:
    """A run and what was recorded. failure: why it could not be audited, or not to its end."""

    run: AuditRun
    recording: Recording
    failure: str | None

    @property
    def fixed_size(self) -> int | None:
        """The number of ranks that the script has chosen itself; None if it took what it got."""
        chosen = self.recording.size > 1 and self.recording.size != self.run.size
        return self.run.wanted_size or (self.recording.size if chosen else None)


def main_audit(args: argparse.Namespace) -> int:
    """Audit the script; return 0 if it is right, 1 if faults were found, 2 if nobody can tell.

    Raises UserError if the script could not be audited.
    """
    command = parse_command(args.flags, args.rank0)
    check_flags(args, command)
    settings = RunSettings(
        steps=args.steps or (CLOCK_STEPS if args.clocks else STEPS),
        clocks=args.clocks,
        limit_seconds=args.timeout,
    )
    runs: list[AuditedRun] = []
    stopped = None
    with record_folder(args.keep) as folder:
        try:
            with understood():
                for one in run_sizes(command, args, folder, settings):
                    runs.append(one)
        except UserError as error:
            stopped = f"could not be run: {error}"
        with understood():
            result = examine(command, runs, stopped, rate=args.rate)
    if args.json:
        write_json(args.json, result)
    if args.html:
        write_page(args.html, result)
    if not any(one.recording.steps for one in runs) and not result.faults:
        raise UserError(result.headline)  # there is nothing else to say
    print_audit(console, result)
    return result.status


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Turn what a spoiled record makes of the code that reads it into one UserError."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"the records make no sense ({type(error).__name__}: {error}, at "
            f"{Path(place.filename).name}:{place.lineno}){ADVICE} If not, report this: lab audit "
            "itself is wrong"
        ) from error


def run_sizes(
    command: AuditCommand, args: argparse.Namespace, folder: Path, settings: RunSettings
) -> Iterator[AuditedRun]:
    """Run the script at each size, or at the one that it chooses itself."""
    sizes: list[int | None] = list(args.ranks) if command.takes_size else [None]
    tried: set[int | None] = set()
    while sizes:
        one = audit_size(command, sizes[0], args, folder, settings)
        tried.add(sizes.pop(0))
        yield one
        failed = one.failure and (one.run.hung or one.recording.steps == 0)
        if one.fixed_size or failed:  # others would show the same
            sizes = list({one.run.wanted_size} - tried - {None})


def audit_size(
    command: AuditCommand,
    size: int | None,
    args: argparse.Namespace,
    folder: Path,
    settings: RunSettings,
) -> AuditedRun:
    """Run the script on a number of ranks, and read what its probe has recorded."""
    own = folder / f"{size or 'own'}-ranks"
    with file_errors(f"{own} cannot be made", ADVICE):
        own.mkdir()
    with run_network(size or 1, own, settings.cwd, isolate=args.isolate, rate=args.rate) as network:
        run = run_audit_size(command, size, own, settings, network=network)
    recording = read_recording(
        own,
        asked_size=size,
        global_batch=args.global_batch,
        clocks=settings.clocks,
        hung=run.hung is not None,
    )
    if console.is_terminal:  # in a file the answer is the first line
        ranks = count(recording.size or size or 1, "rank")
        say(f"{ranks}: {recording.steps} steps watched")
    return AuditedRun(run, recording, explain_failure(command, run, recording, settings.steps))


def examine(
    command: AuditCommand, runs: Sequence[AuditedRun], stopped: str | None, *, rate: str | None
) -> AuditResult:
    """Return what is wrong and right in all runs. stopped: why there were no further runs."""
    fixed = dict.fromkeys(one.fixed_size for one in runs if one.fixed_size)
    remarks = [
        f"The script fixes its number of ranks at {size}: "
        f"a literal divisor of {size} cannot be told from the number of ranks."
        for size in fixed
    ]
    runs = [one for one in runs if not one.run.wanted_size] or runs[-1:]
    recordings = [one.recording for one in runs if not one.failure or one.recording.ranks]
    findings, right, unknown = run_checks(recordings)
    failure = next((one.failure for one in runs if one.failure), stopped)
    measured = [one for one in recordings if one.ranks]
    return AuditResult(
        command=command.text,
        recordings=tuple(one.recording for one in runs),
        findings=tuple(findings),
        verdict=verdict(recordings, findings, unknown, failure=failure),
        right=tuple(right),
        unknown=tuple(unknown),
        remarks=tuple(remarks),
        performance=measure(measured[-1], rate_bits=parse_rate(rate)) if measured else None,
        failure=failure,
    )
