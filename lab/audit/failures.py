"""Why a script could not be run to the end of the audit: what happened, and what to try."""

import difflib
import re
from pathlib import Path

from common.errors import count
from lab.audit.recording import RankRecords
from lab.audit.records import (
    Backward,
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
from lab.audit.runner import AuditRun
from lab.processes.first_failure import find_root_failure, last_error_line

_CONSEQUENCE = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Process(Raised|Exited)|ChildFailed|"
    "Socket (Timeout|closed)"
)
_CONNECTS_TO = re.compile(r"(?:host |connect to |addresses of )[\[(]?([\w.-]+)\]?[:,]")
# The prefix of each line, and what torchrun prints about itself once a rank has failed.
_TORCHRUNS_OWN = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:\s?)?(?:[EW]\d{4} [^\n]*torch/distributed/elastic/.*)?",
    re.MULTILINE | re.DOTALL,
)
_TORCHRUN = "lab audit -- torchrun --nproc-per-node 2 SCRIPT"
_GLOOS_PLACE = re.compile(r"\[enforce fail at [^\]]*\]\s*")
_MODULE = re.compile(r"No module named '?([\w.]+)")
# Modules that scripts import from packages of others: no other one is ever advised.
_PACKAGES = (
    *("accelerate", "albumentations", "cv2", "datasets", "einops", "evaluate", "h5py", "hydra"),
    *("lightning", "matplotlib", "nltk", "numpy", "omegaconf", "pandas", "peft", "PIL", "psutil"),
    *("pytorch_lightning", "requests", "safetensors", "scipy", "sentencepiece", "sklearn"),
    *("tensorboard", "tensorboardX", "timm", "tokenizers", "torch", "torchaudio", "torchmetrics"),
    *("torchtext", "torchvision", "tqdm", "transformers", "wandb", "yaml"),
)
_HINTS = (
    (
        r"Unable to find address for: (\S+)|(?:interface|device) (\w+)[^\n]*(?:not found|unknown)",
        "The script needs a network interface that is missing here: try --isolate {0}.",
    ),
    (
        r"(?:getaddrinfo|gaierror|Name or service not known|name resolution)[^\n]*",
        "The script looks up a host name: try --isolate NAME, or give {{master}} in the command.",
    ),
    (
        r"Cannot assign requested address|[Nn]o route to host|Network is unreachable",
        "The script needs a certain address: try --isolate ADDRESS, or give {{master}} in the "
        "command.",
    ),
    (
        r"UnpicklingError|Ran out of input|pickle data was truncated|BadZipFile",
        "A cached file is broken, as when two ranks write it at once: delete it, run the command "
        "once on a single rank, or let rank 0 write the file while the others wait in a barrier.",
    ),
    (r"EOFError", "The script reads stdin, which is empty here: pass the answers as flags."),
    (
        r"URLError|HTTP Error|HTTPError|ConnectionError|Max retries",
        "A download or connection failed: put the data where the script looks for them.",
    ),
    (
        r"environment variable (\w+) expected|KeyError: '(?:RANK|WORLD_SIZE|LOCAL_RANK)'",
        f"The script is written for torchrun: try {_TORCHRUN}.",
    ),
    (
        r"error: (?:unrecognized arguments|the following arguments|argument |invalid choice)",
        "Give the flags that the script asks for; {{master}}, {{port}}, {{nodes}} and {{rank}} are "
        "replaced by their values.",
    ),
    (
        r"can't open file|FileNotFoundError|No such file|not found or corrupted|Dataset not found",
        "A file is missing: cd to the folder in which the script normally runs, then repeat.",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "Another program uses this port: stop it, or give {{port}} in the command.",
    ),
    (
        r"MemoryError|out of memory|allocate memory",
        "The run needs too much memory: use a smaller batch, or fewer --ranks.",
    ),
    (
        r"CUDA|NVIDIA|[Nn][Cc][Cc][Ll]",
        "The script needs a GPU: use a machine that has one, or pass the script's CPU flag.",
    ),
    (
        r"new group's (?:world size|rank)",
        "The script makes a group of a fixed number of ranks: give that number with --ranks.",
    ),
    (
        r"AssertionError",
        "If that is about the number of ranks, give one that the script takes: --ranks {more}.",
    ),
    (r"usage:", "Give the flags that the script asks for."),
)


def explain_failure(run: AuditRun) -> str | None:
    """Return why a run could not be audited, or not to its end; None if nothing went wrong.

    What to try may follow in a line of its own.
    """
    ranks = "" if run.size is None else f" on {run.size} ranks"
    steps, reason = run.recording.steps, _reason(run)
    how = f"stopped after {count(steps, 'step')}" if steps else "could not be run"
    return None if reason is None else f"{how}{ranks}: {reason}"


