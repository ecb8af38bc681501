"""The whole audit: run the script at each size, read the records, check, and report."""

import argparse
import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from common.errors import UserError
from common.say import count, counts
from lab.audit.cli import check_flags
from lab.audit.command import AuditCommand, parse_command, right_command
from lab.audit.failures import explain_failure
from lab.audit.findings import run_checks
from lab.audit.findings.finding import Finding
from lab.audit.findings.private import shared_part
from lab.audit.findings.where import groups
from lab.audit.isolation import RunNetwork, record_folder, run_network
from lab.audit.like import compare_runs, kept_recordings
from lab.audit.performance import measure
from lab.audit.recording import Recording
from lab.audit.report import print_audit, write_json, write_page
from lab.audit.result import AuditResult, Failure, verdict
from lab.audit.runner import AuditRun, RunSettings, run_audit_size
from lab.terminal import console, say
from lab.units import parse_rate

# Makes the namespaces of a run, from its number of ranks and its folder.
Network = Callable[[int, Path], contextlib.AbstractContextManager[RunNetwork]]
_SEVERAL_GROUPS = 4  # ranks: two groups of two
# What code raises that reads a spoiled record or folder.
_NONSENSE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


def main_audit(args: argparse.Namespace) -> int:
    """Audit the script; return 0 if it is right, 1 if faults were found, 2 if nobody can tell.

    Raises UserError if the script could not be audited.
    """
    command = parse_command(args.flags, args.rank0)
    check_flags(args, command)
    right = _right(args.like, command)
    settings = RunSettings(
        steps=args.steps,
        clocks=args.clocks,
        limit_seconds=args.timeout,
        global_batch=args.global_batch,
    )
    network = partial(run_network, cwd=settings.cwd, isolate=args.isolate, rate=args.rate)
    with record_folder(args.keep) as folder:
        result = audit_script(command, args.ranks, folder, settings, network, rate=args.rate)
        if right is not None:
            of_right = partial(
                audit_script, folder=folder / "like", settings=settings, network=network
            )
            result = _with_likeness(result, args.like, right, of_right)
    if args.json:
        write_json(args.json, result)
    if args.html:
        write_page(args.html, result)
    began = any(recording.steps for recording in result.recordings)
    if not began and not result.faults:
        raise UserError(result.headline)  # there is nothing else to say
    print_audit(console, result)
    return result.status


def _right(like: str | None, command: AuditCommand) -> AuditCommand | list[Recording] | None:
    """Return the command that ``--like`` gives, or the runs in the folder that it names."""
    if like is None:
        return None
    if not Path(like).is_dir():
        return right_command(like, command)
    with understood():
        return kept_recordings(Path(like))


def _with_likeness(
    result: AuditResult,
    like: str,
    right: AuditCommand | Sequence[Recording],
    audit_right: Callable[..., AuditResult],
) -> AuditResult:
    """Return the result with what the script does differently from a right one.

    audit_right : audits a command on some numbers of ranks.
    """
    headline = None
    if isinstance(right, AuditCommand):
        sizes = [recording.asked_size or recording.size for recording in result.recordings]
        of_right = audit_right(right, sizes)
        if of_right.status:
            headline = of_right.headline
        right = of_right.recordings
    with understood():
        likeness = compare_runs(like, result.recordings, right, headline)
    return dataclasses.replace(result, likeness=likeness)


