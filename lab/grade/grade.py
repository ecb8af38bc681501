"""The whole walk of ``lab grade``: unpack, run what is new, mark, write.

What was seen of a part stays in the output folder, under a key of all that it follows from: the
submission, the rubric's part and the audit. A second call takes it from there, and marks again;
it runs what could not be run once more.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import sha256
from pathlib import Path

import msgspec
import psutil

import lab
from common.errors import UserError, count, first_of
from common.utils.environment import setting
from common.utils.processes import kill_on_parent_exit
from common.utils.system import usable_cores
from common.utils.typed_json import calm, encode, read_json
from lab.audit.isolation import record_folder
from lab.flags import refuse
from lab.grade import gradescope, pages
from lab.grade.marks import mark_part, override, read_overrides
from lab.grade.part import Facts
from lab.grade.rubric import Rubric, load_rubric, rubric_text
from lab.grade.sandbox import Task, refused
from lab.grade.submissions import check_row, digest, find_script, named, read_rows, unpack
from lab.predict.readable import duration_text
from lab.terminal import say

_CORES_A_JOB = 2
_MOST_FACTS = 64 * 2**20
_NOT_YET = "it has not been run yet: start the same command again"
# For the audit around the runs of a part.
_MORE_SECONDS = 120.0

# The names of a submission and of a part.
Place = tuple[str, str]


def main_grade(args: argparse.Namespace) -> int:
    """Grade all submissions; return 0, also if a person has to look at some.

    Raises UserError for wrong flags or files and for a missing sandbox, before anything runs.
    """
    if args.print_rubric:
        print(rubric_text(args.rubric), end="")
        return 0
    rubric = load_rubric(args.rubric)
    if args.zip:
        text = rubric_text(args.rubric)
        gradescope.write_autograder(args.zip, text, rubric.mounts.values())
        say(f"written: {args.zip}; upload it as the assignment's autograder on Gradescope")
        return 0
    missing = [path for path in args.submissions if not path.exists()]
    absent = [path for path in set(rubric.mounted().values()) if not path.is_dir()]
    not_there = [
        at
        for at in rubric.mounts
        if os.path.isabs(at) and args.no_sandbox and not Path(at).is_dir()
    ]
    refuse(
        {
            "give a folder, zip or tar for each student: lab grade submissions/*": (
                not args.submissions
            ),
            f"{first_of(missing)}: there is no such file: give folders, zips or tars": bool(
                missing
            ),
            f"the rubric mounts {first_of(absent)}: there is no such folder: put the data there": (
                bool(absent)
            ),
            f"without a sandbox {first_of(not_there)} must be there: link your folder there": (
                bool(not_there)
            ),
            f"--jobs: got {args.jobs}; give 1 or more": args.jobs is not None and args.jobs < 1,
        }
    )
    paths, out = named(args.submissions), args.out.absolute()
    given = read_overrides(out / "overrides.csv", paths, rubric)
    scripts = _read_map(args.map, paths, rubric)
    seen: dict[Place, Facts | str] = dict.fromkeys(
        ((name, part) for name in paths for part in rubric.parts), _NOT_YET
    )

    def write() -> int:
        """Write all pages from what is known now; return how many marks are open."""
        graded = {
            name: [
                override(mark_part(one, seen[name, one], rubric), given.get((name, one)))
                for one in rubric.parts
            ]
            for name in paths
        }
        pages.write_class(out, rubric, graded, sandboxed=not args.no_sandbox)
        return sum(mark.marks is None for marks in graded.values() for mark in marks)

    with record_folder(None) as folder:
        tasks: dict[Place, Task] = {}
        for name, sources in paths.items():
            copy = folder / name
            problem = _take_in(name, sources, copy)
            for part_name, part in rubric.parts.items():
                place = name, part_name
                found = problem or find_script(copy, part, scripts.get(place))
                if isinstance(found, str):
                    seen[place] = found
                else:
                    facts = out / "submissions" / name / f"{part_name}.json"
                    tasks[place] = _task(rubric, part_name, copy, found, facts, args.no_sandbox)
        seen |= _known(tasks, given)
        write()
        try:
            _run_all(tasks, seen, rubric, args.jobs or _jobs(rubric, args.no_sandbox))
        finally:  # also if it is interrupted
            by_hand = write()
            say(
                f"{count(len(paths), 'submission')}, {count(by_hand, 'part')} to look at by hand; "
                f"see {out / 'class.html'} and {out / 'class.csv'}"
            )
    return 0


def _read_map(path: Path | None, names: Mapping[str, object], rubric: Rubric) -> dict[Place, str]:
    """Return the places of scripts that --map gives."""
    rows = read_rows(path, ("submission", "part", "path")) if path else []
    for row in rows:
        check_row(row, names, rubric, where=str(path))
    return {(row["submission"], row["part"]): row["path"] for row in rows}


def _take_in(name: str, sources: list[Path], copy: Path) -> str:
    """Unpack a submission, and return "", or say and return why nothing of it can be graded."""
    problem = ""
    try:
        unpack(sources, copy)
    except UserError as error:
        problem = " ".join(calm(str(error)).split())  # it quotes names of files
        say(f"{name}: {problem}")
    return problem


# --- running ---


def _task(
    rubric: Rubric, name: str, copy: Path, script: Path, facts: Path, no_sandbox: bool
) -> Task:
    """Return what to run of a submission; its key stays the same as long as the outcome does."""
    part = rubric.parts[name]
    program, *words = shlex.split(part.command)
    program = shutil.which(program, path=_environment()["PATH"]) or program
    task = Task(
        words=[program, *(script.name if one == "{script}" else one for one in words)],
        ranks=sorted(set(part.ranks)),
        submission="",
        script=str(script.relative_to(copy)),
        facts="",
        key="",
        mounts={at: str(path) for at, path in rubric.mounted().items()},
        memory_bytes=int(rubric.memory_gb * 2**30),
        disk_bytes=int(rubric.disk_gb * 2**30),
        processes=rubric.processes,
        limit_seconds=rubric.limit_seconds,
        sandboxed=not no_sandbox,
    )
    sources = [digest(copy), digest(Path(lab.__file__).parent / "audit")]
    key = sha256(encode([task, *sources])).hexdigest()
    return msgspec.structs.replace(task, submission=str(copy), facts=str(facts), key=key)


def _jobs(rubric: Rubric, no_sandbox: bool) -> int:
    """Return how many parts to run at a time; one without a sandbox, where ports may collide."""
    memory = int(psutil.virtual_memory().available / (rubric.memory_gb * 2**30))
    return 1 if no_sandbox else max(1, min(usable_cores() // _CORES_A_JOB, memory))


def _known(tasks: Mapping[Place, Task], given: Mapping[Place, object]) -> dict[Place, Facts]:
    """Return what an earlier call has seen of these parts.

    Not that of a part that could not be run, unless a person has decided: data may have been
    missing.
    """
    known: dict[Place, Facts] = {}
    for place, task in tasks.items():
        with contextlib.suppress(FileNotFoundError, UserError):  # not there, or cut off
            facts = _read_facts(task)
            ran = facts.whole or facts.audit["status"] < 2 or place in given
            if ran and facts.key == task.key:
                known[place] = facts
    return known


def _run_all(
    tasks: Mapping[Place, Task], seen: dict[Place, Facts | str], rubric: Rubric, jobs: int
) -> None:
    """Run the parts of which nothing is seen yet, and add what is, or why nothing."""
    new = [place for place in tasks if seen[place] is _NOT_YET]
    if new:
        first = tasks[new[0]]
        if first.sandboxed and (why := refused(first)):
            raise UserError(
                f"no sandbox: {why}. In a container that holds nothing else, use --no-sandbox"
            )
        seconds = rubric.expected_seconds * len(new) / jobs
        say(
            f"{count(len(new), 'part')} to run, {jobs} at a time: about {duration_text(seconds)} "
            f"at {rubric.expected_seconds:g} s a part"
        )
    pool, began = ThreadPoolExecutor(jobs), time.monotonic()
    places = {pool.submit(_run, tasks[place]): place for place in new}
    try:
        for ended, future in enumerate(as_completed(places), start=1):
            name, part = place = places[future]
            seen[place] = future.result()
            text = pages.marks_text(mark_part(part, seen[place], rubric))
            left = (time.monotonic() - began) / ended * (len(new) - ended)
            about = f"; about {duration_text(left)} left" if left else ""
            say(f"[{ended}/{len(new)}] {name} {part}: {text}{about}")
    except BaseException:
        for child in psutil.Process().children():
            child.terminate()  # it ends what runs in its sandbox
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _read_facts(task: Task) -> Facts:
    return read_json(Path(task.facts), Facts, most_bytes=_MOST_FACTS)


def _run(task: Task) -> Facts | str:
    """Run the program of part.py, and return what it has seen, or why it has not."""
    limit = len(task.ranks) * task.limit_seconds + _MORE_SECONDS
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.grade.part"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,
        preexec_fn=kill_on_parent_exit(),
    )
    with process:
        try:
            output, _ = process.communicate(encode(task), timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            return f"its audit did not end within {limit:.0f} s"
    if process.returncode != 0:
        last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        return f"its audit failed (status {process.returncode}): {last[0][:300]}"
    try:
        return _read_facts(task)
    except (UserError, OSError) as error:
        return f"what its audit saw cannot be read ({error})"


def _environment() -> dict[str, str]:
    """Return the environment of a part: nothing of the grader's own but paths and the language."""
    # No relative entries: the program of a part works in the student's folder.
    path = os.pathsep.join(
        [
            str(Path(sys.executable).parent),
            *filter(os.path.isabs, (setting("PATH") or os.defpath).split(os.pathsep)),
        ]
    )
    root = str(Path(lab.__file__).parents[1])
    kept = {name: value for name, value in os.environ.items() if name.startswith(("LC_", "LANG"))}
    return kept | {"PATH": path, "PYTHONPATH": root, "HOME": "/tmp"}
