"""Which of several failed ranks failed first."""

from lab.fleet.first_failure import find_root_failure

KILLED = (
    "error (rank 0): rank 1 (10.0.0.2) ended or was killed at step 3 (no sign of life for 3.0 s); "
    "rank 0 waits in all_reduce of step 4. (all_reduce broke here)"
)
STILL = (
    "error (rank 0): rank 1 (10.0.0.2) has not moved since step 3, 9.2 s ago; rank 0 waits in "
    "all_reduce of step 4. (all_reduce broke here)"
)


def test_a_rank_that_names_a_killed_one_has_not_failed_first():
    culprit, message = find_root_failure([1, 0], {0: 1, 1: -9}, {0: KILLED, 1: ""}, name="rank")
    assert (culprit, message) == (1, "rank 1 was killed by SIGKILL: it printed nothing")


def test_a_rank_that_stands_still_is_named_by_the_one_that_ended():
    culprit, message = find_root_failure([0], {0: 1, 1: -9}, {0: STILL, 1: ""}, name="rank")
    assert culprit == 0
    assert "rank 1 (10.0.0.2) has not moved since step 3" in message
