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
_TORCHRUN = "lab audit -- torchrun --nproc-per-node 2 SCRIPT"
_HINTS = (
    (r"No module named '?([\w.]+)", "Install {0} for the interpreter of the command ({python})."),
    (
        r"Unable to find address for: (\S+)|(?:interface|device) (\w+)[^\n]*(?:not found|unknown)",
        "It insists on a network interface: try --isolate {0}.",
    ),
    (
        r"(?:getaddrinfo|gaierror|Name or service not known|name resolution)[^\n]*",
        "It looks up a host name: try --isolate NAME, or give {{master}} in the command.",
    ),
    (
        r"Cannot assign requested address|[Nn]o route to host|Network is unreachable",
        "It insists on an address: try --isolate ADDRESS, or give {{master}} in the command.",
    ),
    (r"EOFError", "It reads from stdin, and there is no input: give its answers as flags."),
    (
        r"URLError|HTTP Error|HTTPError|ConnectionError|Max retries",
        "It downloads something: put its data where it looks for them, then repeat.",
    ),
    (
        r"environment variable (\w+) expected|KeyError: '(?:RANK|WORLD_SIZE|LOCAL_RANK)'",
        f"It is written for torchrun: try {_TORCHRUN}.",
    ),
    (
        r"error: (?:unrecognized arguments|the following arguments|argument |invalid choice)",
        "Give the flags that it asks for; {{master}}, {{port}}, {{nodes}} and {{rank}} are "
        "replaced by their values.",
    ),
    (
        r"can't open file|FileNotFoundError|No such file|not found or corrupted|Dataset not found",
        "Start it in the folder in which it finds its files: cd there, then lab audit.",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "Another program uses its port: end that, or give {{port}} in the command.",
    ),
    (
        r"CUDA|NVIDIA|[Nn][Cc][Cc][Ll]",
        "It asks for a GPU: run the audit where there is one, or give its flag for the CPU.",
    ),
    (
        r"new group's (?:world size|rank)",
        "It makes a group of a fixed number of ranks: give that number with --ranks.",
    ),
    (r"MemoryError|out of memory|allocate memory", "Give a smaller batch, or fewer --ranks."),
    (r"usage:", "Give the flags that it asks for."),
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
            "the command started no Python that loads the probe. Give the Python command itself, "
            "without -I, -E and -S and without wrappers: these hide PYTHONPATH."
        )
    if end.steps == 0:
        return _no_step(recording)
    training = sum(1 for one in _processes(recording) if one.by_kind["backward"])
    if recording.size < 2 and training > 1:
        return (
            f"{training} of its processes train, and no process group is seen. Other ways to "
            "exchange gradients (torch.distributed.rpc, MPI, shared memory) are not read."
        )
    if recording.size < 2:
        return (
            "it trains on one rank, so there is nothing to compare. Give it its number of ranks "
            f"and its rank with {{nodes}} and {{rank}}, or start it with torchrun: {_TORCHRUN}."
        )
    return None


def _own_error(command: AuditCommand, end: RunEnd, recording: Recording) -> str:
    """Return the script's own last error, and what to try."""
    outputs = {number: _PREFIX.sub("", end.output(number)) for number in end.failed}
    statuses = {number: end.statuses[number] or 0 for number in end.failed}
    name = "rank" if command.one_process_a_rank else "process"
    culprit, message = find_root_failure(list(end.failed), statuses, outputs, name=name)
    if error := _first_error(recording):
        text = f"{error['type']}: {error['message']}".strip().splitlines()[0][:300]
        at = code_line(error.get("at"))
        message = f"{text} (at {at})" if at else text
    text = message + last_error_line(outputs[culprit]) + outputs[culprit][-4000:]
    hint = next(filter(None, (_hint(pattern, advice, text) for pattern, advice in _HINTS)), None)
    return f"{message.rstrip('.')}. {hint or 'Run the command by itself first.'}"


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
    return next(causes, errors[0] if errors else None)


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
    where = f"They wait in {', '.join(sorted(set(waits)))}. " if waits else ""
    if any(wait.startswith("init_process_group") for wait in waits):
        outputs = (end.output(number) for number in range(len(end.statuses)))
        found = next(filter(None, map(_CONNECTS_TO.search, outputs)), None)
        address = found[1] if found else "ADDRESS"
        return (
            f"{where}Give the number of ranks, the address and the port that it uses: --ranks N, "
            f"{{master}} and {{port}} in the command, or --isolate {address}."
        )
    return f"{where}Unless a fault explains it, give less data or --steps, or raise --timeout."


def _no_step(recording: Recording) -> str:
    if any(one.by_kind["backward"] for one in _processes(recording)):
        return (
            "it computes gradients, but no optimiser of torch.optim used them, so what the update "
            "gets is not seen. Use a torch optimiser for the audit."
        )
    return (
        "it ended without a step of an optimiser of torch.optim on any rank. Give the command that "
        "trains, with PyTorch."
    )
