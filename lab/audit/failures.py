"""Why a script could not be run to the end of the audit: what happened, and what to try.

Errors of the script are looked up in the table of ``lab explain``, lab/explain/known_errors.toml.
"""

import difflib
import os
import re
import shlex
import textwrap
from dataclasses import replace
from pathlib import Path

from common.say import count
from common.utils.typed_json import without_colours
from lab.audit.probe.state import belongs_to
from lab.audit.recording import RankRecords
from lab.audit.records import (
    Backward,
    CodeLine,
    CollectiveCall,
    Cut,
    Done,
    Error,
    Group,
    ProcessEnd,
    Stack,
    Stands,
    Start,
    Step,
)
from lab.audit.result import Failure
from lab.audit.runner import AuditRun
from lab.explain.diagnosis import (
    filled,
    find_known,
    first_to_fail,
    flags_of,
    is_consequence,
    words_of,
)
from lab.explain.episodes import Episode, KnownError

_CONNECTS_TO = re.compile(r"(?:host |connect to |addresses of )[\[(]?([\w.-]+)\]?[:,]")
_TORCHRUN = "lab audit -- torchrun --nproc-per-node 2 SCRIPT"
_GLOOS_PLACE = re.compile(r"\[enforce fail at [^][]*\]\s*")
_ERROR = re.compile(r"[Ee]rror|Exception|printed nothing")
_UNREADABLE = ("SyntaxError", "IndentationError", "TabError")
_PRINTED = 4000  # characters of a rank's output that are read for the cause
_MODULE = re.compile(r"No module named '?([\w.]+)")
_MOST_FILES = 20_000  # to look at for a module of the user's own
# Modules that scripts import from packages of others, for misspelt ones.
_PACKAGES = (
    *("accelerate", "albumentations", "cv2", "datasets", "einops", "evaluate", "h5py", "hydra"),
    *("lightning", "matplotlib", "nltk", "numpy", "omegaconf", "pandas", "peft", "PIL", "psutil"),
    *("pytorch_lightning", "requests", "safetensors", "scipy", "sentencepiece", "sklearn"),
    *("tensorboard", "tensorboardX", "timm", "tokenizers", "torch", "torchaudio", "torchmetrics"),
    *("torchtext", "torchvision", "tqdm", "transformers", "wandb", "yaml"),
)


def explain_failure(run: AuditRun) -> Failure | None:
    """Return why a run could not be audited, or not to its end; None if nothing went wrong."""
    failure = _failure(run)
    if failure is None:
        return None
    steps = run.recording.steps
    how = f"stopped after {count(steps, 'step')}" if steps else "could not be run"
    if run.size is not None:
        how += f" on {run.size} ranks"
    return replace(failure, how=how)


def _failure(run: AuditRun) -> Failure | None:
    """Return what went wrong and what to try; None if nothing did.

    In this order: a rank left in silence, the script failed, it hung, it trained too little.
    """
    error = _first_error(run)
    was_cut = any(process.of(Cut) for process in run.recording.processes)
    unexplained = error is None and run.wanted_size is None and not was_cut
    gone = _first_gone(run) if unexplained else None
    if gone is not None and (how := _how_it_left(run, gone)):
        steps = count(len(gone.of(Step)), "step")
        reason = f"rank {gone.rank} is gone after {steps}: {how}. {_waits(run)}".strip()
        return Failure(reason, cure="Find out why this rank leaves.")
    if run.failed:
        return _own_error(run, error, gone)
    if run.hung:
        return _hang(run, run.hung)
    return _too_little(run)


def _first_error(run: AuditRun) -> Error | None:
    """Return the first error before the cut that another rank's end does not explain, or None."""
    errors = [error for process in run.recording.processes for error in process.of(Error)]
    early = [error for error in errors if not error.after_cut]
    causes = [error for error in early if not is_consequence(f"{error.type}: {error.message}")]
    return min(causes, key=lambda error: error.t, default=None)


def _first_gone(run: AuditRun) -> RankRecords | None:
    """Return the rank that fell silent first, not in good order; None without one."""
    silent = [rank for rank in run.recording.ranks if _is_silent(run, rank)]
    return min(silent, key=lambda rank: rank.records[-1].t, default=None)


def _is_silent(run: AuditRun, rank: RankRecords) -> bool:
    """Return whether a rank has told nothing of its end, or left by os._exit before the others.

    Where ranks wait too long, all that still run are asked for their stacks, so a rank with one is
    not silent; and where they wait or fail, they do so for a rank that has left by os._exit.
    """
    if rank.of(Error) or not rank.of(Group):
        return False
    if rank.of(Stack) or isinstance(rank.records[-1], Stands):
        return False
    for end in rank.of(ProcessEnd):
        left_early = end.status is not None and not end.after_cut
        if not left_early or not (run.failed or run.hung):
            return False
    return True


