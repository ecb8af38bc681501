"""Two runs never write to one folder; real processes."""

import errno
import fcntl
import json
import multiprocessing
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from common.distributed.collectives import gather_objects
from common.distributed.process_group import World
from common.errors import UserError
from common.experiment.resume import _lock
from common.profiling.records import StepRecord
from common.reporting.run_folder import RunFolder
from common.reporting.run_lock import is_locked_by, lock_folder
from common.utils.paths import new_folder
from tests.helpers import (
    ROOT,
    TINY,
    Started,
    free_port,
    make_image_folder,
    run_ranks,
    start_part,
    user_environment,
)

ADVICE = "give another name"
MANY = 20
HOLDS = """
import sys
from pathlib import Path
from common.reporting.run_lock import lock_folder
with lock_folder(Path(sys.argv[1]), advice=""):
    print("held", flush=True)
    sys.stdin.read()
"""


def start_group(tmp_path, images, *flags, ranks, hurt):
    command = [
        *(sys.executable, ROOT / "tests" / "helpers" / "hurt.py", *hurt),
        *(ROOT / "PartTwo" / "main.py", *TINY, "--sync", "ring", "--threads", 1, "--epochs", 2),
        *("--dataset", "folder", "--data-dir", images, "--batch-size", 12, "--log-every", 1),
        *("--output-dir", tmp_path / "out", "--run-name", "same", "--timeout", 20),
        *("--master-ip", "127.0.0.1", "--master-port", free_port(), "--num-nodes", ranks),
        *flags,
    ]
    return [
        Started(
            [str(word) for word in (*command, "--rank", rank)],
            cwd=tmp_path,
            env=user_environment(),
            forked=True,
        )
        for rank in range(ranks)
    ]


def test_a_second_run_in_the_folder_is_refused_on_all_ranks(tmp_path):
    """With the same --run-name, and with --resume auto, while the first run still trains."""
    images = make_image_folder(tmp_path / "images")
    [first] = start_group(tmp_path, images, ranks=1, hurt=("0", "forward", "hold"))
    first.wait_for("held now")
    run = tmp_path / "out" / "PartTwo-ring" / "same"
    words = (
        rf"error.*: (rank 0 stopped: )?{run} is in use by process {first.process.pid} on "
        rf"{re.escape(os.uname().nodename)} since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d: wait until it "
        r"ends, or give another --run-name"
    )
    nobody = ("-1", "", "")
    both = start_group(tmp_path, images, ranks=2, hurt=nobody)
    both += start_group(tmp_path, images, "--resume", "auto", ranks=1, hurt=nobody)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for ended in [rank.end() for rank in both]:
        assert ended.status == 1, ended
        assert re.search(words, ended.err), ended
        assert "Traceback" not in ended.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (tmp_path / "go").touch()
    assert first.end().status == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert not (run / ".lock").exists()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    """Its file stays until the next holder ends, but says nothing any more."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        for _ in range(2):  # a refusal leaves the holder's words as they are
            with (
                pytest.raises(UserError, match=rf"in use by process {holder.pid} on"),
                lock_folder(tmp_path, advice=ADVICE),
            ):
                pass
        holder.kill()
        holder.wait(30)
    assert (tmp_path / ".lock").exists()
    with lock_folder(tmp_path, advice=ADVICE) as run:
        assert is_locked_by(tmp_path, run)
    assert not (tmp_path / ".lock").exists()


def lock_on_each_disk(rank, parent):
    """Return for a shared folder, then for one of each rank, whether this rank keeps it."""
    world, found = World(rank=rank, size=2), []
    for folder in (Path(parent, "shared"), Path(parent, str(rank))):
        folder.mkdir(exist_ok=True)
        with ExitStack() as locks:
            found.append(_lock(folder, world, locks))
            # The run's random name. Rank 0 removes its file once all have read it.
            run = (folder / ".lock").read_text().splitlines()[0]
            found.append(gather_objects(world, run, schema=str))
    return found


def test_each_disk_of_a_run_has_the_lock(tmp_path):
    for rank, (shares, one, owns, two) in enumerate(run_ranks(2, lock_on_each_disk, str(tmp_path))):
        assert (shares, owns) == (rank == 0, True)
        assert len(set(one)) == len(set(two)) == 1
        assert one != two
    assert not list(tmp_path.rglob(".lock"))


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
    """The run goes on unlocked; it leaves no lock of another kind, which a kill would not free."""

    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for _ in range(2):
        with lock_folder(tmp_path, advice=ADVICE):
            assert {path.name for path in tmp_path.iterdir()} == {".lock"}
        printed = " ".join(capsys.readouterr().out.split())
        assert f"{tmp_path} cannot be locked (Function not implemented): do not start" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"a", b"\xff\n", b"a\nprocess 1 on \x1b[2J since 2026-01-01 00:00:00\n"]
)
def test_a_lock_file_of_somebody_else_is_only_shown_if_it_is_plain(content, tmp_path):
    """What it says reaches the terminal."""
    with (tmp_path / ".lock").open("wb") as file:
        file.write(content)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with (
            pytest.raises(UserError, match="is in use by another process: wait"),
            lock_folder(tmp_path, advice=ADVICE),
        ):
            pass


def test_twenty_at_once_get_twenty_folders(tmp_path):
    """Runs, and what lab makes: comparisons, launches, reports."""
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(MANY), context.SimpleQueue()

    def make():
        barrier.wait(60)
        queue.put(new_folder(tmp_path / "runs").name)

    children = [context.Process(target=make, daemon=True) for _ in range(MANY)]
    for child in children:
        child.start()
    made = [queue.get() for _ in children]
    for child in children:
        child.join(60)
    assert len(set(made)) == MANY
    assert {path.name for path in (tmp_path / "runs").iterdir()} == set(made)
    assert new_folder(tmp_path, "launch").name.startswith("launch-20")


def test_special_files_are_refused_before_anything_is_written(tmp_path):
    """A FIFO as target or source ends the run at once; none of them is read or replaced."""
    fifo, out = tmp_path / "fifo", tmp_path / "out"
    os.mkfifo(fifo)
    images = make_image_folder(tmp_path / "images")
    common = [*TINY, "--dataset", "folder", "--data-dir", images, "--output-dir", out]
    usages = {
        ("--checkpoint", fifo): "fifo is a FIFO, not a regular file",
        ("--resume", fifo): "fifo is a FIFO, not a regular file",
        ("--output-dir", fifo): "fifo is not a folder: give the path of a folder",
        ("--data-dir", fifo): "fifo is not a folder: give the path of a folder",
    }
    started = [start_part("PartOne", *common, *flags, cwd=tmp_path) for flags in usages]
    for ended, words in zip([one.end() for one in started], usages.values(), strict=True):
        assert ended.status == 1, ended
        assert re.fullmatch(rf"error: \S*{words}.*\n", ended.err), ended
    assert not out.exists()


def test_the_folder_of_a_run_holds_links_to_files(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "metrics")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    folder = RunFolder(tmp_path / "run")
    folder.append([StepRecord(step=1, loss=1.0)])
    assert (tmp_path / "metrics").exists()
    (tmp_path / "run" / "epochs.jsonl").mkdir()
    with pytest.raises(UserError, match=r"epochs\.jsonl is a folder"):
        folder.cut(step=1, epoch=1)
