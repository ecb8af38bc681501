"""The audit's cases, scripts with one fault or none, and audits of them.

``read_cases`` returns them, and ``record_case`` audits one on a number of ranks, which are forked
from a server that has imported torch; tests/audit_cases/README.md says how one is written. This
file is also the program of these ranks: it installs the probe, as the start-up hook does in a new
interpreter, and runs the script.
"""

import multiprocessing
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab.audit import probe
from lab.audit.cases import STARTER_CODE, Script, read_scripts
from lab.audit.command import AuditCommand
from lab.audit.findings import run_checks
from lab.audit.findings.finding import FAULT
from lab.audit.findings.private import shared_part
from lab.audit.isolation import LOOPBACK
from lab.audit.result import verdict
from lab.audit.runner import RunSettings, run_audit_size, start_process
from tests.helpers.paths import ROOT
from tests.helpers.processes import ForkedProgram, wait_for_fork_server
from tests.helpers.wrong import WRONG

BY_FLAGS = "python {script} --master-ip {master} --port {port} --num-nodes {nodes} --rank {rank}"
OWN_FLAGS = (
    "--dataset digits --model tiny --max-steps 8 --threads 1 --batch-size 24 "
    "--master-ip {master} --master-port {port} --num-nodes {nodes} --rank {rank}"
)
CASES = ROOT / "tests/audit_cases"
_KEYS = {"base", "finds", "notices", "ranks", "command", "flags", "verdict", "together"}


@dataclass(frozen=True)
class Case(Script):
    """A script with what the audit must say of it; the page explains what is declared.

    flags : of ``lab audit``. plant : the mistake of tests/helpers/wrong.py that replaces this
        project's right code.
    """

    finds: frozenset[str] = frozenset()
    notices: frozenset[str] = frozenset()
    sizes: tuple[int, ...] = (2, 3)
    command: str = BY_FLAGS
    flags: str = ""
    verdict: str = "any"
    together: bool = False
    plant: str = ""

    @property
    def script(self):
        """The whole script."""
        return f'"""{self.what}"""\n\n{self.body}'

    @property
    def forked(self):
        """Whether what is started can be a fork: it is no launcher."""
        return self.command.startswith("python ")

    @property
    def quick_size(self):
        """The one size for a quick test: the last, or the first where it starts interpreters."""
        return self.sizes[-1 if self.forked and "mp.spawn" not in self.body else 0]


def read_cases():
    """Return all cases, sorted by name; raise an error for one that is not as the page says."""
    cases = {}
    for script in read_scripts(CASES).values():
        base = cases.get(script.base, Case(""))
        case = Case(**vars(script), command=base.command, flags=base.flags)
        cases[case.name] = _declare(case, script.keys)
    return [cases[name] for name in sorted(cases)]


def _declare(case, text):
    """Return a case with the keys in ``key: value``, each on a line or before a semicolon."""
    declared = dict(re.findall(r"(\w+): *([^;\n]+)", text))
    if unknown := declared.keys() - _KEYS:
        raise ValueError(f"{case.name}: {', '.join(unknown)}: choose from {', '.join(_KEYS)}")
    finds = declared.get("finds", "")
    command = declared.get("command", case.command)
    return replace(
        case,
        finds=frozenset(finds.split("|")) - {""},
        notices=frozenset(declared.get("notices", "").split()),
        sizes=tuple(map(int, declared.get("ranks", "2 3").split())),
        command=command.replace("{own_flags}", OWN_FLAGS).replace("{repo}", shlex.quote(str(ROOT))),
        flags=declared.get("flags", case.flags),
        verdict=declared.get("verdict", "no" if finds else "yes"),
        together="together" in declared,
    )


def record_case(case, size, folder):
    """Run a case under the probe in an empty or a new folder, and return what it recorded."""
    folder.mkdir(exist_ok=True)
    shutil.copy(STARTER_CODE, folder)
    clocks, batch = "--clocks" in case.flags, case.flags.removeprefix("--global-batch ")
    end = run_script(
        folder,
        case.script,
        command=case.command,
        size=size,
        start=partial(start_forked, plant=case.plant) if case.forked else start_process,
        steps=40 if clocks else None,
        clocks=clocks,
        global_batch=int(batch) if batch.isdigit() else None,
    )
    output = "\n".join(end.output(process) for process in range(len(end.statuses)))
    started = end.recording.ranks or end.recording.others  # ranks that never met have no number
    assert len(started) == size, f"{case.script}\nnot all ranks ran: {end}\n{output}"
    return end.recording


def start_forked(words, environment, cwd, log, given=b"", *, plant=""):
    """Start a rank's script in a fork, as ``lab.audit.runner.start_process`` does in a process."""
    log.touch()
    stdin = log.with_suffix(".in")
    stdin.write_bytes(given)
    command = [sys.executable, __file__, plant, *words[1:]]
    return ForkedProgram(command, cwd, environment, log, log, stdin=stdin)


def run_script(
    folder,
    text,
    *,
    command="python {script} {rank} {nodes}",
    size=1,
    start=start_forked,
    network=LOOPBACK,
    **settings,
):
    """Run main.py with this text in a folder, under the probe, and return how it ended.

    settings : of ``RunSettings``.
    """
    wait_for_fork_server()
    (folder / "records").mkdir(parents=True, exist_ok=True)
    (folder / "main.py").write_text(text, encoding="utf-8")
    typed = shlex.split(command)
    words = [str(folder / "main.py") if word == "{script}" else word for word in typed]
    given = RunSettings(**{"limit_seconds": 60, "cwd": folder} | settings)
    return run_audit_size(
        AuditCommand(tuple(words)), size, folder / "records", given, start=start, network=network
    )


def unseen(checked):
    """Return why properties were not seen, as "name: reason"."""
    return [
        f"{row.name}: {text}"
        for row in checked.properties
        if row.state == "not seen"
        for text in row.said
    ]


def mistakes(case, recordings):
    """Return what the audit says wrongly about a case, and print its script; empty if right."""
    recordings = [shared_part(recording) for recording in recordings]
    checked = run_checks(recordings)
    findings = checked.findings
    unknown = unseen(checked)
    faults = {one.name for one in findings if one.entry.severity == FAULT}
    notices = {one.name for one in findings} - faults
    wrong = [one for one in unknown if "could not be read" in one]
    if (len(faults) != 1 or not faults <= case.finds) if case.finds else faults:
        wrong.append(f"finds {sorted(faults)} in place of {sorted(case.finds)}")
    expected = case.notices - {"none"}
    if not expected <= notices or ("none" in case.notices and notices != expected):
        wrong.append(f"notices {sorted(notices)} in place of {sorted(case.notices)}")
    answer = verdict(recordings, findings, checked.properties)
    if case.verdict not in ("any", answer.answer):
        wrong.append(f"verdict {answer.answer!r} in place of {case.verdict!r}: {answer.why}")
    if not wrong:
        return []
    print(case.script)
    evidence = [f"{one.name}: {sentence}" for one in findings for sentence in one.evidence]
    return [*wrong, *evidence, *unknown]


if __name__ == "__main__":
    for wrong in WRONG:
        if wrong.name == sys.argv[1]:
            wrong.plant()
    probe.install()
    multiprocessing.set_start_method(None, force=True)  # the script's loaders fork, as by default
    sys.argv[:2] = []
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:  # as an interpreter of its own ends
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