def _how_it_left(run: AuditRun, gone: RankRecords) -> str | None:
    """Return how a rank has left in silence; None if its exit status is that of an error."""
    status = run.statuses[gone.rank] if run.command.one_process_a_rank else None
    if status is None:
        return "it was stopped or killed, left by os._exit, or is stuck outside Python"
    if status == 0:
        return "it left with status 0 and no error, as after os._exit(0)"
    return None


def _too_little(run: AuditRun) -> Failure | None:
    """Return what is missing in a run that ended by itself; None if there is enough to check."""
    recording = run.recording
    training = [process for process in recording.processes if process.of(Backward)]
    if not any(process.of(Start) for process in recording.processes):
        return Failure(
            "the audit could not enter any Python process.",
            advice="Give the Python command itself, without -I, -E or -S: they ignore PYTHONPATH, "
            "and so may a wrapper such as sudo or docker.",
        )
    if recording.steps == 0 and training:
        return Failure(
            "the script computes gradients, but no torch.optim optimiser uses them.",
            advice="Use one for the audit.",
        )
    if recording.steps == 0:
        return Failure(
            "the script ended before any torch.optim optimiser took a step.",
            advice="Give the command that trains.",
        )
    if recording.size < 2 and len(training) > 1:
        return Failure(
            f"{len(training)} of its processes train, but none joins a process group.",
            advice="The audit does not see gradients sent by torch.distributed.rpc, MPI or shared "
            "memory.",
        )
    if recording.size < 2:
        return Failure(
            "the script trains on one rank only, so there is nothing to compare.",
            advice=f"Pass {{nodes}} and {{rank}} to it, or start it with torchrun: {_TORCHRUN}.",
        )
    if recording.steps < run.settings.fewest_steps:
        return Failure(
            f"the script ended after {count(recording.steps, 'step')}, although no error was seen.",
            advice=f"Let it train longer, or pass --steps {recording.steps}.",
        )
    return None


def _own_error(run: AuditRun, error: Error | None, gone: RankRecords | None) -> Failure:
    """Return the error of the rank that failed first, with its cause and what to try.

    error : as recorded; None: the first failure that the rank printed is returned.
    gone : a rank that left in silence, and with an error's status; it counts as the first.
    """
    culprit, message, episode = _first_to_fail(run, gone)
    at = _place(error, episode, run)
    told = episode.message
    found = episode.known
    if error is not None:
        kind_and_text = (error.type, without_colours(error.message).strip())
        told = ": ".join(filter(None, kind_and_text))
        message = textwrap.shorten(told.splitlines()[0], 300, placeholder=" …")
        around = f"{at or ''}\n{without_colours(run.output(culprit))[-_PRINTED:]}"
        found = find_known(told, around=lambda: around, before=lambda: around)
    if found is not None and found.kind == "note":
        found = None
    if at is not None:
        message = f"{message.rstrip('.')} (at {at})"
    elif found is None and not _ERROR.search(message):
        message = message.replace(": ", ", and last printed: ", 1)
    message = _GLOOS_PLACE.sub("", message).rstrip(".")
    end = "" if message.endswith("?") else "."
    return _explained(Failure(f"{message}{end}", at=at), found, told, run)


def _first_to_fail(run: AuditRun, gone: RankRecords | None) -> tuple[int, str, Episode]:
    """Return the process that failed first, a message, and its failure; see ``_own_error``."""
    statuses = {number: run.statuses[number] or 0 for number in run.failed}
    if gone is not None and gone.rank in statuses:
        statuses = {gone.rank: statuses[gone.rank]}
    outputs = {number: run.output(number) for number in statuses}
    return first_to_fail(
        statuses, outputs, name="rank" if run.command.one_process_a_rank else "process"
    )


def _place(error: Error | None, episode: Episode, run: AuditRun) -> CodeLine | None:
    """Return the line of the script at which it failed, or None.

    The probe records the line that imports a file which Python cannot read; the printed traceback
    names the line in that file.
    """
    printed_place = _printed_place(episode, run)
    if error is None:
        return printed_place
    if error.type in _UNREADABLE:
        return printed_place or error.at
    return error.at or printed_place


