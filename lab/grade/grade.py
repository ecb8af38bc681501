"""The whole walk of ``lab grade``: unpack, run what is new, mark, write.

What was seen of a part stays in the output folder, under a key of all that it follows from: the
submission, the rubric's part and the audit. A second call takes it from there, and marks again;
it runs what could not be run once more only with --again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import psutil

import lab
from common.errors import UserError, file_errors
from common.say import count, listed, minutes_text
from common.utils.environment import setting
from common.utils.processes import how_ended, start_child
from common.utils.system import usable_cores
from common.utils.typed_json import calm, encode, read_json
from lab.audit.isolation import record_folder
from lab.grade import gradescope, judge, ordinary_user, pages
from lab.grade.convert import make_scripts
from lab.grade.driven import PLACEHOLDER, RUNNER, driver_words
from lab.grade.exported import read_export
from lab.grade.facts import CANNOT_TELL, Facts, Look
from lab.grade.late import Lateness, lateness, lateness_on_gradescope
from lab.grade.marks import Mark, Override, mark_part, override, read_overrides
from lab.grade.roster import Class, read_roster, write_gradebook
from lab.grade.rubric import (
    Rubric,
    check_command,
    check_pattern,
    has_placeholder,
    load_rubric,
    parse_command,
    rubric_text,
)
from lab.grade.sandbox import Task, refused
from lab.grade.submissions import (
    Place,
    ScriptRow,
    digest,
    find_scripts,
    named,
    places_of,
    read_rows,
)
from lab.grade.unpack import NO_CODE, unpack
from lab.terminal import say

_CORES_A_JOB = 2
_NOT_YET = Look("it has not been run yet.", grader="Start the same command again.")
_UNSAFE = "The submissions ran without a sandbox."
_AGAIN = "Start the same command again, or look at its code."
# For the audit around the runs of a part.
_MORE_SECONDS = 120.0
_END_SECONDS = 30.0


def main_grade(args: argparse.Namespace) -> int:
    """Grade all submissions; return 0, also if a person has to look at some.

    Raises UserError for wrong flags or files and for a missing sandbox, before anything runs.
    """
    if args.print_rubric:
        if args.submissions:
            surplus = args.submissions[0]
            raise UserError(
                f"--print-rubric grades nothing, and got {surplus}: to print another rubric, give "
                f"--rubric {surplus}"
            )
        print(rubric_text(args.rubric), end="")
        return 0
    if args.zip:
        gradescope.write_autograder(args.zip, args.rubric)
        say(f"written: {args.zip}; upload it as the assignment's autograder on Gradescope")
        return 0
    rubric = load_rubric(args.rubric)
    if args.self:
        rubric = _own_check(args, rubric)
    _check(args, rubric)
    submissions = named(args.submissions)
    attendance = _attendance(args.roster, submissions, rubric)
    out = args.out.absolute()
    book = Gradebook(
        rubric=rubric,
        out=out,
        sandboxed=not args.no_sandbox,
        unsafe=_UNSAFE if args.no_sandbox else "",
        decided=read_overrides(out / "overrides.csv", submissions, rubric),
        seen={(name, part): _NOT_YET for name in submissions for part in rubric.parts},
        late=lateness_on_gradescope(args.metadata, rubric),
    )
    scripts = _read_map(args.map, submissions, rubric)
    with record_folder(None) as folder:
        tasks: dict[Place, Task] = {}
        for name, sources in submissions.items():
            tasks |= book.take_in(name, sources, folder / name, scripts)
        book.seen |= _known(tasks, again=args.again)
        book.write()
        try:
            _run_all(tasks, book, args.jobs)
        finally:  # also if it is interrupted
            by_hand = book.write()
            say(
                f"{count(len(submissions), 'submission')}, {count(by_hand, 'part')} to look at by "
                f"hand; see {out / 'class.html'} and {out / 'class.csv'}"
            )
            _write_gradebook(book, attendance)
    if args.self:
        _say_reasons(book)
    return 0


def _own_check(args: argparse.Namespace, rubric: Rubric) -> Rubric:
    """Set the flags for a student's own check, and return the rubric without its hidden parts."""
    args.no_sandbox = True
    args.submissions = args.submissions or [Path.cwd()]
    shown = {name: part for name, part in rubric.parts.items() if not part.hidden}
    return msgspec.structs.replace(rubric, parts=shown)


def _attendance(
    roster: Path | None, submissions: Mapping[str, Sequence[Path]], rubric: Rubric
) -> Class | None:
    """Return who handed in what; None without a roster."""
    if roster is None:
        return None
    attendance = Class.of(read_roster(roster, rubric), submissions, read_export(submissions))
    for student in attendance.students:
        lateness(student.submitted, rubric.due, rubric)  # refuses what cannot be compared
    return attendance


