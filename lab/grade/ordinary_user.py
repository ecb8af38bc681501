"""Without a sandbox, root's parts run as an ordinary user, who cannot write what root owns.

``own_copy`` gives the user a copy of the submission, ``user_network`` a folder for the records, and
ends at the end of a run all that the user runs. The user sees what everybody may read, uses the
machine's network, and is under no limits.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from lab.audit.isolation import RunNetwork, run_network
from lab.audit.runner import HOOK
from lab.explain.diagnosis import failure_in
from lab.grade.driven import RUNNER
from lab.grade.sandbox import Task, ordinary_user

_KILLS = 5  # a process that is just being forked may escape one


def refused(task: Task) -> str | None:
    """Return why the ranks of a task cannot run as an ordinary user; None if they can."""
    needed = [str(HOOK), str(RUNNER), *task.mounts.values(), *filter(None, [task.driver])]
    # Last in it is the folder that the rubric provides.
    search = task.environment.get("PYTHONPATH", "").split(":")
    needed += [folder for folder in search if Path(folder).is_dir() and os.path.isabs(folder)]
    temporary = tempfile.gettempdir()
    try:
        entered = _run("sh", "-c", 'cd "$0"', temporary)
        found = _run("find", "-L", *needed, "!", "-readable", "-print", "-quit")
        imported = _run(task.program, "-c", "import torch")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if entered.returncode != 0:
        return f"an ordinary user cannot enter {temporary}: chmod a+x it and the folders above"
    if found.returncode != 0 or found.stdout:
        what = found.stdout.strip() or failure_in(found.stderr).said
        return f"an ordinary user cannot read all ({what}): chmod a+rX it and the folders above"
    if imported.returncode != 0 and Path(task.program).name.startswith("python"):
        return (
            f"an ordinary user cannot run {task.program} with torch "
            f"({failure_in(imported.stderr).said}): install it outside of /root"
        )
    return None


def user_words() -> list[str]:
    """Return the words before a command that start it as the ordinary user of this process."""
    user = ordinary_user()
    return [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        "--no-new-privs",
        "--",
    ]


def own_copy(task: Task, folder: Path) -> Task:
    """Return the task on a copy of the submission that belongs to the user."""
    folder.chmod(0o711)
    copy = folder / "submission"
    shutil.copytree(task.submission, copy, symlinks=True)
    user = ordinary_user()
    for path in [copy, *copy.rglob("*")]:
        os.chown(path, user, user, follow_symlinks=False)
    return msgspec.structs.replace(task, submission=str(copy))


@contextlib.contextmanager
def user_network(task: Task, size: int, folder: Path) -> Iterator[RunNetwork]:
    """Yield where the ranks of a run start as the user; then end all that the user runs."""
    records = folder / "records"
    records.mkdir()
    for parent in (folder, folder.parent):
        parent.chmod(0o711)
    user = ordinary_user()
    os.chown(records, user, user)
    _prepare(task)
    with run_network(size, folder, task.cwd, isolate=None, rate=None) as network:
        prefixes = [[*prefix, *user_words()] for prefix in network.prefixes]
        try:
            yield replace(network, prefixes=prefixes, records=records)
        finally:
            for _ in range(_KILLS):  # the shell that kills is not killed
                _run("sh", "-c", "kill -KILL -1")


def _prepare(task: Task) -> None:
    """Make the folders and the links that the script needs, with the user's rights."""
    for made in task.folders:
        _run("mkdir", "-p", "--", made)
    for at, path in task.mounts.items():
        place = Path(os.path.normpath(task.cwd / at))
        if place.is_relative_to(task.submission) and not os.path.lexists(place):
            _run("ln", "-s", "--", path, str(place))


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as the user."""
    command = [*user_words(), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
