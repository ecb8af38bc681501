"""The whole walk of ``lab grade``: unpack, run what is new, mark, write.

A part's facts stay in the output folder under a key of all that they follow from: the script, the
rubric's part and this program. A second call takes them from there, and marks again.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue

import msgspec
import psutil

import lab
from common.errors import UserError, count, first_of
from common.utils.atomic_files import write_atomically
from common.utils.environment import setting
from common.utils.processes import kill_on_parent_exit
from common.utils.system import usable_cores
from common.utils.typed_json import encode, read_json
from lab.flags import refuse
from lab.grade import gradescope, pages, submissions
from lab.grade.marks import Mark, mark_part, override, read_overrides, unmarked
from lab.grade.part import Facts, Task
from lab.grade.rubric import Part, Rubric, load_rubric, rubric_text
from lab.grade.sandbox import Limits, refused
from lab.predict.readable import duration_text
from lab.processes.prefixed_output import say

_CORES_A_JOB = 2
_MOST_FACTS = 64 * 2**20
_MORE_SECONDS = 120.0
"""For the audit around the runs of a part."""


@dataclass
class Submission:
    """One that was handed in.

    problem : why nothing of it could be graded; "" if it could.
    """

    name: str
    problem: str = ""
    marks: dict[str, Mark] = field(default_factory=dict)


@dataclass(frozen=True)
class Grading:
    """What holds for the whole class."""

    rubric: Rubric
    out: Path
    sandboxed: bool


def main_grade(args: argparse.Namespace) -> int:
    """Grade all submissions; return 0, also if a person has to look at some.

    Raises UserError for wrong flags or files, before anything runs.
    """
    if args.print_rubric:
        print(rubric_text(args.rubric), end="")
        return 0
    if args.zip:
        gradescope.write_autograder(args.zip, rubric_text(args.rubric))
        say(f"written: {args.zip}; upload it as the assignment's autograder on Gradescope")
        return 0
    rubric = load_rubric(args.rubric)
    missing = [path for path in args.submissions if not path.exists()]
    why = None if args.no_sandbox else refused()
    refuse(
        {
            "give a folder, zip or tar for each student: lab grade submissions/*": (
                not args.submissions
            ),
            f"{first_of(missing)}: there is no such file: give folders, zips or tars": bool(
                missing
            ),
            f"--jobs: got {args.jobs}; give 1 or more": args.jobs is not None and args.jobs < 1,
            f"no sandbox: {why}. In a container that holds nothing else, use --no-sandbox": bool(
                why
            ),
        }
    )
    grading = Grading(rubric, args.out.absolute(), not args.no_sandbox)
    paths = submissions.named(args.submissions)
    refused_names = submissions.same_names(args.submissions)
    given = read_overrides(grading.out / "overrides.csv", paths, rubric)
    scripts = _read_map(args.map, paths, rubric)
    with tempfile.TemporaryDirectory(prefix="lab-grade-") as folder, _ended_by_signals():
        Path(folder).chmod(0o711)
        handed_in = [
            _take_in(name, path, Path(folder) / name, refused_names.get(name, ""))
            for name, path in paths.items()
        ]
        _grade_all(grading, handed_in, Path(folder), scripts, jobs=args.jobs)
    for one in handed_in:
        one.marks = {
            name: override(mark, given.get((one.name, name))) for name, mark in one.marks.items()
        }
    pages.write_class(grading.out, rubric, handed_in, sandboxed=grading.sandboxed)
    say(pages.summary(handed_in, grading.out))
    return 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that nothing is left."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_map(
    path: Path | None, names: Mapping[str, Path], rubric: Rubric
) -> dict[tuple[str, str], str]:
    """Return the places of scripts that --map gives, by submission and part."""
    rows = submissions.read_rows(path, ("submission", "part", "path")) if path else []
    for number, row in enumerate(rows, start=2):
        submissions.check_row(path or Path(), number, row, names, rubric)
    return {(row["submission"], row["part"]): row["path"] for row in rows}


def _take_in(name: str, source: Path, folder: Path, problem: str) -> Submission:
    if not problem:
        try:
            submissions.unpack(source, folder)
        except UserError as error:
            problem = str(error)
    if problem:
        say(f"{name}: {problem}")
    return Submission(name, problem)


# --- running ---


def _grade_all(
    grading: Grading,
    handed_in: list[Submission],
    folder: Path,
    scripts: Mapping[tuple[str, str], str],
    *,
    jobs: int | None,
) -> None:
    """Mark every part of every submission; run those whose facts are not there yet."""
    rubric, work = grading.rubric, list[Callable[[int], tuple[Submission, str, Mark]]]()
    for one in handed_in:
        for name, part in rubric.parts.items():
            if one.problem:
                one.marks[name] = unmarked(name, part, one.problem)
                continue
            script = submissions.find_script(folder / one.name, part, scripts.get((one.name, name)))
            if isinstance(script, str):
                one.marks[name] = unmarked(name, part, script)
                continue
            todo = _Todo(grading, one, name, part, folder / one.name, script)
            if (facts := todo.known()) is not None:
                one.marks[name] = todo.mark(facts)
            else:
                work.append(todo.run)
    parallel = jobs or _jobs(grading)
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(parallel):
        slots.put(slot)
    if work:
        seconds = rubric.expected_seconds * len(work) / parallel
        say(
            f"{count(len(work), 'part')} to run, {parallel} at a time: about "
            f"{duration_text(seconds)} at {rubric.expected_seconds:g} s a part"
        )
    pool, began = ThreadPoolExecutor(parallel), time.monotonic()

    def run(action: Callable[[int], tuple[Submission, str, Mark]]) -> tuple[Submission, str, Mark]:
        slot = slots.get()
        try:
            return action(slot)
        finally:
            slots.put(slot)

    try:
        running: set[Future] = {pool.submit(run, one) for one in work}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                submission, name, mark = future.result()
                submission.marks[name] = mark
                ended = len(work) - len(running)
                left = (time.monotonic() - began) / ended * len(running)
                say(
                    f"[{ended}/{len(work)}] {submission.name} {name}: {pages.marks_text(mark)}"
                    + (f"; about {duration_text(left)} left" if running else "")
                )
    except BaseException:
        for child in psutil.Process().children():
            child.terminate()  # it ends what runs in its sandbox
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _jobs(grading: Grading) -> int:
    """Return how many parts to run at a time; one without a sandbox, where ports may collide."""
    if not grading.sandboxed:
        return 1
    memory = int(psutil.virtual_memory().available / (grading.rubric.memory_gb * 2**30))
    return max(1, min(usable_cores() // _CORES_A_JOB, memory))


@cache
def _own_digest() -> str:
    return submissions.digest(Path(lab.__file__).parent / "audit")


@dataclass(frozen=True)
class _Todo:
    """A part of a submission whose script was found."""

    grading: Grading
    submission: Submission
    name: str
    part: Part
    folder: Path
    script: Path

    @property
    def base(self) -> Path:
        """The files of this part, without their endings."""
        return self.grading.out / "submissions" / self.submission.name / self.name

    @property
    def key(self) -> str:
        rubric = self.grading.rubric
        settings = (self.part.command, self.part.ranks, rubric.limit_seconds, rubric.memory_gb)
        place = self.script.relative_to(self.folder)
        known = [submissions.digest(self.folder), _own_digest(), place, self.grading.sandboxed]
        return sha256(repr([*known, *settings, rubric.mounts]).encode()).hexdigest()

    def known(self) -> Facts | None:
        """Return the facts of an earlier call; None if there are none, or anything has changed."""
        try:
            kept = read_json(self.base.with_suffix(".json"), Kept, most_bytes=_MOST_FACTS)
        except (FileNotFoundError, UserError):
            return None
        return kept.facts if kept.key == self.key else None

    def mark(self, facts: Facts) -> Mark:
        mark = mark_part(self.name, self.part, facts, self.grading.rubric)
        mark.page = f"submissions/{self.submission.name}/{self.name}.html"
        return mark

    def run(self, slot: int) -> tuple[Submission, str, Mark]:
        """Run the part and keep its facts."""
        self.base.parent.mkdir(parents=True, exist_ok=True)
        facts = self.facts_or_reason(slot)
        if isinstance(facts, str):
            mark = unmarked(self.name, self.part, facts)
        else:
            kept = encode(Kept(key=self.key, facts=facts), indent=1)
            write_atomically(self.base.with_suffix(".json"), kept)
            mark = self.mark(facts)
        return self.submission, self.name, mark

    def facts_or_reason(self, slot: int) -> Facts | str:
        """Run the program of part.py, and return what it has seen, or why it has not."""
        rubric, part = self.grading.rubric, self.part
        words = [
            self.script.name if word == "{script}" else word for word in shlex.split(part.command)
        ]
        facts = self.base.with_suffix(".facts")
        task = Task(
            words=words,
            ranks=sorted(set(part.ranks)),
            submission=str(self.folder),
            script=str(self.script),
            page=str(self.base.with_suffix(".html")),
            facts=str(facts),
            mounts={at: str(path) for at, path in rubric.mounted().items()},
            limits=Limits(
                memory_bytes=int(rubric.memory_gb * 2**30),
                disk_bytes=int(rubric.disk_gb * 2**30),
                processes=rubric.processes,
            ),
            limit_seconds=rubric.limit_seconds,
            slot=slot,
            sandboxed=self.grading.sandboxed,
        )
        limit = len(part.ranks) * rubric.limit_seconds + _MORE_SECONDS
        program = [sys.executable, "-m", "lab.grade.part"]
        with subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
            preexec_fn=kill_on_parent_exit(),
        ) as process:
            try:
                output, _ = process.communicate(encode(task), timeout=limit)
            except BaseException as error:
                process.terminate()
                if isinstance(error, subprocess.TimeoutExpired):
                    return f"its audit did not end within {limit:.0f} s"
                raise
        if process.returncode != 0:
            last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            return f"its audit failed (status {process.returncode}): {last[0][:300]}"
        found = read_json(facts, Facts, most_bytes=_MOST_FACTS)
        facts.unlink()
        return found


class Kept(msgspec.Struct):
    """What is kept of a part."""

    key: str
    facts: Facts


def _environment() -> dict[str, str]:
    """Return the environment of a part: nothing of the grader's own but paths and the language."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{setting('PATH') or os.defpath}"
    root = str(Path(lab.__file__).parents[1])
    kept = {name: value for name, value in os.environ.items() if name.startswith(("LC_", "LANG"))}
    return kept | {"PATH": path, "PYTHONPATH": root, "HOME": "/tmp"}