def _printed_place(episode: Episode, run: AuditRun) -> CodeLine | None:
    """Return the innermost line of the script in a printed traceback, or None."""
    cwd = run.settings.cwd
    folder = os.path.realpath(run.command.user_folder(cwd))
    for frame in reversed(episode.frames):
        path = os.path.realpath(cwd / frame.file)
        if not frame.file.startswith("<") and belongs_to(path, folder):
            return CodeLine(os.path.relpath(path, folder), frame.line, frame.source)
    return None


def _explained(failure: Failure, error: KnownError | None, told: str, run: AuditRun) -> Failure:
    """Return a failure with the cause and the cure of the known error, and what to try.

    told : the message that shows the error.
    """
    if error is None:
        advice = "" if failure.at else "First run the command without lab audit."
        return replace(failure, advice=advice)
    cure = filled(error.cure, flags_of([]))
    known = replace(failure, cause=error.cause, cure=cure, known_error=error.name)
    module = _MODULE.search(told)
    if module is not None and error.name == "missing_package":
        package, _, _ = module[1].partition(".")
        return replace(known, cause="", advice=_about_module(package, run))
    script = next((word for word in run.command.words if word.endswith(".py")), "SCRIPT")
    words = words_of(error, told) | {"script": script, "more": str((run.size or 2) + 1)}
    return replace(known, advice=filled(error.audit, words))


def _about_module(name: str, run: AuditRun) -> str:
    """Return what to do about a module that is missing: misspelt, elsewhere, or not installed."""
    folder = run.command.user_folder(Path.cwd())
    own = [path.stem for path in folder.iterdir()]
    close = difflib.get_close_matches(name, [*_PACKAGES, *own], n=1, cutoff=0.8)
    if close and close[0] != name:
        return f"Did you mean {close[0]}?"
    if place := _folder_with(name, folder):
        return f"{name} is in {place}: cd to that folder, or set PYTHONPATH={shlex.quote(place)}."
    return (
        f"{_python(run)} has no package {name}: install it there, or give the Python of the "
        "script's environment, as in lab audit -- /path/to/python main.py."
    )


def _folder_with(name: str, folder: Path) -> str | None:
    """Return the folder below the user's in which a module lies, as a relative path, or None."""
    seen = 0
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"site-packages", "node_modules", name})
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        seen += len(files)
        is_package = (Path(root) / name / "__init__.py").is_file()
        if is_package or f"{name}.py" in files:
            return os.path.relpath(root, folder)
        if seen > _MOST_FILES:
            break
    return None


def _python(run: AuditRun) -> str:
    """Return the interpreter that ran the script; if nothing tells, the command's first word."""
    starts = [start for process in run.recording.processes for start in process.of(Start)]
    if starts and starts[0].executable:
        return starts[0].executable
    return run.command.words[0]


def _waits(run: AuditRun) -> str:
    """Return in which collectives ranks wait, as a sentence; "" if none waits in any."""
    waits = set()
    for process in run.recording.processes:
        done = {record.call_number for record in process.of(Done) if not record.error}
        open_calls = [call for call in process.of(CollectiveCall) if call.number not in done]
        if open_calls:
            call = open_calls[-1]
            waits.add(f"{call.name} ({call.at})" if call.at else call.name)
    if not waits:
        return ""
    return f"The ranks wait in {', '.join(sorted(waits))}. "


def _hang(run: AuditRun, why: str) -> Failure:
    """Return where ranks wait: to connect to each other, or in a later call."""
    waits = _waits(run)
    reason = f"{why}. {waits}".strip()
    if not waits.startswith("The ranks wait in init_process_group"):
        return Failure(
            reason,
            cure="Check that every rank reaches the same call.",
            advice="Check that every rank reaches the same call; if the run is only slow, use less "
            "data or raise --timeout.",
        )
    joins = [one for process in run.recording.processes for one in process.of(CollectiveCall)]
    wanted = joins[0].wanted_world_size or 0
    if len(joins) < wanted:
        return Failure(
            f"only {len(joins)} of the {wanted} ranks that world_size asks for came: {reason}",
            at=joins[0].at,
            cure="Start as many processes as world_size says; mp.spawn() starts one unless it gets "
            "nprocs.",
        )
    outputs = map(run.output, range(len(run.statuses)))
    found = _CONNECTS_TO.search("\n".join(outputs))
    return Failure(
        reason,
        cure="Take the address, the port and the number of ranks from flags.",
        advice="Give the number of ranks, the address and the port that it uses: --ranks N, "
        f"{{master}} and {{port}} in the command, or --isolate {found[1] if found else 'ADDRESS'}.",
    )
