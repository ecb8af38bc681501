"""Which of several failed ranks failed first, and what it said."""

from lab.explain.diagnosis import failure_in, first_to_fail, is_consequence

KILLED = (
    "error (rank 0): rank 1 (10.0.0.2) ended or was killed at step 3 (no sign of life for 3.0 s); "
    "rank 0 waits in all_reduce of step 4. (all_reduce broke here)"
)
STILL = (
    "error (rank 0): rank 1 (10.0.0.2) has not moved since step 3, 9.2 s ago; rank 0 waits in "
    "all_reduce of step 4. (all_reduce broke here)"
)


def test_a_rank_that_names_a_killed_one_has_not_failed_first():
    culprit, message, _ = first_to_fail({1: -9, 0: 1}, {0: KILLED, 1: ""}, name="rank")
    assert (culprit, message) == (1, "rank 1 was killed by SIGKILL: it printed nothing")


def test_a_rank_that_stands_still_is_named_by_the_one_that_ended():
    culprit, message, _ = first_to_fail({0: 1}, {0: STILL, 1: ""}, name="rank")
    assert culprit == 0
    assert "rank 1 (10.0.0.2) has not moved since step 3" in message


def test_an_exception_of_its_own_comes_before_the_one_that_it_caused_elsewhere():
    """The rank that ended first only lost its connection; what another one raised counts."""
    lost = "Traceback (most recent call last):\nConnectionResetError: Connection reset by peer\n"
    own = "Traceback (most recent call last):\nKeyError: 'lr'\n"
    culprit, message, failure = first_to_fail({0: 1, 2: 1}, {0: lost, 2: own}, name="node")
    assert (culprit, message) == (2, "node 2 ended with status 1: KeyError: 'lr'")
    assert failure.type == "KeyError"


def test_what_only_lost_others_is_named_by_the_first_to_end():
    lost = "Traceback (most recent call last):\nConnectionResetError: Connection reset by peer\n"
    culprit, message, _ = first_to_fail({3: -9, 0: 1}, {0: lost, 3: "epoch 1\n"}, name="rank")
    assert (culprit, message) == (3, "rank 3 was killed by SIGKILL: epoch 1")


def test_a_message_of_a_long_line_has_whole_words():
    culprit, message, _ = first_to_fail({0: 2}, {0: "error: " + "no/such/file " * 99}, name="rank")
    assert culprit == 0
    assert message.endswith("no/such/file …")
    assert len(message) < 600


def test_an_output_without_a_failure_is_told_by_its_last_line():
    assert failure_in("one\ntwo\n\n").said == "two"
    assert failure_in("").said == "it printed nothing"


def test_an_exception_is_a_consequence_only_if_another_process_ended():
    assert is_consequence("RuntimeError: Connection closed by peer")
    assert is_consequence("ChildFailedError: ")
    assert not is_consequence("IndexError: list index out of range")
    # It is about a server of the program's own.
    assert not is_consequence("urllib.error.URLError: <urlopen error timed out>")
