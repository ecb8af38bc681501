"""What students' scripts demand that the demanded command does not give.

A script that refuses its command before training begins says why: ``Refusal``. Each of ``DEMANDS``
knows one such reason and changes the task to meet it; ``next_task`` returns the first that does.
A changed task that is refused in turn is changed further, so that a script with other flags that
also takes a URL is met in two steps.
"""

import ast
import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.utils.atomic_files import read_regular
from lab.audit.recording import RankRecords
from lab.audit.records import Error, Group
from lab.audit.result import AuditResult
from lab.grade.rubric import has_placeholder
from lab.grade.sandbox import Task

_MOST_PRINTED = 2**16  # bytes of each rank
_MOST_SCRIPT = 2**20
_MOST_SOURCES = 20  # files beside the script

# What an option or a variable wants, by its name in small letters without - and _.
_URL = "tcp://{master}:{port}"
_ROLES = {
    "{master}": "masterip masteraddr masteraddress master masterhost mastername masternode ip addr "
    "address host hostname ipaddress ipaddr server serverip serveraddr leader root rootip",
    _URL: "initmethod disturl distinit distinitmethod initurl url rendezvous",
    "{port}": "port masterport distport serverport",
    "{nodes}": "numnodes nodes nnodes nnode numnode nodecount worldsize world size ws n num ranks "
    "numranks nranks nprocs nproc numprocs numprocesses numreplicas nummachines machines ntasks",
    "{rank}": "rank noderank localrank globalrank r nr id nodeid nodeindex workerid workerrank "
    "machinerank machineid node procid processid rankid myrank index localid",
    "gloo": "backend distbackend",
    "1": "gpus ngpus numgpus gpuspernode ngpuspernode nprocpernode localworldsize",
}
# These may mean something else: only where it is required, or no other argument has that role.
_WEAK = {"n", "num", "size", "r", "id", "index", "node", "root", "server", "host", "world", "ranks"}
# Only where the script requires them.
_REQUIRED = {
    "/tmp": "outputdir outdir outputpath savedir savepath logdir output checkpointdir ckptdir",
    "1": "epochs epoch numepochs nepochs numtrainepochs",
    "32": "batchsize batch bs trainbatchsize",
    "0": "seed",
}
_OF_TORCHRUN = re.compile(r"""["'](?:RANK|WORLD_SIZE|LOCAL_RANK)["']""")
_INTERFACE = re.compile(r"""["']((?:eth|en|eno|ens|enp|ib|wlan|bond|br)\d[\w.-]{0,12})["']""")
_ARGUMENT = re.compile(
    r"(\[)?(?:(--?[\w-]+)(?:[ =](\{[^{}]*\}|[^][\s(){}|-][^][\s(){}|]*))?|(\{[^{}]*\}|\w[\w-]*))"
)


class Refusal(msgspec.Struct):
    """How a script refused to train.

    Parameters
    ----------
    kind, message : the first error of a rank; "" without one.
    printed : the ends of what all ranks printed.
    alone : whether the ranks trained, each by itself.
    sources : the texts of the script and of what lies beside it.
    written : those of the student's shell scripts and notes.
    """

    kind: str
    message: str
    printed: str
    alone: bool
    sources: list[str]
    written: list[str] = []

    @property
    def text(self) -> str:
        """All that was said."""
        return f"{self.kind}: {self.message}\n{self.printed}"

    @property
    def code(self) -> str:
        """The whole text of the script and of what lies beside it."""
        return "\n".join(self.sources)


