"""The rubric: the parts of an assignment, how each is run, and what a finding costs.

A rubric is a TOML file; ``lab grade --print-rubric --rubric cs744`` prints one to start from, and
courses/ has those that are shipped, with their drivers.
Everything in it is checked before a submission runs.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Set
from datetime import datetime
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from common.errors import UserError, file_errors
from common.say import listed
from common.utils.atomic_files import read_regular
from common.utils.paths import IN_CHECKOUT, REPOSITORY
from common.utils.system import usable_cores
from common.utils.typed_json import Name, Seconds, Share, Text, convert
from lab.audit.findings.finding import FAULT, CatalogueEntry
from lab.audit.findings.properties import PROPERTIES
from lab.cluster.program import check_placeholders
from lab.grade.driven import PLACEHOLDER
from lab.grade.findings import OwnFinding, entries

FOLDER = REPOSITORY / ("courses" if IN_CHECKOUT else "lab/courses")
# The entry of ``deductions`` for the faults that it does not name.
OTHERS = "others"
# What ``uses`` may name besides collectives.
WAYS = {"ddp": "DistributedDataParallel"}
_RANKS_PER_CORE = 4
# What a command may begin with, as a shell and ``env`` understand it.
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLACEHOLDER = re.compile(r"\{[a-z_]+\}")
# Variables that would break the sandbox, the probe, or the ranks' meeting, and why.
_RESERVED = (
    (r"PATH|LD_\w*|PYTHONHOME", "the sandbox starts its programs with it"),
    (r"LAB_\w*|GLOO_SOCKET_IFNAME", "the audit sets it"),
)
_TAKEN = ("index", "results")
_OF_A_RANK = re.compile("MASTER_ADDR|MASTER_PORT|(?:LOCAL_)?RANK|(?:LOCAL_)?WORLD_SIZE")

Positive = Annotated[float, Meta(gt=0, le=1e6)]
Ranks = Annotated[int, Meta(ge=1, le=64)]


class Part(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A part of the assignment.

    Parameters
    ----------
    files : patterns of its script below the submission's folder; the first that fits counts.
    command : starts a rank in the script's folder; {script} is replaced by the script's name, the
        others as in ``lab audit``, and {driver} by what lets the rubric's driver check this part.
    ranks : the numbers of ranks to run it on; [1] for a part that exchanges nothing.
    uses : collectives, or "ddp", that this part has to call; without them a person has to look.
    properties : of the audit's, those that have to be seen; without them a person has to look. Of
        the others it is enough that none is broken.
    deductions : the share of the points that a fault costs, by its name in the audit.
    accepts : faults that this course asks for, and why.
    demands : notices that are faults in this course.
    environment : variables for its processes; they come before those of the rubric.
    hidden : whether ``--self``, a student's own check, leaves it out.
    """

    title: Text
    files: Annotated[list[Text], Meta(min_length=1)]
    command: Text
    points: Positive
    ranks: Annotated[list[Ranks], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [2, 3]
    )
    uses: list[Text] = []
    properties: list[Text] = msgspec.field(
        default_factory=lambda: ["collectives", "gradients", "weights"]
    )
    deductions: dict[str, Share] = {}
    accepts: dict[str, Text] = {}
    demands: list[Text] = []
    environment: dict[str, Text | int] = {}
    hidden: bool = False

    @property
    def is_driven(self) -> bool:
        """Whether a driver calls the student's functions; else the script is audited."""
        return PLACEHOLDER in self.command


