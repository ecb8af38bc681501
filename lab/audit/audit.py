"""The whole audit: run the script at each size, read the records, check, and report."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from lab.audit.cli import CLOCK_STEPS, STEPS, check_flags
from lab.audit.command import AuditCommand, parse_command
from lab.audit.failures import explain_failure
from lab.audit.findings import run_checks
from lab.audit.isolation import emulated, isolated
from lab.audit.leftovers import record_folder, stop_signals_interrupt
from lab.audit.page import write_page
from lab.audit.performance import measure
from lab.audit.recording import Recording, read_recording
from lab.audit.report import print_audit, write_json
from lab.audit.result import AuditResult, verdict
from lab.audit.runner import RunEnd, RunNetwork, RunSettings, run_audit_size
from lab.processes.prefixed_output import console, say
from lab.units import parse_rate


@dataclass(frozen=True)
class AuditedRun:
    """A run and what was recorded. failure: why it could not be audited, or not to its end."""

    end: RunEnd
    recording: Recording
    failure: str | None


def main_audit(args: argparse.Namespace) -> int:
    """Audit the script; return 0 if it is right, 1 if faults were found, 2 if nobody can tell.

    Raises UserError if the script could not be audited.
    """
    command = parse_command(args.flags, args.rank0)
    check_flags(args, command)
    settings = RunSettings(
        steps=args.steps or (CLOCK_STEPS if args.clocks else STEPS),
        clocks=args.clocks,
        replay=args.replay,
        limit_seconds=args.timeout,
    )
    with stop_signals_interrupt(), record_folder(args.keep) as folder:
        runs, remarks = run_sizes(command, args, folder, settings)
        result = examine(command, runs, remarks, rate=args.rate)
    if args.json:
        write_json(args.json, result)
    if args.html:
        write_page(args.html, result)
    if any(one.end.steps for one in runs) or result.faults:
        print_audit(console, result)
    if result.status == 2 and result.failure is not None:
        raise UserError(result.failure)
    return result.status


def run_sizes(
    command: AuditCommand, args: argparse.Namespace, folder: Path, settings: RunSettings
) -> tuple[list[AuditedRun], list[str]]:
    """Run the script at each size; return the runs, and remarks on sizes that it chose itself."""
    runs: list[AuditedRun] = []
    remarks: list[str] = []
    sizes: list[int | None] = list(args.ranks) if command.takes_size else [None]
    tried: set[int | None] = set()
    while sizes:
        size = sizes.pop(0)
        tried.add(size)
        run = audit_size(command, size, args, folder, settings)
        waits_for, ran = run.end.wanted_size, run.recording.size
        if fixed := waits_for or (ran if ran > 1 and ran != size else None):
            remarks = [fixed_size_remark(fixed)]
            sizes = [fixed] if waits_for and fixed not in tried else []
        if waits_for is None or not (runs or sizes):
            runs.append(run)
            if run.failure and run.end.steps == 0:
                break  # it would fail in the same way at the next size
    return runs, remarks


def fixed_size_remark(size: int) -> str:
    """Return what a fixed number of ranks means for the audit."""
    return (
        f"The script fixes its number of ranks at {size}: "
        f"a literal divisor of {size} cannot be told from the number of ranks."
    )


def audit_size(
    command: AuditCommand,
    size: int | None,
    args: argparse.Namespace,
    folder: Path,
    settings: RunSettings,
) -> AuditedRun:
    """Run the script on a number of ranks, and read what its probe has recorded."""
    own = folder / f"{size or 'own'}-ranks"
    own.mkdir()
    with network_of(args, size or 1, own, settings.cwd) as network:
        try:
            end = run_audit_size(command, size, own, settings, network=network)
        except OSError as error:
            raise UserError(
                f"{command.words[0]} cannot be started: {error.strerror}. Give the command as in a "
                "shell, for example python main.py; use `sh -c '...'` for a shell's own syntax"
            ) from error
    recording = read_recording(
        own,
        asked_size=size,
        global_batch=args.global_batch,
        clocks=settings.clocks,
        hung=end.hung is not None,
    )
    ranks = recording.size or size or 1
    steps = f"{end.steps} step{'s' * (end.steps != 1)}"
    say(f"{ranks} rank{'s' * (ranks != 1)}: {steps} in {end.seconds:.1f} s")
    return AuditedRun(end, recording, explain_failure(command, end, recording))


def network_of(
    args: argparse.Namespace, nodes: int, folder: Path, cwd: Path
) -> contextlib.AbstractContextManager[RunNetwork]:
    """Return where the ranks run."""
    if args.isolate is not None:
        return isolated(args.isolate, folder, cwd)
    if args.rate is not None:
        return emulated(nodes, args.rate, cwd)
    return contextlib.nullcontext(RunNetwork())


def examine(
    command: AuditCommand, runs: Sequence[AuditedRun], remarks: Sequence[str], *, rate: str | None
) -> AuditResult:
    """Return what is wrong and right in all runs."""
    recordings = [one.recording for one in runs]
    findings, right, unknown = run_checks(recordings)
    measured = [one for one in recordings if one.ranks]
    return AuditResult(
        command=command.text,
        recordings=tuple(recordings),
        findings=tuple(findings),
        verdict=verdict(recordings, findings, unknown),
        right=tuple(right),
        unknown=tuple(unknown),
        remarks=tuple(remarks),
        performance=measure(measured[-1], rate_bits=parse_rate(rate)) if measured else None,
        replay=replay_of(recordings),
        failure=next((one.failure for one in runs if one.failure), None),
    )


def replay_of(recordings: Sequence[Recording]) -> dict[str, Any] | None:
    """Return what the replay of the largest run showed; None if there was none."""
    for recording in reversed(recordings):
        for rank in recording.ranks:
            for record in rank.by_kind["replay"]:
                names = ("steps", "why_not")
                return {"ranks": recording.size} | {name: record.get(name) for name in names}
    return None