def refusal_of(task: Task, result: AuditResult, folder: Path) -> Refusal | None:
    """Return how a script refused to train; None if it trained, or a fault explains it.

    folder : that of ``audit_script``, with what the ranks printed.
    """
    processes = [process for recording in result.recordings for process in recording.processes]
    trained = any(recording.steps for recording in result.recordings)
    alone = trained and task.ranks != [1] and not any(process.of(Group) for process in processes)
    if not alone and (trained or result.status != 2):
        return None
    first = _first_error(processes)
    logs = sorted(folder.glob("*-ranks/rank*.log"))
    return Refusal(
        kind=first.type if first else "",
        message=first.message if first else "",
        printed="\n".join(_text(log, last_bytes=_MOST_PRINTED) for log in logs),
        alone=alone,
        sources=[_text(file, last_bytes=_MOST_SCRIPT) for file in _sources(task)],
        written=[_text(file, last_bytes=_MOST_PRINTED) for file in _notes(task)],
    )


def _first_error(processes: Sequence[RankRecords]) -> Error | None:
    """Return the first error of any process before the cut; None without one."""
    errors = [error for process in processes for error in process.of(Error)]
    early = [error for error in errors if not error.after_cut]
    return min(early, key=lambda error: error.t, default=None)


def _sources(task: Task) -> list[Path]:
    """Return the script, then the Python files beside it."""
    script = Path(task.submission) / task.script
    beside = [file for file in sorted(script.parent.glob("*.py")) if file.is_file()]
    return [script, *(file for file in beside[:_MOST_SOURCES] if file != script)]


def _notes(task: Task) -> list[Path]:
    """Return the shell scripts and notes of a submission, those beside the script first."""
    top = Path(task.submission)
    beside = (top / task.script).parent
    notes = [path for kind in ("*.sh", "*.md", "*.txt") for path in sorted(top.rglob(kind))]
    notes.sort(key=lambda path: path.parent != beside)
    return [path for path in notes if path.is_file()][:_MOST_SOURCES]


def _text(path: Path, *, last_bytes: int) -> str:
    return read_regular(path, last_bytes=last_bytes).decode(errors="replace")


@dataclass(frozen=True)
class Demand:
    """Something that scripts demand.

    says : the sentence on the page, in which {0} is what the change is about.
    meet : returns the changed task and what the change is about; None if this is not the reason.
    """

    says: str
    meet: Callable[[Task, Refusal], tuple[Task, str] | None]


def next_task(task: Task, refusal: Refusal) -> Task | None:
    """Return the task changed as the refusal demands; None if nothing is known that helps."""
    for demand in DEMANDS:
        met = demand.meet(task, refusal)
        if met is None:
            continue
        changed, what = met
        sentence = demand.says.format(what)
        return msgspec.structs.replace(changed, changes=[*task.changes, sentence])
    return None


def shown_command(task: Task) -> str:
    """Return the command as a person would type it in the folder in which it starts."""
    program = Path(task.program).name
    words = [program if word == task.program else _typed(word) for word in task.words]
    return " ".join(words).replace(f"{program} -m torch.distributed.run", "torchrun")


def _typed(word: str) -> str:
    """Return a word as a shell needs it; placeholders need no quotes."""
    bare = re.sub("[{}]", "", word)
    return word if shlex.quote(bare) == bare else shlex.quote(word)


# --- another folder ---


