"""Children: how they start, end and are ended; threads that run actions in order."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from common.errors import TO_BE_CONTINUED
from common.utils.processes import (
    DaemonThreads,
    how_ended,
    kill_group,
    start_child,
    wait_for_ranks,
)
from tests.helpers import wait_until


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with status 0"),
        (137, "ended with status 137"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),  # a real-time signal
        (-200, "was killed by signal 200"),
    ],
)
def test_how_a_process_ended(status, words):
    assert how_ended(status) == words


def test_a_child_has_its_own_session_and_no_input():
    code = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    child = start_child([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.communicate(timeout=60)[0] == "True ''\n"


def test_a_child_ends_with_its_group():
    """The child's own child holds the pipe, so that its end is seen there."""
    code = (
        "import subprocess, time; subprocess.Popen(['sleep', '600']); print(flush=True); "
        "time.sleep(600)"
    )
    child = start_child([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"\n"
    kill_group(child)
    assert child.communicate(timeout=60) == (b"", None)
    assert child.returncode == -signal.SIGKILL
    kill_group(child)  # it has ended: nothing to do


def test_a_child_gets_what_popen_takes(tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['GREETING'], sys.stdin.read())"
    child = start_child(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"GREETING": "hello"},
    )
    assert child.communicate("sent", timeout=60)[0] == f"{tmp_path} hello sent\n"


LONG = 600.0  # more than a test waits
LOOKS = 4


@pytest.mark.parametrize(
    ("first", "looks", "ended_badly"),
    [
        (TO_BE_CONTINUED, LOOKS, [0, 1]),  # it has saved: the other one may save, too
        (1, 1, [0]),  # it has failed: the other one has no time left
        (0, LOOKS, []),
    ],
)
def test_how_long_a_rank_may_run_after_the_first_has_ended(first, looks, ended_badly):
    """The second rank ends at the fourth look."""
    looked = []

    def statuses():
        looked.append(True)
        return [first, first if len(looked) == LOOKS else None]

    waited = wait_for_ranks(statuses, grace_seconds=-1, limit_seconds=LONG)
    assert len(looked) == looks
    assert waited == ended_badly


@pytest.mark.parametrize(
    ("signals", "looks"),
    [
        ([signal.SIGTERM], LOOKS),
        ([signal.SIGUSR1], LOOKS),
        ([signal.SIGINT], 1),  # Ctrl-C leaves no time to save
        ([signal.SIGTERM, signal.SIGTERM], 1),  # the second one ends the wait
    ],
)
def test_the_first_signal_is_passed_on_once(signals, looks):
    looked, passed_on = [], []

    def statuses():
        looked.append(True)
        return [TO_BE_CONTINUED if len(looked) == LOOKS else None]

    waited = wait_for_ranks(
        statuses, grace_seconds=-1, received=lambda: signals, pass_on=passed_on.append
    )
    assert len(looked) == looks
    assert passed_on == signals[:1]
    assert waited == ([0] if looks == LOOKS else [])


def test_a_limit_ends_the_wait():
    assert wait_for_ranks(lambda: [0, None], limit_seconds=-1) == []
    assert wait_for_ranks(lambda: [3, None], limit_seconds=-1) == [0]


def test_daemon_threads_begin_in_order_and_end_with_their_object():
    before, begun = set(threading.enumerate()), list[int]()
    both_wait = threading.Barrier(3)

    def action(number):
        begun.append(number)
        if number < 2:
            both_wait.wait(60)
        return 10 * number

    threads = DaemonThreads(2)
    futures = [threads.submit(partial(action, number)) for number in range(4)]
    failed = threads.submit(lambda: 1 // 0)
    del threads
    wait_until(lambda: len(begun) == 2, "two actions")
    begun_here = set(threading.enumerate()) - before
    assert len(begun_here) == 2
    assert not any(one.done() for one in futures)
    both_wait.wait(60)
    assert [one.result(60) for one in futures] == [0, 10, 20, 30]
    assert sorted(begun[:2]) + begun[2:3] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        failed.result(60)
    wait_until(lambda: not any(one.is_alive() for one in begun_here), "the threads' end")