def _reason(run: AuditRun) -> str | None:
    recording, steps = run.recording, run.settings.steps
    processes = recording.processes
    causes = [
        error
        for one in processes
        for error in one.of(Error)
        if not error.after_cut and not _CONSEQUENCE.search(f"{error.type} {error.message}")
    ]
    error = min(causes, key=lambda error: error.t, default=None)
    whole = run.wanted_size is None and not any(one.of(Cut) for one in processes)
    gone = _gone(run) if whole and error is None else None
    status = run.statuses[gone.rank] if gone and run.command.one_process_a_rank else None
    if gone is not None and not status:
        how = {
            0: "it left with status 0 and no error, as after os._exit(0)",
            None: "it was stopped or killed, left by os._exit, or is stuck outside Python",
        }[status]
        return (
            f"rank {gone.rank} is gone after {len(gone.of(Step))} of {steps} steps: {how}. "
            f"{_waits(run)}Find out why this rank leaves."
        )
    if run.failed:
        return _own_error(run, error, gone)
    if run.hung:
        return f"{run.hung}. {_waits(run)}\n{_connects(run)}"
    training = [one for one in processes if one.of(Backward)]
    cases = (
        (
            not any(one.of(Start) for one in processes),
            "the audit could not enter any Python process. Give the Python command itself, without "
            "-I, -E or -S: they ignore PYTHONPATH, and so may a wrapper such as sudo or docker.",
        ),
        (
            recording.steps == 0 and training,
            "the script computes gradients, but no torch.optim optimiser uses them. Use one for "
            "the audit.",
        ),
        (
            recording.steps == 0,
            "the script ended before any torch.optim optimiser took a step. Give the command that "
            "trains.",
        ),
        (
            recording.size < 2 and len(training) > 1,
            f"{len(training)} of its processes train, but none joins a process group. The audit "
            "does not see gradients sent by torch.distributed.rpc, MPI or shared memory.",
        ),
        (
            recording.size < 2,
            "the script trains on one rank only, so there is nothing to compare. Pass {nodes} and "
            f"{{rank}} to it, or start it with torchrun: {_TORCHRUN}.",
        ),
        (
            recording.steps <= min(steps / 2, 3),
            f"the script ended after {recording.steps} of {steps} steps, although no error was "
            f"seen. Let it train longer, or pass --steps {recording.steps}.",
        ),
    )
    return next((text for holds, text in cases if holds), None)


def _gone(run: AuditRun) -> RankRecords | None:
    """Return the rank that fell silent first, not in good order; None without one.

    Where ranks wait too long or fail, all that still run are asked for their stacks, and a rank
    that has left by os._exit is what the others wait for.
    """
    silent = [
        rank
        for rank in run.recording.ranks
        if rank.of(Group)
        and not rank.of(Error)
        and not rank.of(Stack)
        and not isinstance(rank.records[-1], Stands)
        and all(
            (run.failed or run.hung) and end.status is not None and not end.after_cut
            for end in rank.of(ProcessEnd)
        )
    ]
    return min(silent, key=lambda rank: rank.records[-1].t, default=None)


def _own_error(run: AuditRun, error: Error | None, gone: RankRecords | None) -> str:
    """Return the script's own last error, and what to try."""
    outputs = {number: _TORCHRUNS_OWN.sub("", run.output(number)) for number in run.failed}
    statuses = {number: run.statuses[number] or 0 for number in run.failed}
    failed = [gone.rank] if gone is not None and gone.rank in statuses else list(run.failed)
    culprit, message = find_root_failure(
        failed,
        statuses,
        outputs,
        name="rank" if run.command.one_process_a_rank else "process",
    )
    if error is not None:
        text = f"{error.type}: {error.message}".strip().splitlines()[0][:300]
        message = f"{text} (at {error.at})" if error.at else text
    printed = last_error_line(outputs[culprit]) + outputs[culprit][-4000:]
    message = _GLOOS_PLACE.sub("", message).rstrip(".")
    end = "" if message.endswith("?") else "."
    return f"{message}{end}\n{_advice(message + printed, run)}"


def _advice(text: str, run: AuditRun) -> str:
    """Return what to try after an error of the script, from its text."""
    if missing := _MODULE.search(text):
        return _about_module(missing[1].partition(".")[0], run)
    for pattern, advice in _HINTS:
        if match := re.search(pattern, text):
            name = next(filter(None, match.groups()), "NAME")
            return advice.format(name, more=(run.size or 2) + 1)
    return "" if " (at " in text else "First run the command without lab audit."


def _about_module(name: str, run: AuditRun) -> str:
    """Return what to do about a module that is missing: only a known package is to be installed."""
    if name in _PACKAGES:
        starts = [start for one in run.recording.processes for start in one.of(Start)]
        python = next((start.executable for start in starts), None) or run.command.words[0]
        return (
            f"{python} has no {name}: install it there, or give the Python of the script's "
            "environment, as in lab audit -- /path/to/python main.py."
        )
    own = [path.stem for path in run.command.user_folder(Path.cwd()).iterdir()]
    if close := difflib.get_close_matches(name, [*_PACKAGES, *own], n=1, cutoff=0.8):
        return f"Did you mean {close[0]}?"
    return (
        f"lab audit does not know {name}: cd to the folder in which the script normally runs, and "
        "first run the command without lab audit."
    )


def _waits(run: AuditRun) -> str:
    """Return in which collective each rank waits, as a sentence; nothing without such a rank."""
    waits = set()
    for one in run.recording.processes:
        done = {record.call_number for record in one.of(Done) if not record.error}
        if open_calls := [call for call in one.of(CollectiveCall) if call.number not in done]:
            last = open_calls[-1]
            waits.add(f"{last.name} ({last.at})" if last.at else last.name)
    return f"The ranks wait in {', '.join(sorted(waits))}. " if waits else ""


def _connects(run: AuditRun) -> str:
    """Return what to try where ranks wait: for each other's addresses, or for anything else."""
    if not _waits(run).startswith("The ranks wait in init_process_group"):
        return (
            "Check that every rank reaches the same call; if the run is only slow, use less data "
            "or raise --timeout."
        )
    found = _CONNECTS_TO.search("\n".join(map(run.output, range(len(run.statuses)))))
    return (
        "Give the number of ranks, the address and the port that it uses: --ranks N, {master} and "
        f"{{port}} in the command, or --isolate {found[1] if found else 'ADDRESS'}."
    )
