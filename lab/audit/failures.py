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

# Of errors that another rank's end causes.
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
# Patterns of errors, of which the first that is found counts, and what to try. {0} is what a group
# of the pattern has matched, {more} a greater number of ranks; {{master}} stays in the text.
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
    reason = _reason(run)
    if reason is None:
        return None
    steps = run.recording.steps
    how = f"stopped after {count(steps, 'step')}" if steps else "could not be run"
    if run.size is None:
        return f"{how}: {reason}"
    return f"{how} on {run.size} ranks: {reason}"


def _reason(run: AuditRun) -> str | None:
    """Return what went wrong, and on a second line what to try; None if nothing did.

    In this order: a rank left in silence, the script failed, it hung, it trained too little.
    """
    error = _first_error(run)
    was_cut = any(process.of(Cut) for process in run.recording.processes)
    unexplained = error is None and run.wanted_size is None and not was_cut
    gone = _first_gone(run) if unexplained else None
    if gone is not None and (how := _how_it_left(run, gone)):
        steps = f"{len(gone.of(Step))} of {run.settings.steps} steps"
        return (
            f"rank {gone.rank} is gone after {steps}: {how}. {_waits(run)}Find out why this rank "
            "leaves."
        )
    if run.failed:
        return _own_error(run, error, gone)
    if run.hung:
        return f"{run.hung}. {_waits(run)}\n{_connects(run)}"
    return _too_little(run)


def _first_error(run: AuditRun) -> Error | None:
    """Return the first error before the cut that another rank's end does not explain, or None."""
    errors = [error for process in run.recording.processes for error in process.of(Error)]
    early = [error for error in errors if not error.after_cut]
    causes = [error for error in early if not _CONSEQUENCE.search(f"{error.type} {error.message}")]
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


def _too_little(run: AuditRun) -> str | None:
    """Return what is missing in a run that ended by itself; None if there is enough to check."""
    recording = run.recording
    wanted_steps = run.settings.steps
    training = [process for process in recording.processes if process.of(Backward)]
    if not any(process.of(Start) for process in recording.processes):
        return (
            "the audit could not enter any Python process. Give the Python command itself, without "
            "-I, -E or -S: they ignore PYTHONPATH, and so may a wrapper such as sudo or docker."
        )
    if recording.steps == 0 and training:
        return (
            "the script computes gradients, but no torch.optim optimiser uses them. Use one for "
            "the audit."
        )
    if recording.steps == 0:
        return (
            "the script ended before any torch.optim optimiser took a step. Give the command that "
            "trains."
        )
    if recording.size < 2 and len(training) > 1:
        return (
            f"{len(training)} of its processes train, but none joins a process group. The audit "
            "does not see gradients sent by torch.distributed.rpc, MPI or shared memory."
        )
    if recording.size < 2:
        return (
            "the script trains on one rank only, so there is nothing to compare. Pass {nodes} and "
            f"{{rank}} to it, or start it with torchrun: {_TORCHRUN}."
        )
    if recording.steps <= min(wanted_steps / 2, 3):
        return (
            f"the script ended after {recording.steps} of {wanted_steps} steps, although no error "
            f"was seen. Let it train longer, or pass --steps {recording.steps}."
        )
    return None


def _own_error(run: AuditRun, error: Error | None, gone: RankRecords | None) -> str:
    """Return the error of the rank that failed first, and on a second line what to try.

    error : as recorded; None: the last one that the rank printed is returned.
    gone : a rank that left in silence, and with an error's status; it counts as the first.
    """
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
        text = f"{error.type}: {error.message}".strip()
        message = text.splitlines()[0][:300]
        if error.at:
            message += f" (at {error.at})"
    printed = last_error_line(outputs[culprit]) + outputs[culprit][-4000:]  # for the advice
    message = _GLOOS_PLACE.sub("", message).rstrip(".")
    end = "" if message.endswith("?") else "."
    return f"{message}{end}\n{_advice(message + printed, run)}"


def _advice(text: str, run: AuditRun) -> str:
    """Return what to try after an error of the script, from its text; "" if it names its line."""
    if missing := _MODULE.search(text):
        package, _, _ = missing[1].partition(".")
        return _about_module(package, run)
    for pattern, advice in _HINTS:
        if match := re.search(pattern, text):
            missing_name = next(filter(None, match.groups()), "NAME")
            return advice.format(missing_name, more=(run.size or 2) + 1)
    return "" if " (at " in text else "First run the command without lab audit."


def _about_module(name: str, run: AuditRun) -> str:
    """Return what to do about a module that is missing: only a known package is to be installed."""
    if name in _PACKAGES:
        return (
            f"{_python(run)} has no {name}: install it there, or give the Python of the script's "
            "environment, as in lab audit -- /path/to/python main.py."
        )
    own = [path.stem for path in run.command.user_folder(Path.cwd()).iterdir()]
    if close := difflib.get_close_matches(name, [*_PACKAGES, *own], n=1, cutoff=0.8):
        return f"Did you mean {close[0]}?"
    return (
        f"lab audit does not know {name}: cd to the folder in which the script normally runs, and "
        "first run the command without lab audit."
    )


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


def _connects(run: AuditRun) -> str:
    """Return what to try where ranks wait: to connect to each other, or in a later call."""
    if not _waits(run).startswith("The ranks wait in init_process_group"):
        return (
            "Check that every rank reaches the same call; if the run is only slow, use less data "
            "or raise --timeout."
        )
    outputs = [run.output(process) for process in range(len(run.statuses))]
    found = _CONNECTS_TO.search("\n".join(outputs))
    return (
        "Give the number of ranks, the address and the port that it uses: --ranks N, {master} and "
        f"{{port}} in the command, or --isolate {found[1] if found else 'ADDRESS'}."
    )
