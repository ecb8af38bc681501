"""Threads that run actions in order."""

import threading
from functools import partial

import pytest

from common.utils.processes import DaemonThreads
from tests.helpers import wait_until


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
