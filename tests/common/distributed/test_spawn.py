"""Ranks as processes on this machine: exit statuses, order of failures, nothing left running."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.distributed import spawn
from common.distributed.spawn import RankExits, run_local_ranks
from tests.helpers.waiting import wait_until

LONG = 600.0  # more than a test waits: what should be killed must not end by itself
SLEEP = f"import time; time.sleep({LONG})"


def python(code, *arguments):
    """Return a rank's command; with -S -E it starts in a few hundredths of a second."""
    return [sys.executable, "-S", "-E", "-c", code, *map(str, arguments)]


def waits_for(path, *, then):
    """Return the command of a rank that waits until another rank creates a file."""
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    return python(wait + then, path)


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_statuses_are_by_rank_and_failures_in_the_order_of_their_ends(tmp_path):
    """Rank 2 fails first, then rank 0 as a consequence; rank 1 succeeds."""
    failed = tmp_path / "failed"
    exits = run_local_ranks(
        [
            waits_for(failed, then="time.sleep(0.5); sys.exit(3)"),
            waits_for(failed, then="pass"),
            python(f"import sys; open({str(failed)!r}, 'w'); sys.exit(7)"),
        ]
    )
    assert exits == RankExits(statuses=(3, 0, 7), failed=(2, 0))


FAILS, ENDS = "import sys; sys.exit(1)", "pass"
FAILS_LATER = "import sys, time; time.sleep(0.7); sys.exit(2)"
ABORTS = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "limits", "expected", "least_seconds"),
    [
        # ranks that end well wait for one another
        (["import time; time.sleep(0.6)", ENDS], {}, RankExits((0, 0), ()), 0.6),
        # a rank killed by a signal has its negative number
        ([ABORTS], {}, RankExits((-signal.SIGABRT,), (0,)), 0),
        # after the first failure the others have a grace period to fail, too; then they are killed
        (
            [SLEEP, FAILS, FAILS_LATER],
            {"grace_seconds": 2.0},
            RankExits((KILLED, 1, 2), (1, 2)),
            2.0,
        ),
    ],
)
def test_how_ranks_end(codes, limits, expected, least_seconds):
    started = time.monotonic()
    assert run_local_ranks([python(code) for code in codes], **limits) == expected
    assert least_seconds <= time.monotonic() - started < LONG / 2


SAVES = """
import signal, sys, time
def save(*_):
    open(sys.argv[1] + ".saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_a_stop_lets_the_ranks_save_and_end(tmp_path):
    """SIGTERM reaches every rank after all have started; each returns its own status."""
    ready = [tmp_path / "0", tmp_path / "1"]
    exits = run_local_ranks(
        [python(SAVES, path) for path in ready],
        save_seconds=LONG,
        received=lambda: [signal.SIGTERM] if all(path.exists() for path in ready) else [],
    )
    assert exits.statuses == (75, 75)
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["0.saved", "1.saved"]


def test_a_rank_that_ignores_the_stop_is_killed_after_the_grace_period(tmp_path):
    ready = tmp_path / "ready"
    ignores = (
        f"import signal; signal.signal(15, signal.SIG_IGN); open({str(ready)!r}, 'w'); {SLEEP}"
    )
    exits = run_local_ranks(
        [python(ignores)],
        save_seconds=1.0,
        received=lambda: [signal.SIGTERM] if ready.exists() else [],
    )
    assert exits == RankExits((-signal.SIGKILL,), ())


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-E", "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


@pytest.mark.parametrize("ends_by", ["failure", "exception"])
def test_nothing_is_left_of_a_rank_and_its_children(tmp_path, ends_by):
    pids = tmp_path / "pids"

    def received():
        if ends_by == "exception" and pids.exists():
            raise KeyboardInterrupt
        return []

    commands = [python(PARENT, pids)]
    if ends_by == "failure":
        commands.append(waits_for(pids, then="sys.exit(1)"))
    try:
        run_local_ranks(commands, grace_seconds=0.2, received=received)
    except KeyboardInterrupt:
        assert ends_by == "exception"
    else:
        assert ends_by != "exception"
    rank, child = map(int, pids.read_text().split())
    assert not psutil.pid_exists(rank), "the rank was not waited for"
    wait_until(lambda: not is_running(child), "the rank's child has ended")


def test_a_command_that_cannot_be_started_ends_those_before_it(tmp_path):
    before = set(psutil.Process().children())
    with pytest.raises(FileNotFoundError):
        run_local_ranks([python(SLEEP), [str(tmp_path / "no-such-program")]])
    assert set(psutil.Process().children()) == before


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's signal at the parent's end is Linux's"
)
def test_ranks_end_when_this_process_is_killed(tmp_path):
    mark = tmp_path / "pid"
    rank = f"import os; open({str(mark)!r}, 'w').write(str(os.getpid())); {SLEEP}"
    runs = (
        f"from common.distributed.spawn import run_local_ranks\nrun_local_ranks([{python(rank)!r}])"
    )
    parent = psutil.Popen([sys.executable, "-c", runs], cwd=Path(__file__).parents[3])
    try:
        wait_until(lambda: mark.exists() and mark.read_text(), "the rank has started")
    finally:
        parent.kill()
        parent.wait(30)
    pid = int(mark.read_text())
    wait_until(lambda: not is_running(pid), "the rank has ended")


def test_each_rank_writes_to_its_own_file_in_the_environment_given(tmp_path):
    """stdout and stderr share one file in the order written; stdin is empty."""
    code = (
        "import os, sys\n"
        "print(os.environ['GREETING'], sys.argv[1], repr(sys.stdin.read()), flush=True)\n"
        "print('error', sys.argv[1], file=sys.stderr)"
    )
    paths = [tmp_path / "0.txt", tmp_path / "1.txt"]
    with paths[0].open("wb") as first, paths[1].open("wb") as second:
        exits = run_local_ranks(
            [python(code, rank) for rank in range(2)],
            outputs=[first, second],
            environments=[{**os.environ, "GREETING": "hello"}] * 2,
        )
    assert exits.statuses == (0, 0)
    assert [path.read_text() for path in paths] == [
        "hello 0 ''\nerror 0\n",
        "hello 1 ''\nerror 1\n",
    ]


def test_without_files_a_rank_writes_where_this_process_does(capfd):
    run_local_ranks([python("import sys; print('out'); print('err', file=sys.stderr)")])
    assert capfd.readouterr() == ("out\n", "err\n")


@pytest.mark.skipif(sys.platform != "linux", reason="SCHED_BATCH is Linux's")
@pytest.mark.parametrize("cores", [1, 2])
def test_only_more_ranks_than_cores_do_not_interrupt_each_other(cores, monkeypatch):
    monkeypatch.setattr(spawn, "usable_cores", lambda: cores)
    policy = python("import os, sys; sys.exit(os.sched_getscheduler(0))")
    expected = os.SCHED_BATCH if cores == 1 else os.SCHED_OTHER
    assert run_local_ranks([policy] * 2).statuses == (expected,) * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