class Late(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What it costs to hand in late: a share of the marks for each day that has begun.

    free_days : that cost nothing; the roster may give other ones for a student.
    """

    per_day: Share = 0.1
    free_days: Annotated[float, Meta(ge=0, le=1000)] = 0
    grace_minutes: Annotated[float, Meta(ge=0, le=1e6)] = 0


class Rubric(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An assignment.

    Parameters
    ----------
    driver : the file of the program that calls students' functions, see driver/checks.py; relative
        to the rubric, or one of courses/. ``load_rubric`` makes it absolute.
    provides : a folder with the course's own files, found as the driver is; scripts import from it
        what their submission lacks.
    findings : what the driver finds besides the audit's faults, by name; the first one comes first
        in a mark.
    expected_seconds : that a part takes on two cores, to say at the start how long it all takes.
    limit_seconds : for one run of a part, on one number of ranks.
    memory_gb, disk_gb, processes : limits of one part. Its files lie in memory; disk_gb limits each
        of its folders.
    deductions : as those of a part, which come first; "others" for the faults that are not named.
    mounts : folders that the scripts read: where each appears, relative to the script's folder if
        it is not absolute, and where it lies on this machine. A run sees a folder of its own with
        links to the files, in which it may write a cache.
    environment : variables for the processes of all parts.
    other_command : the share of a part's points that it costs if only another command than the
        demanded one starts its script.
    missing : the share of its points that a part gets of which nothing was handed in; None leaves
        it to a person.
    due, late : when submissions are due, and what it costs to be late, see roster.py.
    column : the assignment's name in the gradebook; None is the title.
    """

    title: Text
    parts: Annotated[dict[Name, Part], Meta(min_length=1)]
    driver: Text = ""
    provides: Text = ""
    findings: dict[Name, OwnFinding] = {}
    expected_seconds: Seconds = 60.0
    limit_seconds: Positive = 300.0
    memory_gb: Positive = 8.0
    disk_gb: Positive = 2.0
    processes: Annotated[int, Meta(ge=16, le=100_000)] = 600
    deductions: dict[str, Share] = {}
    mounts: dict[str, Text] = {}
    environment: dict[str, Text | int] = {}
    other_command: Share = 0.0
    missing: Share | None = None
    due: datetime | None = None
    late: Late | None = None
    column: Text | None = None

    def deduction(self, part: Part, fault: str) -> float:
        """Return the points that a fault costs."""
        shares = {OTHERS: 1.0} | self.deductions | part.deductions
        return part.points * shares.get(fault, shares[OTHERS])

    def variables(self, part: Part) -> dict[str, str]:
        """Return the variables for the processes of a part."""
        merged = self.environment | part.environment
        return {name: str(value) for name, value in merged.items()}

    def mounted(self) -> dict[str, Path]:
        """Return the folders of this machine by where they appear."""
        return {at: Path(source).expanduser().absolute() for at, source in self.mounts.items()}


def rubric_path(name: str) -> Path:
    """Return the file of a shipped rubric, or the one that is named."""
    shipped = FOLDER / f"{name}.toml"
    if shipped.is_file():
        return shipped
    return Path(name)


def rubric_text(name: str) -> str:
    """Return the TOML of a shipped rubric, or of a file. Raises UserError if there is none."""
    names = sorted(file.stem for file in FOLDER.glob("*.toml"))
    advice = f": give a TOML file, or one of {', '.join(names)}"
    with file_errors(f"the rubric {name} cannot be read", advice):
        return read_regular(rubric_path(name), most_bytes=2**20).decode()


def load_rubric(name: str) -> Rubric:
    """Return a rubric that can be used. Raises UserError for anything wrong in it."""
    text = rubric_text(name)
    where = f"the rubric {name}"
    with file_errors(f"{where} is not TOML"):
        rubric = convert(tomllib.loads(text), Rubric, name=where)
    for key, is_there in (("driver", Path.is_file), ("provides", Path.is_dir)):
        if named := getattr(rubric, key):
            found = _find(named, rubric_path(name).parent, is_there, where=f"{where}: {key}")
            rubric = msgspec.structs.replace(rubric, **{key: str(found)})
    _check_findings(rubric, where=f"{where}: findings")
    places = [os.path.normpath(at) for at in rubric.mounts]
    twice = [place for place in rubric.mounts if places.count(os.path.normpath(place)) > 1]
    if twice:
        raise UserError(f"{where}: mounts: {listed(twice)} are one place; name it once")
    for part_name, part in rubric.parts.items():
        _check_part(part_name, part, rubric, where=where)
    return rubric


def _find(file: str, folder: Path, is_there: Callable[[Path], bool], *, where: str) -> Path:
    """Return what a rubric names: beside it, or a shipped one, as of a rubric that was printed.

    Raises UserError if there is none.
    """
    if ".." in Path(file).parts or Path(file).is_absolute():
        raise UserError(f"{where}: got {file!r}; give a name beside the rubric, or below")
    for place in (folder / file, FOLDER / file):
        if is_there(place):
            return place.absolute()
    raise UserError(f"{where}: there is no {folder / file}: put it there")


def _check_findings(rubric: Rubric, *, where: str) -> None:
    """Raise UserError if a finding has a name that is taken, or explains one that is not there."""
    taken = sorted(rubric.findings.keys() & entries({}).keys())
    if taken:
        raise UserError(f"{where}: {listed(taken)}: this name is taken; choose another")
    known = entries(rubric.findings)
    for name, finding in rubric.findings.items():
        unknown = [other for other in finding.explains if other not in known]
        if unknown:
            raise UserError(f"{where}: {name} explains {listed(unknown)}: there is no such finding")
    try:
        TopologicalSorter({name: known[name].explains for name in known}).prepare()
    except CycleError as error:
        raise UserError(
            f"{where}: {listed(error.args[1][:-1])} explain each other: neither would cost points"
        ) from error


def _check_part(name: str, part: Part, rubric: Rubric, *, where: str) -> None:
    """Raise UserError for anything wrong in a part."""
    if name in _TAKEN:
        raise UserError(f"{where}: no part can be called {name}, as a file of each submission is")
    known = entries(rubric.findings)
    for shares in (rubric.deductions, part.deductions):
        faults = shares.keys() - {OTHERS, *part.demands}
        _check_faults(faults, known, where=f"{where}: deductions of {name}")
    _check_faults(part.accepts.keys(), known, where=f"{where}: accepts of {name}")
    unknown = [notice for notice in part.demands if notice not in known]
    if unknown:
        problem = f"{listed(unknown)}: the audit has no such notice"
        raise UserError(f"{where}: demands of {name}: {problem}")
    if strange := sorted(set(part.properties) - PROPERTIES.keys()):
        problem = f"{listed(strange)}: the audit has only {listed(list(PROPERTIES), most=20)}"
        raise UserError(f"{where}: properties of {name}: {problem}")
    for pattern in part.files:
        check_pattern(pattern, where=f"{where}: files of {name}")
    if part.is_driven and not rubric.driver:
        raise UserError(f"{where}: command of {name} has {PLACEHOLDER}: name its file as driver")
    check_command(part.command, part, where=f"{where}: command of {name}")
    for variable, value in rubric.variables(part).items():
        _check_variable(variable, value, where=f"{where}: environment of {name}")


def _check_faults(names: Set[str], known: Mapping[str, CatalogueEntry], *, where: str) -> None:
    """Raise UserError unless these are names of faults.

    known : what is said about each finding of the audit, or of the rubric.
    """
    wrong = sorted(name for name in names if name not in known or known[name].severity != FAULT)
    if not wrong:
        return
    notices = [name for name in wrong if name in known]
    if notices:
        problem = f"{listed(notices)}: a notice never costs points"
    else:
        problem = f"{listed(wrong)}: the audit has no such fault, nor has [findings]"
    raise UserError(f"{where}: {problem}; tests/audit_cases/README.md has a list")


def check_pattern(pattern: str, *, where: str) -> None:
    """Raise UserError unless this is a pattern of files below a submission's folder.

    ``**`` stands for folders, so it is a whole component: of ``**main.py`` some versions of Python
    make something else.
    """
    path = Path(pattern)
    mixed = any("**" in part and part != "**" for part in path.parts)
    if mixed or path.is_absolute() or ".." in path.parts or not path.parts:
        raise UserError(
            f"{where}: got {pattern!r}; give a path or a pattern below the submission, with ** "
            "for whole folders only, as in **/main.py"
        )


def check_command(text: str, part: Part, *, where: str) -> None:
    """Raise UserError unless the command can start each rank of a part."""
    with file_errors(f"{where} is not a shell's command"):
        start = parse_command(text)
    if "{script}" not in start.words:
        raise UserError(f"{where} lacks {{script}}: for example python {{script}} --rank {{rank}}")
    own = ("{script}", PLACEHOLDER)
    check_placeholders([word for word in start.words if word not in own])
    for name, value in start.variables.items():
        _check_variable(name, value, where=where)
    tells_ranks = any(word in text for word in ("{rank}", "torchrun", PLACEHOLDER))
    if part.ranks != [1] and not tells_ranks:
        raise UserError(f"{where} lacks {{rank}}: without it the ranks cannot be told apart")
    most = _RANKS_PER_CORE * usable_cores()
    if max(part.ranks) > most:
        raise UserError(f"{where}: this machine has {usable_cores()} cores: at most {most} ranks")


def _check_variable(name: str, value: str, *, where: str) -> None:
    """Raise UserError for a variable that would break the run of a part."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{where}: got {name!r}; give the name of a variable: letters, digits, _")
    for pattern, why in _RESERVED:
        if re.fullmatch(pattern, name):
            raise UserError(f"{where}: {name} cannot be set: {why}; leave it out")
    check_placeholders([value])
    if _OF_A_RANK.fullmatch(name) and not has_placeholder(value):
        raise UserError(
            f"{where}: {name} differs from run to run, got {value!r}; leave it out, or give "
            "{rank}, {nodes}, {master} or {port}"
        )


def has_placeholder(word: str) -> bool:
    """Return whether a word of a command, or a variable's value, differs from run to run."""
    return _PLACEHOLDER.search(word) is not None


class ParsedCommand(NamedTuple):
    """A command: the variables that stand before the program, as in ``env X=1 python``, and it."""

    variables: dict[str, str]
    words: list[str]


def parse_command(text: str) -> ParsedCommand:
    """Split a command that may begin with ``env`` or variables.

    Raises ValueError if it is no shell's command, or has no program.
    """
    words = shlex.split(text)
    if words[:1] == ["env"]:
        words = words[1:]
    variables: dict[str, str] = {}
    while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
        variables[assignment[1]] = assignment[2]
        words = words[1:]
    if not words or words[0].startswith("-"):
        raise ValueError("give env's NAME=VALUE, then a program")
    return ParsedCommand(variables, words)
