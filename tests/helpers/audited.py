"""The scripts in tests/audit_cases/: what each one's docstring declares, and audits of them.

``read_cases`` returns them; ``audit_case`` audits one on a number of ranks, which are forked from a
server that has imported torch. This file is also the program of these ranks: it installs the probe,
as the start-up hook does in a new interpreter, and runs the script.
"""

import ast
import runpy
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.audit.command import AuditCommand
from lab.audit.findings import run_checks
from lab.audit.findings.finding import FAULT
from lab.audit.recording import Recording, read_recording
from lab.audit.result import verdict
from lab.audit.runner import RunSettings, Start, StartedProcess, run_audit_size, start_process
from tests.helpers.paths import ROOT
from tests.helpers.processes import ForkedProgram

FOLDER = ROOT / "tests/audit_cases"
BY_FLAGS = "python {script} --master-ip {master} --port {port} --num-nodes {nodes} --rank {rank}"
_KEYS = ("finds", "notices", "ranks", "command", "flags", "verdict", "together")
_CLOCK_STEPS = 40


@dataclass(frozen=True)
class Case:
    """A script with one fault, or a right one.

    Parameters
    ----------
    finds : the names of which exactly one is found; empty if nothing may be found.
    notices : names that must be among the notices.
    only_notices : no other notice may appear.
    sizes : numbers of ranks at which this holds.
    command : how a rank, or the launcher, is started, as after ``lab audit --``.
    flags : of ``lab audit``.
    verdict : "yes", "no", "cannot tell", or None if any will do.
    together : it holds only where the runs of all sizes are compared.
    """

    name: str
    finds: frozenset[str]
    notices: frozenset[str]
    only_notices: bool
    sizes: tuple[int, ...]
    command: AuditCommand
    flags: tuple[str, ...]
    verdict: str | None
    together: bool = False

    @property
    def quick_size(self) -> int:
        """The one size for a quick test: the last, or the first where ranks are not forked."""
        return self.sizes[-1 if _is_forked(self.command.words) else 0]


def read_case(path: Path) -> Case:
    """Return the case in a file. Raises ValueError for a docstring with an unknown line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    lines = docstring.partition("\n\n")[2].replace("\n    ", " ").splitlines()
    declared = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if unknown := declared.keys() - set(_KEYS):
        raise ValueError(f"{path}: the docstring has {', '.join(unknown)}: choose from {_KEYS}")
    words = shlex.split(declared.get("command", BY_FLAGS))
    places = {"{script}": str(path), "{repo}/PartTwo/main.py": str(ROOT / "PartTwo/main.py")}
    places["{repo}/PartThree/main.py"] = str(ROOT / "PartThree/main.py")
    notices = frozenset(declared.get("notices", "").split())
    return Case(
        name=path.stem,
        finds=frozenset(declared["finds"].split("|")) - {"nothing"},
        notices=notices - {"none"},
        only_notices="none" in notices,
        sizes=tuple(int(one) for one in declared["ranks"].split()),
        command=AuditCommand(tuple(places.get(word, word) for word in words)),
        flags=tuple(shlex.split(declared.get("flags", ""))),
        verdict=declared.get("verdict"),
        together="together" in declared,
    )


def read_cases() -> list[Case]:
    """Return all cases, by name."""
    return [read_case(path) for path in sorted(FOLDER.glob("*.py")) if path.stem != "student"]


def record_case(case: Case, size: int, folder: Path, *, start: Start | None = None) -> Recording:
    """Run a case under the probe and return what it recorded.

    Parameters
    ----------
    folder : an empty or a new folder.
    start : how a rank is started; default: ``start_forked``.

    Raises AssertionError with the ranks' output if a rank recorded nothing.
    """
    clocks = "--clocks" in case.flags
    records, cwd = folder / "records", folder / "cwd"
    records.mkdir(parents=True)
    cwd.mkdir()
    settings = RunSettings(
        steps=_CLOCK_STEPS if clocks else 6, clocks=clocks, limit_seconds=60, cwd=cwd
    )
    end = run_audit_size(case.command, size, records, settings, start=start or start_forked)
    flags = list(case.flags)
    batch = int(flags[flags.index("--global-batch") + 1]) if "--global-batch" in flags else None
    recording = read_recording(
        records, asked_size=size, global_batch=batch, clocks=clocks, hung=end.hung is not None
    )
    output = "\n".join(end.output(process) for process in range(len(end.statuses)))
    assert len(recording.ranks) == size, f"not all ranks of {case.name} ran: {end}\n{output}"
    return recording


def start_forked(
    words: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    log: Path,
    *,
    plant: str = "nothing",
) -> StartedProcess:
    """Start a rank in a fork, if its words name a script; see ``lab.audit.runner.Start``.

    plant : the mistake of lab/proofs/wrong.py that replaces this project's right code.
    """
    if not _is_forked(words):
        return start_process(words, environment, cwd, log)
    log.touch()
    program = [sys.executable, __file__, plant, *words[1:]]
    return ForkedProgram(program, cwd, environment, log, log)


def _is_forked(words: Sequence[str]) -> bool:
    """Return whether a command can be run in a fork: it starts no interpreters itself."""
    scripts = [Path(word).read_text(encoding="utf-8") for word in words if word.endswith(".py")]
    return words[0] == "python" and not any("mp.spawn" in one for one in scripts)


def mistakes(case: Case, recordings: Sequence[Recording]) -> list[str]:
    """Return what the audit says wrongly about a case; empty if it is right."""
    findings, _, unknown = run_checks(recordings)
    faults = {one.name for one in findings if one.entry.severity == FAULT}
    notices = {one.name for one in findings} - faults
    evidence = [f"{one.name}: {sentence}" for one in findings for sentence in one.evidence]
    wrong = []
    if (len(faults) != 1 or not faults <= case.finds) if case.finds else faults:
        wrong.append(f"finds {sorted(faults)} in place of {sorted(case.finds)}")
    if not case.notices <= notices or (case.only_notices and notices != case.notices):
        wrong.append(f"notices {sorted(notices)} in place of {sorted(case.notices)}")
    answer = verdict(recordings, findings, unknown)
    if case.verdict not in (None, answer.answer):
        wrong.append(f"verdict {answer.answer!r} in place of {case.verdict!r}: {answer.why}")
    wrong += [one for one in unknown if "could not be read" in one]
    return [*wrong, *evidence, *unknown] if wrong else []


if __name__ == "__main__":
    import multiprocessing

    from lab.audit import probe
    from lab.proofs.wrong import WRONG

    for wrong in WRONG:
        if wrong.name == sys.argv[1]:
            wrong.plant()
    probe.install()
    multiprocessing.set_start_method(None, force=True)  # the script's loaders fork, as by default
    sys.argv[:2] = []
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