def _other_folder(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Start it where the relative path that it misses leads to something."""
    path = _missing_path(refusal)
    if path is None or os.path.isabs(path) or task.start == ".":
        return None
    top = Path(task.submission)
    for folder in [top, *task.cwd.parents]:
        target = folder / path
        leads = target.exists() or ("/" in path and target.parent.is_dir())
        if folder.is_relative_to(top) and folder != task.cwd and leads:
            return _started_in(task, os.path.relpath(folder, top)), _folder_name(folder, top)
    return None


def _started_in(task: Task, start: str) -> Task:
    """Return the task with its ranks in another folder of the submission."""
    before = os.path.relpath(task.script, task.start)
    script = os.path.relpath(task.script, start)
    words = [script if word == before else word for word in task.words]
    return msgspec.structs.replace(task, start=start, words=words)


def _folder_name(folder: Path, top: Path) -> str:
    return "the submission's own folder" if folder == top else str(folder.relative_to(top))


def _own_module(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Let it import a module that lies in another folder of the submission."""
    match = re.search(r"No module named '?([\w.]+)", refusal.text)
    if match is None:
        return None
    search = task.environment.get("PYTHONPATH", "")
    name = match[1].strip(".").partition(".")[0]
    if not name:
        return None
    top = Path(task.submission)
    for found in sorted([*top.rglob(f"{name}.py"), *top.rglob(name)]):
        if (found.is_file() and found.suffix == ".py") or found.is_dir():
            folders = [str(found.parent), *filter(None, search.split(":"))]
            if str(found.parent) in folders[1:]:
                return None
            environment = task.environment | {"PYTHONPATH": ":".join(folders)}
            changed = msgspec.structs.replace(task, environment=environment)
            return changed, str(found.relative_to(top))
    return None


def _missing_path(refusal: Refusal) -> str | None:
    """Return the path that an error says is missing, or may not be written; None without one."""
    match = re.search(r"\[Errno (?:2|13|30)\] [^:\n[]*: '([^'\n]+)'", refusal.text)
    return match[1] if match else None


# --- other arguments ---


class ScriptArgument(msgspec.Struct):
    """An option or a positional argument, as argparse's usage shows it or a source declares it.

    name : as it is typed; "" for a positional argument.
    means : the names that tell what it wants.
    takes : whether a value follows.
    """

    name: str
    means: list[str]
    takes: bool
    required: bool

    def words(self, value: str) -> list[str]:
        """Return it as it is typed with a value."""
        return [self.name, value] if self.name else [value]


def _other_flags(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Give it the flags that argparse's usage names, or the script where its usage names none."""
    usage = _usage(refusal.printed)
    if usage is None:
        return None
    declared: list[ScriptArgument] = []
    with contextlib.suppress(RecursionError):  # nested too deeply for what writes it
        for source in refusal.sources:
            declared += _declared(source)
    options = list(_options(usage)) or declared
    for option in options:
        for argument in declared:  # the usage leaves out its other names
            if _plain(option.name) in argument.means:
                option.means += argument.means
    place = _script_place(task)
    given = {_plain(option): values for option, *values in _pairs(task.words[place + 1 :])}
    arguments: list[str] = []
    for option in options:
        values = given.get(option.means[0])
        if values is not None and not any(map(has_placeholder, values)):
            arguments += [option.name, *values]
            continue
        value = _wanted(option.means, task, required=option.required)
        if option.required and value is None:
            return None
        if value is not None and option.takes and not _is_doubtful(option, value, options):
            arguments += option.words(value)
    words = [*task.words[: place + 1], *arguments]
    if words == task.words or ("{rank}" in arguments and _has_torchrun(task)):
        return None
    return msgspec.structs.replace(task, words=words), ""


def _usage(printed: str) -> str | None:
    """Return the arguments in the usage that argparse printed with an error; None without one."""
    words: list[str] | None = None
    for line in printed.splitlines():
        if line.startswith("usage: "):
            words = line.split()[2:]
        elif words is not None and ": error: " in line and not line[0].isspace():
            return " ".join(words)
        elif words is not None:
            words += line.split()
    return None


def _options(usage: str) -> Iterator[ScriptArgument]:
    """Yield the arguments in a usage, such as ``[-h] [--lr LR] --rank RANK master_ip``."""
    without_optional_positionals = re.sub(r"\[(\w[^][]*)\]", "", usage)
    for bracket, name, metavar, positional in _ARGUMENT.findall(without_optional_positionals):
        if positional:
            yield ScriptArgument("", [_plain(positional)], takes=True, required=True)
        else:
            means = [_plain(name), _plain(metavar)]
            yield ScriptArgument(name, means, takes=bool(metavar), required=not bracket)


def _declared(source: str) -> Iterator[ScriptArgument]:
    """Yield the arguments that a source adds to a parser."""
    for node in ast.walk(_tree(source)):
        if not isinstance(node, ast.Call) or _last_name(node.func) != "add_argument":
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        names = [ast.unparse(name).strip("\"'") for name in node.args]
        means = [_plain(name) for name in [*names, given.get("dest", ""), given.get("metavar", "")]]
        is_option = any(name.startswith("-") for name in names)
        yield ScriptArgument(
            name=names[-1] if is_option else "",
            means=[name for name in means if name],
            takes=re.match(".(store_|count|help|version)", given.get("action", "")) is None,
            required="required" in given if is_option else "nargs" not in given,
        )


def _is_doubtful(option: ScriptArgument, value: str, options: Sequence[ScriptArgument]) -> bool:
    """Return whether an option may not want this value, since another one surely does."""
    if option.required or not set(option.means) <= {*_WEAK, ""}:
        return False
    others = [other for other in options if other is not option and not set(other.means) <= _WEAK]
    return any(set(other.means) & set(_ROLES[value].split()) for other in others)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _wanted(names: Sequence[str], task: Task, *, required: bool) -> str | None:
    """Return what an argument with one of these names wants; None if nobody knows."""
    tables = [_ROLES, _REQUIRED] if required else [_ROLES]
    for table in tables:
        for value, known in table.items():
            if not set(names).isdisjoint(known.split()):
                return value
    if required and any("data" in name for name in names) and task.mounts:
        return next(iter(task.mounts))
    return None


def _script_place(task: Task) -> int:
    """Return the place of the script in the command's words."""
    return task.words.index(os.path.relpath(task.script, task.start))


def _positionals(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Give it what it reads from sys.argv."""
    misread = refusal.kind in ("IndexError", "ValueError") or "usage" in refusal.printed.lower()
    if not misread:
        return None
    names: dict[int, str] = {}
    for source in reversed(refusal.sources):
        names |= _argv_names(source)
    values: list[str] = []
    for number in range(1, max(names, default=0) + 1):
        value = _wanted([_plain(names.get(number, ""))], task, required=True)
        if value is None:
            return None
        values.append(value)
    words = [*task.words[: _script_place(task) + 1], *values]
    if not values or words == task.words:
        return None
    return msgspec.structs.replace(task, words=words), " ".join(values)


def _argv_names(script: str) -> dict[int, str]:
    """Return what a script calls each of its arguments, by the argument's number."""
    names: dict[int, str] = {}
    with contextlib.suppress(RecursionError):
        for node in ast.walk(_tree(script)):
            if isinstance(node, ast.keyword) and node.arg:
                names |= _named(node.value, node.arg)
            elif isinstance(node, ast.Assign):
                names |= _assigned(node.targets[0], node.value)
    return names


def _tree(source: str) -> ast.Module:
    """Return a source's tree; an empty one for what is not Python, or nested too deeply."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _assigned(target: ast.expr, value: ast.expr) -> dict[int, str]:
    """Return the numbers of the arguments that an assignment names, with their names."""
    if not isinstance(target, ast.Tuple):
        return _named(value, _last_name(target))
    targets = [_last_name(element) for element in target.elts]
    if re.search(r"sys\.argv\[1:", ast.unparse(value)):
        return dict(enumerate(targets, start=1))
    names: dict[int, str] = {}
    values = value.elts if isinstance(value, ast.Tuple) else []
    for name, element in zip(targets, values, strict=False):
        names |= _named(element, name)
    return names


def _last_name(target: ast.expr) -> str:
    """Return "rank" of ``rank`` and of ``args.rank``."""
    return ast.unparse(target).rpartition(".")[2]


def _named(value: ast.expr, name: str) -> dict[int, str]:
    """Return the number of the argument in an expression, with its name; nothing without one."""
    numbers = re.findall(r"sys\.argv\[(\d+)\]", ast.unparse(value))
    return {int(numbers[0]): name} if len(numbers) == 1 else {}


def _own_command(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Start it as its author wrote in a shell script or in notes, for each rank."""
    script = re.escape(Path(task.script).name)
    line = re.compile(rf"^(.*)\b{script}[ \t]([^\n`&|;>#]*)", re.MULTILINE)
    for text in refusal.written:
        commands = [found for found in line.findall(text) if re.search("python|torchrun", found[0])]
        if not commands:
            continue
        rows = [re.split(r"[ \t=]+", arguments.strip()) for _, arguments in commands]
        rows = [row for row in rows if len(row) == len(rows[0])]
        arguments = [_of_any_rank(task, rows, place) for place in range(len(rows[0]))]
        start = task.words[: _script_place(task) + 1]
        if re.search("torchrun|torch.distributed", commands[0][0]):
            start = [task.program, "-m", "torch.distributed.run", start[-1]]
        elif "{rank}" not in arguments:
            continue
        return msgspec.structs.replace(task, words=[*start, *filter(None, arguments)]), ""
    return None


def _of_any_rank(task: Task, rows: Sequence[Sequence[str]], place: int) -> str:
    """Return what stands at a place of a command for one or for several ranks, for any rank.

    rows : the arguments of each command, with one length.
    """
    word = rows[0][place]
    before = rows[0][place - 1] if place else ""
    if word.startswith("-"):
        return word
    is_value = before.startswith("-")
    named = before if is_value else word  # a shell's variable, or a name in place of a value
    if value := _wanted([_plain(named)], task, required=False):
        return value
    if len({row[place] for row in rows}) > 1:
        return "{rank}"
    if re.fullmatch(r"\d+\.\d+\.\d+\.\d+", word):
        return "{master}"
    if word.startswith("tcp://"):
        return _URL
    counts_ranks = len(rows) > 1 and word == str(len(rows))
    return "{nodes}" if counts_ranks and not is_value else word


# --- another address, launcher or environment ---


def _url(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Give the address as a URL, or with its port."""
    if "No rendezvous handler for" in refusal.text:
        return _with_address(task, _URL)
    if "port number missing" in refusal.text:
        return _with_address(task, "{master}:{port}")
    return None


def _with_address(task: Task, address: str) -> tuple[Task, str] | None:
    if "{master}" not in task.words:
        return None
    words = [address if word == "{master}" else word for word in task.words]
    return msgspec.structs.replace(task, words=words), address


def _torchrun(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Start it with torchrun, without the arguments that tell a rank who it is."""
    if _has_torchrun(task) or task.words[0] == "env" or not _reads_torchruns(refusal):
        return None
    place = _script_place(task)
    kept = _without(task.words[place + 1 :], has_placeholder)
    words = [task.program, "-m", "torch.distributed.run", task.words[place], *kept]
    return msgspec.structs.replace(task, words=words), "torchrun"


def _without(arguments: Sequence[str], is_dropped: Callable[[str], bool]) -> list[str]:
    """Return arguments without the options of which one word is to be dropped."""
    kept: list[str] = []
    for pair in _pairs(arguments):
        if not any(map(is_dropped, pair)):
            kept += pair
    return kept


def _reads_torchruns(refusal: Refusal) -> bool:
    """Return whether a script misses what torchrun puts into the environment."""
    if re.search(r"environment variable \w+ expected", refusal.text):
        return True
    if refusal.kind == "KeyError":
        return _OF_TORCHRUN.fullmatch(refusal.message) is not None
    reads_them = _OF_TORCHRUN.search(refusal.code) is not None
    if refusal.alone:
        return reads_them or "init_process_group" in refusal.code
    return reads_them and refusal.kind in ("TypeError", "AssertionError", "ValueError")


def _pairs(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield each option with its values."""
    group: list[str] = []
    for word in arguments:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _has_torchrun(task: Task) -> bool:
    return "torch.distributed.run" in task.words


def _variables(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Put what it reads from the environment there, for each rank."""
    missing = re.fullmatch(r"'(\w+)'", refusal.message) if refusal.kind == "KeyError" else None
    variables: dict[str, str] = {}
    if missing and not _has_torchrun(task):
        name = _plain(re.sub("SLURM_|OMPI_COMM_|PMI_", "", missing[1]))
        if value := _wanted([name], task, required=False):
            variables = {missing[1]: value}
    elif _has_torchrun(task) and _usage(refusal.printed) is not None:
        # It also wants flags that differ from rank to rank, which torchrun cannot give.
        variables = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "{nodes}"}
    already = [word.partition("=")[0] for word in task.words]
    new = [f"{name}={value}" for name, value in variables.items() if name not in already]
    if not new:
        return None
    words = [word for word in task.words if word not in ("env", "-m", "torch.distributed.run")]
    return msgspec.structs.replace(task, words=["env", *new, *words]), " ".join(new)


def _own_ranks(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Start it once, where each of its processes would start all ranks."""
    starts = re.search(r"mp\.spawn|multiprocessing", refusal.code)
    meets_itself = re.search(r"Address already in use|EADDRINUSE", refusal.text)
    if "{rank}" not in task.words or not starts or not meets_itself:
        return None
    place = _script_place(task)
    kept = _without(task.words[place + 1 :], lambda word: word == "{rank}")
    return msgspec.structs.replace(task, words=[*task.words[: place + 1], *kept]), ""


# --- another network, or a folder ---


def _network(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Give the sandbox's network the interface, address or host name that it wants."""
    name = _missing_interface(refusal) or _missing_address(refusal)
    if name is None or name in task.names or not task.sandboxed:
        return None
    return msgspec.structs.replace(task, names=[*task.names, name]), name


def _missing_interface(refusal: Refusal) -> str | None:
    """Return the network interface that a script misses; None if it is not that."""
    if match := re.search(r"Unable to find address for: ([\w.-]+)", refusal.text):
        return match[1].rstrip(".")
    if re.search(r"No such device|valid interface name", refusal.text):
        named = _INTERFACE.search(refusal.code)
        return named[1] if named else None
    return None


def _missing_address(refusal: Refusal) -> str | None:
    """Return the address or host name at which a script expects rank 0; None if it is not that."""
    # Not those that torch names after "connect to": it garbles them where no network is.
    pattern = r"(?:to host |address(?:es)? of )[\[(]?([\w.-]+)\]?[:,]"
    for name in re.findall(pattern, refusal.text):
        if name != "localhost" and not name.startswith("127."):
            return str(name)
    return None


def _output_folder(task: Task, refusal: Refusal) -> tuple[Task, str] | None:
    """Make the folder in which it opens a file."""
    folder = _missing_folder(task, refusal)
    if folder is None or str(folder) in task.folders or folder == task.cwd:
        return None
    inside = folder.is_relative_to(task.submission)
    if not inside and not task.sandboxed:
        return None
    shown = os.path.relpath(folder, task.cwd) if inside else str(folder)
    return msgspec.structs.replace(task, folders=[*task.folders, str(folder)]), shown


def _missing_folder(task: Task, refusal: Refusal) -> Path | None:
    """Return the folder that has to be there for what failed; None if it failed otherwise."""
    named = re.search(
        r"Parent directory (\S+) does not exist|non-existent directory: '([^'\n]+)'", refusal.text
    )
    if named:
        return Path(os.path.normpath(task.cwd / (named[1] or named[2])))
    path = _missing_path(refusal)
    if path is None:
        return None
    missing = Path(os.path.normpath(task.cwd / path))
    makes_folder = "[Errno 2]" not in refusal.text and not missing.suffix
    return missing if makes_folder else missing.parent


# The first that is met counts: another folder comes before a new one, other arguments before what
# their values mean.
DEMANDS = (
    Demand("started in {0}", _other_folder),
    Demand("with {0} on PYTHONPATH", _own_module),
    Demand("with other arguments", _other_flags),
    Demand("with positional arguments", _positionals),
    Demand("with the address as {0}", _url),
    Demand("started by {0}", _torchrun),
    Demand("with {0} in the environment", _variables),
    Demand("started once, since it starts its ranks itself", _own_ranks),
    Demand("in a network with {0}", _network),
    Demand("with a new folder {0}", _output_folder),
    Demand("as its author says", _own_command),
)
