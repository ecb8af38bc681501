"""A plan that somebody sent: ``lab run-cell`` and ``lab report`` leave everything else alone."""

import json
import os

import pytest

from common.utils.source_hash import code_facts
from lab.cli import main
from lab.compare import jobs
from lab.compare.runner import open_comparison
from lab.compare.settings import Settings
from tests.helpers.hostile import memory_limit, untouched

ESCAPE = "\033[2J"


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a plan; run 0 is on one node, run 1 on two."""
    settings = Settings(nodes=(1, 2), sync=("ring",), repeats=1)
    return open_comparison(settings, reports=tmp_path / "plans", code=code_facts(*jobs.RUN_BY))[0]


def failed(folder, notes):
    """Write failure notes of run 1 by the files' names; return the folder of its logs."""
    logs = folder / "logs" / "ring-n2-1"
    logs.mkdir(parents=True)
    for name, status in notes.items():
        (logs / name).write_text(json.dumps(status))
    return logs


def reported(folder):
    """Report on the plan; return the message of run 1."""
    assert main(["report", str(folder)]) == 0
    cells = json.loads((folder / "results.json").read_text())["cells"]
    return str(cells[1]["message"])


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("runs", "."),
        ("runs/PartOne-none/n1-1", "n1-1"),
        ("logs/none-n1-1", "."),
        ("logs/none-n1-1/rank0.txt", "rank0.txt"),
        ("logs/none-n1-1/rank0.txt", "new.txt"),
        ("logs/none-n1-1/rank0.failed.json", "rank0.txt"),
        ("logs/none-n1-1/rank0.txt", "../plans/plan/results.json"),
    ],
)
def test_a_run_follows_no_link(name, target, folder, tmp_path, capsys):
    """Neither out of the plan's folder nor to another file in it; a link to the folder is fine."""
    folder.rename(folder.with_name("plan"))
    mine = tmp_path / "mine"
    (mine / "n1-1").mkdir(parents=True)
    for file in ("rank0.txt", "n1-1/weights.pt"):
        (mine / file).write_text("mine")
    link = folder.with_name("plan") / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(mine / target)
    (tmp_path / "typed").symlink_to(folder.with_name("plan"))
    with untouched(tmp_path):
        assert main(["run-cell", str(tmp_path / "typed"), "--run", "0"]) == 2
    assert (
        "leads elsewhere through a link, or is no regular file: remove it"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("status", [-200, -35, -9])
def test_a_status_that_no_signal_has(status, folder):
    """Real-time signals, such as 35, have no name either."""
    failed(folder, {"rank1.failed.json": status})
    by = "SIGKILL" if status == -9 else f"signal {-status}"
    assert f"rank 1 was killed by {by}: it printed nothing" in reported(folder)


def test_only_notes_of_ranks_are_read(folder):
    names = ["rankABC.failed.json", "rank.failed.json", "rank-1.failed.json", "rank1.failed.json"]
    logs = failed(folder, dict.fromkeys(names, 3))
    (logs / "rank0.failed.json").symlink_to("nowhere")
    assert "rank 1 ended with status 3" in reported(folder)


def test_what_is_no_file_in_its_place_is_refused(folder, capsys):
    (folder / "logs" / "none-n1-1" / "rank0.failed.json").mkdir(parents=True)
    assert main(["run-cell", str(folder), "--run", "0"]) == 2
    assert "rank0.failed.json is a folder" in capsys.readouterr().err
    os.mkfifo(failed(folder, {"rank1.failed.json": 1}) / "rank1.txt")
    assert main(["report", str(folder)]) == 2
    assert "rank1.txt is a FIFO, not a regular file" in capsys.readouterr().err


def test_of_a_long_log_the_end_is_read(folder):
    """The logs are sparse files of 2 GB; the report may take 1 GB of memory."""
    logs = failed(folder, {"rank0.failed.json": 1, "rank1.failed.json": 1})
    for name in ("rank0.txt", "rank1.txt"):
        with (logs / name).open("wb") as file:
            file.truncate(2 * 10**9)
            file.seek(0, os.SEEK_END)
            file.write(b"\nerror: the last words\n")
    with memory_limit(2**30):
        assert "error: the last words" in reported(folder)


def test_control_characters_do_not_reach_the_terminal(folder, monkeypatch, capsys):
    """In the error of a part, and in the name of a folder that ``lab report`` finds."""
    part = ["-c", f"raise SystemExit({f'error: {ESCAPE} the last words'!r})"]
    monkeypatch.setattr(jobs, "node_command", lambda run: part)
    assert main(["run-cell", str(folder), "--run", "0"]) == 1
    run = folder.parent / "runs" / f"{ESCAPE} found"
    run.mkdir(parents=True)
    (run / "config.json").touch()
    assert main(["report", str(run.parent)]) == 2
    error = capsys.readouterr().err
    assert "the last words" in error
    assert " found" in error
    assert "\033" not in error