def audit_script(
    command: AuditCommand,
    sizes: Sequence[int],
    folder: Path,
    settings: RunSettings,
    network: Network,
    *,
    rate: str | None = None,
) -> AuditResult:
    """Run the script at each size; return what is wrong and right, or why it could not be run."""
    runs: list[AuditRun] = []
    stopped: Failure | None = None
    try:
        with understood():
            # of a generator: the runs before an error are kept
            runs.extend(run_sizes(command, sizes, folder, settings, network))
    except UserError as error:
        stopped = Failure(str(error))
    with understood():
        return examine(command, runs, stopped, asked=sizes, rate=rate)


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Turn what a spoiled record or folder makes of the code that reads it into one UserError."""
    try:
        yield
    except UserError:
        raise
    except _NONSENSE as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"the records make no sense ({type(error).__name__}: {error}, at "
            f"{Path(place.filename).name}:{place.lineno}): does the script write to the audit's "
            "own folder? If not, report this: lab audit itself is wrong"
        ) from error


def run_sizes(
    command: AuditCommand,
    asked: Sequence[int],
    folder: Path,
    settings: RunSettings,
    network: Network,
) -> Iterator[AuditRun]:
    """Run the script at each size, or at the one that it chooses itself.

    No further size follows a run that failed before its first step, or hung, or fixed its number
    of ranks; only the number for which the script waited.
    """
    waiting: list[int | None] = [*asked] if command.takes_size else [None]
    ran: set[int | None] = set()
    while waiting:
        size = waiting.pop(0)
        ran.add(size)
        run = _run_size(command, size, folder, settings, network)
        yield run
        failed_early = run.failure and (run.hung or run.recording.steps == 0)
        if run.fixed_size or failed_early:  # others would show the same
            wanted = run.wanted_size
            waiting = [] if wanted is None or wanted in ran else [wanted]


def _run_size(
    command: AuditCommand,
    size: int | None,
    folder: Path,
    settings: RunSettings,
    network: Network,
) -> AuditRun:
    """Run the script at a size, in a folder of its own; None: at the one that it chooses."""
    own = folder / f"{size or 'own'}-ranks"
    own.mkdir(parents=True)
    with network(size or 1, own) as entered:
        run = run_audit_size(command, size, own, settings, network=entered)
    run.failure = explain_failure(run)
    if console.is_terminal:  # in a file the answer is the first line
        ranks = count(run.recording.size or size or 1, "rank")
        say(f"{ranks}: {run.recording.steps} steps watched")
    return run


def examine(
    command: AuditCommand,
    runs: Sequence[AuditRun],
    stopped: Failure | None,
    *,
    asked: Sequence[int],
    rate: str | None,
) -> AuditResult:
    """Return what is wrong and right in all runs.

    stopped : why there were no further runs; None if all were made.
    asked : the numbers of ranks to run.
    rate : see ``run_network``.
    """
    remarks = _remarks(command, runs, asked)
    # A run in which the script waited for other ranks than it had counts only if there is no other.
    runs = [run for run in runs if not run.wanted_size] or runs[-1:]
    for run in runs:
        run.recording = shared_part(run.recording)
    # Ranks that never met have no numbers yet, and other records.
    recordings = [run.recording for run in runs if not run.failure or run.recording.processes]
    checked = run_checks(recordings)
    failure = next((run.failure for run in runs if run.failure), stopped)
    if failure is not None:
        failure = _with_finding(failure, checked.findings)
    measured = [recording for recording in recordings if recording.ranks]
    return AuditResult(
        command=command.text,
        recordings=[run.recording for run in runs],
        findings=checked.findings,
        possible=checked.possible,
        verdict=verdict(recordings, checked.findings, checked.properties, failure=failure),
        properties=checked.properties,
        remarks=[
            *remarks,
            *dict.fromkeys(text for run in runs for text in run.recording.set_aside),
        ],
        performance=measure(measured[-1], rate_bits=parse_rate(rate)) if measured else None,
        failure=failure,
    )


def _remarks(command: AuditCommand, runs: Sequence[AuditRun], asked: Sequence[int]) -> list[str]:
    """Return why the script did not run at some size, and which sizes would say more."""
    fixed = {run.fixed_size for run in runs if run.fixed_size}
    if fixed:
        return sorted(
            f"The script fixes its number of ranks at {size}: "
            f"a literal divisor of {size} cannot be told from the number of ranks."
            for size in fixed
        )
    remarks = []
    skipped = set(asked) - {run.size for run in runs}
    if command.takes_size and skipped:
        remarks.append(
            f"Not run on {counts(skipped, 'rank')}, because it did not run to the end before."
        )
    in_groups = any(groups(run.recording) for run in runs)
    if in_groups and max(run.recording.size for run in runs) < _SEVERAL_GROUPS:
        remarks.append(
            "The script makes groups of ranks, such as those of a node: audit it where there are "
            "several groups of several ranks, for example with --ranks 4 6."
        )
    return remarks


def _with_finding(failure: Failure, findings: Sequence[Finding]) -> Failure:
    """Return the failure, with no other explanation than a fault that makes the ranks fail."""
    if any(finding.entry.fails for finding in findings):
        return dataclasses.replace(failure, cause="", cure="", advice="The fault explains it.")
    return failure