def _write_gradebook(book: "Gradebook", attendance: Class | None) -> None:
    """Write the files for a gradebook, if there is a roster, and say what they hold."""
    if attendance is not None:
        say(write_gradebook(book.out, book.rubric, attendance, book.graded()))


def _say_reasons(book: "Gradebook") -> None:
    """Print all marks for a student, with the reasons that his page gives."""
    for place in book.seen:
        mark = book.mark(place)
        say(f"{mark.title}: {pages.marks_text(mark)}")
        for reason in [*mark.why, *(look.for_student for look in mark.look)]:
            say(f"  {calm(reason)}")


def _check(args: argparse.Namespace, rubric: Rubric) -> None:
    """Raise UserError if a file, a folder or a flag makes it impossible to grade."""
    if not args.submissions:
        raise UserError("give a folder, zip or tar for each student: lab grade submissions/*")
    missing = [path for path in args.submissions if not path.exists()]
    if missing:
        raise UserError(f"{listed(missing)}: there is no such file: give folders, zips or tars")
    _check_mounts(rubric, sandboxed=not args.no_sandbox)
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs: got {args.jobs}; give 1 or more")


def _check_mounts(rubric: Rubric, *, sandboxed: bool) -> None:
    """Raise UserError if a folder is missing that the scripts read."""
    folders = dict.fromkeys(rubric.mounted().values())
    absent = [folder for folder in folders if not folder.is_dir()]
    if absent:
        raise UserError(
            f"the rubric mounts {listed(absent)}: there is no such folder: put the data there"
        )
    if not sandboxed:
        fixed = [at for at in rubric.mounts if os.path.isabs(at)]
        not_there = [at for at in fixed if not Path(at).is_dir()]
        if not_there:
            raise UserError(
                f"without a sandbox {listed(not_there)} must be there: link your folder there"
            )


def _read_map(
    path: Path | None, names: Mapping[str, object], rubric: Rubric
) -> dict[Place, ScriptRow]:
    """Return the places and commands of scripts that --map gives."""
    if path is None:
        return {}
    scripts: dict[Place, ScriptRow] = {}
    for row in read_rows(path, ScriptRow):
        where = f"{path}, {row.submission} {row.part}"
        if row.path:
            check_pattern(row.path, where=where)
        with file_errors(f"{where}: ranks are numbers"):
            ranks = row.numbers
        for name, part_name in places_of(row, names, rubric, where=str(path)):
            part = rubric.parts[part_name]
            part = msgspec.structs.replace(part, ranks=ranks or part.ranks)
            check_command(row.command or part.command, part, where=where)
            scripts[name, part_name] = row
    return scripts


@dataclass
class Gradebook:
    """A class: what is known of its parts, and the pages that show it.

    out : the folder of the pages.
    unsafe : how the scripts run without a sandbox, as sentences; "" in one.
    decided : what a person has decided.
    seen : what was seen of each part, or why nothing was; all parts are in it, in the pages' order.
    late : what the time costs that Gradescope gives.
    """

    rubric: Rubric
    out: Path
    sandboxed: bool
    unsafe: str
    decided: Mapping[Place, Override]
    seen: dict[Place, Facts | Look]
    late: Lateness | None = None

    def take_in(
        self, name: str, sources: list[Path], copy: Path, scripts: Mapping[Place, ScriptRow]
    ) -> dict[Place, Task]:
        """Unpack a submission to ``copy``, and return what to run of it.

        Why a part cannot be run is then ``seen`` of it. scripts : by --map.
        """
        problem = _unpacked(sources, copy, self.rubric)
        if problem is not None:
            say(f"{name}: {problem.for_grader}")
            for part_name in self.rubric.parts:
                self.seen[name, part_name] = problem
            return {}
        converted = make_scripts(copy)
        tasks: dict[Place, Task] = {}
        rows = {
            part: scripts.get((name, part), ScriptRow(name, part, "")) for part in self.rubric.parts
        }
        places = {part: row.path for part, row in rows.items()}
        for part_name, script in find_scripts(copy, self.rubric, places).items():
            place = (name, part_name)
            row = rows[part_name]
            if isinstance(script, Look):
                self.seen[place] = script
                continue
            task = _task(
                self.rubric,
                part_name,
                copy,
                script,
                self.out / "submissions" / name / f"{part_name}.json",
                row,
                converted.get(script, ""),
                sandboxed=self.sandboxed,
            )
            tasks[place] = task
        return tasks

    def mark(self, place: Place) -> Mark:
        """Return the mark that the rubric gives for what is known now of a part."""
        _, part_name = place
        return mark_part(part_name, self.seen[place], self.rubric)

    def graded(self) -> dict[str, list[Mark]]:
        """Return the marks of each submission, with what a person has decided."""
        graded: dict[str, list[Mark]] = {}
        for place in self.seen:
            name, _ = place
            mark = override(self.mark(place), self.decided.get(place))
            graded.setdefault(name, []).append(mark)
        return graded

    def write(self, *, only: str | None = None) -> int:
        """Write the class's pages from what is known now, and those of all submissions, or of one.

        Returns how many marks are open.
        """
        graded = self.graded()
        pages.write_class(self.out, self.rubric, graded, unsafe=self.unsafe)
        for name, marks in graded.items():
            if only in (None, name):
                pages.write_submission(
                    self.out, self.rubric, name, marks, unsafe=self.unsafe, late=self.late
                )
        return pages.count_open(mark for marks in graded.values() for mark in marks)


