"""Which of several failed ranks failed first; threads that run actions in order."""

import threading
from functools import partial

import pytest

from common.utils.processes import DaemonThreads, find_root_failure
from tests.helpers import wait_until

KILLED = (
    "error (rank 0): rank 1 (10.0.0.2) ended or was killed at step 3 (no sign of life for 3.0 s); "
    "rank 0 waits in all_reduce of step 4. (all_reduce broke here)"
)
STILL = (
    "error (rank 0): rank 1 (10.0.0.2) has not moved since step 3, 9.2 s ago; rank 0 waits in "
    "all_reduce of step 4. (all_reduce broke here)"
)


def test_a_rank_that_names_a_killed_one_has_not_failed_first() -> None:
    culprit, message = find_root_failure([1, 0], {0: 1, 1: -9}, {0: KILLED, 1: ""}, name="rank")
    assert (culprit, message) == (1, "rank 1 was killed by SIGKILL: it printed nothing")


def test_a_rank_that_stands_still_is_named_by_the_one_that_ended() -> None:
    culprit, message = find_root_failure([0], {0: 1, 1: -9}, {0: STILL, 1: ""}, name="rank")
    assert culprit == 0
    assert "rank 1 (10.0.0.2) has not moved since step 3" in message


def test_daemon_threads_begin_in_order_and_end_with_their_object() -> None:
    before, begun = set(threading.enumerate()), list[int]()
    both_wait = threading.Barrier(3)

    def action(number: int) -> int:
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
