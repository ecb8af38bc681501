"""Why a script could not be audited: one sentence on what happened, and one on what to try."""

import re
import sys
from collections.abc import Iterator

from common.utils.processes import find_root_failure, last_error_line
from lab.audit.command import AuditCommand
from lab.audit.recording import ProcessRecords, Record, Recording, code_line
from lab.audit.runner import RunEnd

_CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Process(Raised|Exited)|ChildFailed"
)
_CONNECTS_TO = re.compile(r"(?:host |connect to |addresses of )[\[(]?([\w.-]+)\]?[:,]")
_PREFIX = re.compile(r"^\[(rank|default)\d+\]:\s?", re.MULTILINE)
_TORCHRUNS_REPORT = re.compile(
    r"^[EW]\d{4} [^\n]*torch/distributed/elastic/.*", re.MULTILINE | re.DOTALL
)
"""What torchrun prints once a rank has failed: about itself, not about the script."""
_TORCHRUN = "lab audit -- torchrun --nproc-per-node 2 SCRIPT"
_HINTS = (
    (r"No module named '?([\w.]+)", "Install {0} for the interpreter of the command ({python})."),
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
    (r"usage:", "Give the flags that the script asks for."),
)


def explain_failure(command: AuditCommand, end: RunEnd, recording: Recording) -> str | None:
    """Return why a run could not be audited, or not to its end; None if nothing went wrong."""
    ranks = "" if end.size is None else f" on {end.size} ranks"
    reason = _reason(command, end, recording)
    return None if reason is None else f"could not be audited{ranks}: {reason}"


def _reason(command: AuditCommand, end: RunEnd, recording: Recording) -> str | None:
    starts = [start for one in _processes(recording) for start in one.by_kind["start"]]
    if end.failed:
        return _own_error(command, end, recording)
    if end.hung:
        return f"{end.hung}. {_waiting(end, recording)}"
    if not starts:
        return (
            "the audit could not enter any Python process. Give the Python command itself, without "
            "-I, -E or -S: they ignore PYTHONPATH, and so may a wrapper such as sudo or docker."
        )
    if end.steps == 0:
        return _no_step(recording)
    training = sum(1 for one in _processes(recording) if one.by_kind["backward"])
    if recording.size < 2 and training > 1:
        return (
            f"{training} of its processes train, but none joins a process group. The audit does "
            "not see gradients sent by torch.distributed.rpc, MPI or shared memory."
        )
    if recording.size < 2:
        return (
            "the script trains on one rank only, so there is nothing to compare. Pass {nodes} and "
            f"{{rank}} to it, or start it with torchrun: {_TORCHRUN}."
        )
    return None


def _own_error(command: AuditCommand, end: RunEnd, recording: Recording) -> str:
    """Return the script's own last error, and what to try."""
    outputs = {
        number: _TORCHRUNS_REPORT.sub("", _PREFIX.sub("", end.output(number)))
        for number in end.failed
    }
    statuses = {number: end.statuses[number] or 0 for number in end.failed}
    name = "rank" if command.one_process_a_rank else "process"
    culprit, message = find_root_failure(list(end.failed), statuses, outputs, name=name)
    if error := _first_error(recording):
        text = f"{error['type']}: {error['message']}".strip().splitlines()[0][:300]
        at = code_line(error.get("at"))
        message = f"{text} (at {at})" if at else text
    text = message + last_error_line(outputs[culprit]) + outputs[culprit][-4000:]
    hint = next(filter(None, (_hint(pattern, advice, text) for pattern, advice in _HINTS)), None)
    return f"{message.rstrip('.')}. {hint or 'First run the command without lab audit.'}"


def _hint(pattern: str, advice: str, text: str) -> str | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    found = next(filter(None, match.groups()), "NAME")
    return advice.format(found, python=sys.executable)


def _first_error(recording: Recording) -> Record | None:
    """Return the earliest error of the script that is not another rank's end."""
    errors = sorted(
        (
            error
            for one in _processes(recording)
            for error in one.by_kind["error"]
            if not error.get("after_cut")
        ),
        key=lambda error: error["t"],
    )
    causes = (one for one in errors if not _CONSEQUENCE.search(f"{one['type']} {one['message']}"))
    return next(causes, None)


def _processes(recording: Recording) -> Iterator[ProcessRecords]:
    for rank in recording.ranks:
        yield rank
        yield from rank.workers
    yield from recording.others


def _waiting(end: RunEnd, recording: Recording) -> str:
    """Return in which collective each rank waits, and what to try."""
    waits = []
    for one in _processes(recording):
        done = {record["c"] for record in one.by_kind["done"]}
        open_calls = [call for call in one.by_kind["call"] if call["c"] not in done]
        if open_calls:
            at = code_line(open_calls[-1].get("at"))
            waits.append(f"{open_calls[-1]['name']} ({at})" if at else open_calls[-1]["name"])
    where = f"The ranks wait in {', '.join(sorted(set(waits)))}. " if waits else ""
    if any(wait.startswith("init_process_group") for wait in waits):
        outputs = (end.output(number) for number in range(len(end.statuses)))
        found = next(filter(None, map(_CONNECTS_TO.search, outputs)), None)
        address = found[1] if found else "ADDRESS"
        return (
            f"{where}Give the number of ranks, the address and the port that it uses: --ranks N, "
            f"{{master}} and {{port}} in the command, or --isolate {address}."
        )
    return (
        f"{where}Check that every rank reaches the same call; if the run is only slow, use less "
        "data or raise --timeout."
    )


def _no_step(recording: Recording) -> str:
    if any(one.by_kind["backward"] for one in _processes(recording)):
        return (
            "the script computes gradients, but no torch.optim optimiser uses them. Use one for "
            "the audit."
        )
    return (
        "the script ended before any torch.optim optimiser took a step. Give the command that "
        "trains."
    )