def _unpacked(sources: list[Path], copy: Path, rubric: Rubric) -> Look | None:
    """Unpack a submission; return None, or why it cannot be.

    Data that the rubric mounts is linked in for each run, so that of a student's own folder stays.
    """
    if len(sources) > 1:
        twice = f"{count(len(sources), 'submission')} have this name."
        return Look(twice, grader="Rename them.")
    try:
        unpack(sources[0], copy, _environment(), without=list(rubric.mounted().values()))
    except UserError as error:
        problem = " ".join(calm(str(error)).split())  # it quotes names of files
        if problem == NO_CODE:
            return Look(f"{problem}.", grader="Look into it.", missing=True)
        return Look(f"{problem}.", student="Hand it in anew.", grader="Ask for a new file.")
    return None


# --- running ---


def _task(
    rubric: Rubric,
    name: str,
    copy: Path,
    script: Path,
    facts: Path,
    row: ScriptRow,
    converted: str,
    *,
    sandboxed: bool,
) -> Task:
    """Return what to run of a submission; its key stays the same as long as the outcome does.

    name : of the part. row : by --map; what it says replaces what the rubric says.
    converted : how the script differs from what was handed in; "" if it does not.
    """
    part = rubric.parts[name]
    start = parse_command(row.command or part.command)
    program, *arguments = start.words
    changes = [converted] if converted else []
    if row.command:
        changes.append("with a command given by the grader")
    words = [shutil.which(program, path=_environment()["PATH"]) or program]
    filled = {"{script}": [script.name], PLACEHOLDER: driver_words(Path(rubric.driver), name)}
    for argument in arguments:
        words += filled.get(argument, [argument])
    variables = rubric.variables(part) | start.variables
    of_a_rank = [f"{key}={value}" for key, value in variables.items() if has_placeholder(value)]
    if of_a_rank:
        words = ["env", *of_a_rank, *words]
    environment = {key: value for key, value in variables.items() if not has_placeholder(value)}
    mounts = {at: str(path) for at, path in rubric.mounted().items()}
    sources = [digest(copy), digest(Path(lab.__file__).parent / "audit")]
    if rubric.provides:
        # Last on the path, and outside of the submission: a student's own file comes first, and a
        # finding's line is his.
        search = [environment.get("PYTHONPATH", ""), rubric.provides]
        environment["PYTHONPATH"] = ":".join(filter(None, search))
        sources.append(digest(Path(rubric.provides)))
        if sandboxed:
            mounts[rubric.provides] = rubric.provides
    # The folders and the key come last: the key must not depend on where the copies lie.
    task = Task(
        words=words,
        ranks=sorted(set(row.numbers or part.ranks)),
        submission="",
        script=str(script.relative_to(copy)),
        start=str(script.parent.relative_to(copy)),
        environment=environment,
        may_change=not row.command and not part.is_driven,
        changes=changes,
        facts="",
        key="",
        mounts=mounts,
        memory_bytes=int(rubric.memory_gb * 2**30),
        disk_bytes=int(rubric.disk_gb * 2**30),
        processes=rubric.processes,
        limit_seconds=rubric.limit_seconds,
        sandboxed=sandboxed,
    )
    if part.is_driven:
        task = msgspec.structs.replace(
            task, driver=rubric.driver, driven_part=name, findings=rubric.findings
        )
        files = [Path(rubric.driver), Path(judge.__file__)]
        sources += [digest(RUNNER), *(sha256(file.read_bytes()).hexdigest() for file in files)]
    key = sha256(encode([task, *sources])).hexdigest()
    return msgspec.structs.replace(task, submission=str(copy), facts=str(facts), key=key)


def _known(tasks: Mapping[Place, Task], *, again: bool) -> dict[Place, Facts]:
    """Return what an earlier call has seen of these parts.

    again : not that of a part that could not be run: data or a package may have been missing.
    """
    known: dict[Place, Facts] = {}
    for place, task in tasks.items():
        try:
            facts = _read_facts(task)
        except (FileNotFoundError, UserError):  # not there, or cut off
            continue
        ran = facts.whole or facts.audit.status != CANNOT_TELL
        if facts.key == task.key and (ran or not again):
            known[place] = facts
    return known


def _run_all(tasks: Mapping[Place, Task], book: Gradebook, jobs: int | None) -> None:
    """Run the parts of which nothing is seen yet, and add what is, or why nothing.

    jobs : how many at a time; None: as many as fit. Raises UserError without a sandbox.
    """
    new = [place for place in tasks if book.seen[place] is _NOT_YET]
    if not new:
        return
    as_user = _runs_as_user(tasks[new[0]], book)
    if jobs is None:
        jobs = _jobs(book)
    part_seconds = book.rubric.expected_seconds
    say(
        f"{count(len(new), 'part')} to run, {jobs} at a time: about "
        f"{_about(part_seconds * len(new) / jobs)} at {part_seconds:g} s a part"
    )
    began = time.monotonic()
    pool = ThreadPoolExecutor(jobs)
    places = {}
    for place in new:
        task = msgspec.structs.replace(tasks[place], as_user=as_user)
        places[pool.submit(_run, task)] = place
    try:
        for ended, future in enumerate(as_completed(places), start=1):
            place = places[future]
            book.seen[place] = future.result()
            line = f"[{ended}/{len(new)}] {' '.join(place)}: {pages.marks_text(book.mark(place))}"
            seconds_left = (time.monotonic() - began) / ended * (len(new) - ended)
            if seconds_left >= 1:
                line += f"; about {_about(seconds_left)} left"
            say(line)
            book.write(only=place[0])
    except BaseException:
        for child in psutil.Process().children():
            child.terminate()  # it ends what runs in its sandbox
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _runs_as_user(task: Task, book: Gradebook) -> bool:
    """Return whether parts run as an ordinary user without a sandbox; warn if root's cannot.

    Raises UserError if there should be a sandbox, and is none.
    """
    if book.sandboxed:
        why = refused(task)
        if why:
            raise UserError(
                f"no sandbox: {why}. In a container that holds nothing else, use --no-sandbox"
            )
        return False
    if os.geteuid() != 0:
        return False
    why = ordinary_user.refused(task)
    if why:
        book.unsafe = f"{_UNSAFE} They ran as root, and can change their marks: {why}."
        say(f"warning: the submissions run as root, and can change their marks: {why}")
    return why is None


def _about(seconds: float) -> str:
    """Return a time for a person: "45 s", "39 min", "2 h 58 min"."""
    whole_minutes = 60 * round(seconds / 60)
    return minutes_text(seconds if whole_minutes < 120 else whole_minutes).removesuffix(" 00 s")


def _jobs(book: Gradebook) -> int:
    """Return how many parts to run at a time; one without a sandbox, where ports may collide."""
    if not book.sandboxed:
        return 1
    by_memory = int(psutil.virtual_memory().available / (book.rubric.memory_gb * 2**30))
    by_cores = usable_cores() // _CORES_A_JOB
    return max(1, min(by_cores, by_memory))


def _read_facts(task: Task) -> Facts:
    return read_json(Path(task.facts), Facts, most_bytes=pages.MOST_FACTS)


def _run(task: Task) -> Facts | Look:
    """Run the program of part.py, and return what it has seen, or why it has not."""
    # Other commands may be tried until the first limit is reached.
    limit = (len(task.ranks) + 1) * task.limit_seconds + _MORE_SECONDS
    process = start_child(
        # -P: no module from the grader's folder; -s: none from HOME, a folder of everybody's.
        [sys.executable, "-P", "-s", "-m", "lab.grade.part"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
    )
    with process:
        try:
            output, _ = process.communicate(encode(task), timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END_SECONDS)
            process.kill()  # else the class would wait for it
            return Look(f"its audit did not end within {_about(limit)}.", grader=_AGAIN)
    if process.returncode != 0:
        lines = output.decode(errors="replace").strip().splitlines() or ["no message"]
        said = f"its audit {how_ended(process.returncode)}: {lines[-1][:300]}"
        return Look(said, grader=_AGAIN)
    try:
        return _read_facts(task)
    except (UserError, OSError) as error:
        return Look(f"what its audit saw cannot be read ({error}).", grader=_AGAIN)


def _environment() -> dict[str, str]:
    """Return the environment of a part: nothing of the grader's own but paths and the language."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("LC_", "LANG"))}
    folders = [str(Path(sys.executable).parent)]
    # No relative entries: the program of a part works in the student's folder.
    search_path = setting("PATH") or os.defpath
    folders += filter(os.path.isabs, search_path.split(os.pathsep))
    root = str(Path(lab.__file__).parents[1])
    return kept | {"PATH": os.pathsep.join(folders), "PYTHONPATH": root, "HOME": "/tmp"}
