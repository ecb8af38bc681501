"""collectives-differ, group-unused, failures of the probe: on records of ranks that never ran."""

import pytest

from lab.audit.findings import run_checks
from lab.audit.findings.collectives import check
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.recording import Recording
from lab.audit.result import verdict
from tests.helpers.audited import unseen
from tests.lab.audit.recordings import Rank, train

AT = ["train.py", 9, "loss.backward()"]


def event(kind="call", **fields):
    return kind, fields


def call_of(**fields):
    return [event(), event(**fields)]


def examine(*ranks, hung=False):
    """Return the outcomes of ranks with these events, in order."""
    recording = Recording(len(ranks), list(map(Rank, range(len(ranks)))), hung=hung)
    for rank, events in zip(recording.ranks, ranks, strict=True):
        rank.record("group", rank=rank.rank, world=len(ranks), at=AT)
        for kind, fields in events:
            if kind == "call":
                rank.call(**fields)
            else:
                rank.record(kind, **{"at": AT} | fields)
    return list(check(recording))


def faults(outcomes):
    return [one.name for one in outcomes if isinstance(one, Finding)]


WAITS = call_of(done=False)
STANDS = [*WAITS, event("stands", c=1, name="all_reduce"), event("stack")]
IN_DDP = [event(), event("stands", c=None, name=None)]
FAILS = call_of(error="RuntimeError: Connection closed by peer")
CLOSED = {"type": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:1"}
LEFT_IN_DDP = [event(), event("error", **CLOSED)]
ENDS, LEAVES, FAILED = ([event(), event("end", status=status)] for status in (None, 0, 1))
BREAKS = [event(), event("error", type="OSError", message="no data")]
KILLED = [event()]
CUT = [event(), event("cut")]
RECEIVES_FROM_1, RECEIVES_FROM_0 = (
    [event(name="recv", peer=peer, done=False), event("stands", c=0, name="recv")]
    for peer in (1, 0)
)


def test_equal_calls_are_right_and_counted_by_step():
    three_a_step = [event(step=step) for step in range(4) for _ in range(3)]
    (observed,) = examine(three_a_step, three_a_step)
    assert isinstance(observed, Right)
    assert "in the same order, 3 a step" in observed.text


@pytest.mark.parametrize(
    ("mine", "theirs", "differ"),
    [
        ({}, {"name": "broadcast", "peer": 1}, True),
        ({"name": "broadcast", "peer": 0}, {"name": "broadcast", "peer": 1}, True),
        ({}, {"dtype": "float64"}, True),
        ({}, {"op": "MAX"}, True),
        ({}, {"content": "other", "async": True, "shape": [2, 5]}, False),
        ({"name": "all_gather"}, {"name": "all_gather", "bytes": 80}, False),
        ({"group": ["1", [0, 1]]}, {"group": None, "bytes": 8}, False),
    ],
)
def test_what_must_be_equal(mine, theirs, differ):
    step = event("step", o=0, step=1, own=None, got=None)
    outcomes = examine([*call_of(**mine), step], [*call_of(**theirs), step])
    assert faults(outcomes) == ["collectives-differ"] * differ


@pytest.mark.parametrize(
    ("first", "second", "hung", "expected"),
    [
        (FAILS, ENDS, False, "rank 1 ends"),
        (FAILS, LEAVES, False, "rank 1 ends"),  # os._exit(0) in a step
        (LEFT_IN_DDP, LEAVES, False, "rank 1 ends"),
        (IN_DDP, ENDS, True, "rank 1 ends"),
        (STANDS, IN_DDP, True, "rank 1 waits elsewhere"),
        (RECEIVES_FROM_1, RECEIVES_FROM_0, True, "rank 1 waits elsewhere"),
        (IN_DDP, IN_DDP, True, None),
        ([event()] * 3, ENDS, False, None),  # rank 0 alone calls more, and nobody waits
        (FAILS, BREAKS, False, None),  # its error explains why others wait
        (FAILS, FAILED, False, None),
        (WAITS, KILLED, True, None),  # a call had just begun when the run was ended
        (FAILS, CUT, False, None),
        (CUT + FAILS, CUT + IN_DDP, True, None),
    ],
)
def test_who_is_waited_for(first, second, hung, expected):
    outcomes = examine(first, second, hung=hung)
    assert bool(faults(outcomes)) == (expected is not None)
    for one in outcomes:
        assert not isinstance(one, Finding) or expected in one.evidence[0]
        assert not hung or not isinstance(one, Right)


@pytest.mark.parametrize(
    ("first", "hung", "word"), [(FAILS, False, "good order"), (STANDS, True, "elsewhere")]
)
def test_a_rank_that_vanishes_or_works_leaves_it_open(first, hung, word):
    (observed,) = examine(first, KILLED, hung=hung)
    assert isinstance(observed, Unknown)
    assert observed.of == "collectives"
    assert "rank 1" in observed.text
    assert word in observed.text


@pytest.mark.parametrize(
    ("names", "got", "also", "unused"),
    [
        (["barrier", "broadcast_object_list"], (2.0, 1.0), "cut", True),
        ([], (1.0, 0.5), "cut", True),  # clipped, or scaled
        ([], (2.0, 0.0), "cut", False),  # exchanged by other means
        ([], (2.0, 1.0), "mesh", False),
    ],
)
def test_group_unused(names, got, also, unused):
    ranks = [Rank(0), Rank(1)]
    for one in ranks:
        one.record("group", at=AT)
        one.record(also)
        for name in names:
            one.call(name, bytes=0, content="other")
        for step in range(4):
            one.record("step", o=0, step=step, own=one.keep((2.0, 1.0)), got=one.keep(got))
    assert faults(check(Recording(2, ranks))) == ["group-unused"] * unused


@pytest.mark.parametrize(("part", "answer"), [("losses", "cannot tell"), ("clocks", "yes")])
def test_a_failure_of_the_probe_is_said(part, answer):
    recording = train()
    recording.ranks[1].record("trouble", part=part, text="Traceback:\nKeyError: 'x'")
    checked = run_checks([recording])
    assert verdict([recording], checked.findings, checked.properties).answer == answer
    assert [
        one for one in unseen(checked) if part in one and "KeyError: 'x'" in one and "itself" in one
    ]


@pytest.mark.parametrize(
    ("places", "found"),
    [(("127.0.0.1:1", "127.0.0.1:2"), True), (("127.0.0.1:1",) * 2, False), ((None,) * 2, False)],
)
def test_ranks_that_wait_at_different_places_never_meet(places, found):
    processes = []
    for number, place in enumerate(places):
        process = Rank(number)
        process.record("call", name="init_process_group", c=0, step=0, meets=place, world=2)
        processes.append(process)
    outcomes = list(check(Recording(2, [], others=processes, hung=True)))
    names = [one.name for one in outcomes if isinstance(one, Finding)]
    assert ("different-meeting-places" in names) == found
    if found:
        assert all(place in outcomes[0].evidence[0] for place in places)


def exchange(*numbers, rank, names="abc", step=0):
    """Return the events of a rank that exchanges the gradients of these parameters in a step."""
    rows = [[f"0.0.{n}", name, [10], "float32", 10, n] for n, name in enumerate(names)]
    sent = [event(parameter=number, step=step, at=["main.py", 9 + rank, ""]) for number in numbers]
    return [event("params", o=0, rows=rows), *sent]


@pytest.mark.parametrize(
    ("one", "other", "rank", "said"),
    [
        (
            (0, 1, 2),
            (0, 2),
            1,
            "rank 1 exchanges no gradient of b, and rank 0 does, so collective 2",
        ),
        (
            (0, 2),
            (0, 1, 2),
            0,
            "rank 0 exchanges no gradient of b, and rank 1 does, so collective 2",
        ),
        ((0, 1, 2), (0, 2, 1), 1, "collective 2 gets rank 0's b and rank 1's c"),
    ],
)
def test_a_collective_of_different_parameters_names_the_rank_that_skips_one(one, other, rank, said):
    mine, theirs = (
        [*exchange(*sent, rank=n), event("step")] for n, sent in enumerate((one, other))
    )
    (fault,) = examine(mine, theirs)
    assert (fault.name, fault.at.line) == ("gradients-mispaired", 9 + rank)
    assert said in fault.evidence[0]


def test_a_rank_that_stops_within_the_exchange_is_not_said_to_skip_a_parameter():
    fault = examine(exchange(0, 1, 2, rank=0), exchange(0, 2, rank=1))[0]
    assert (fault.name, fault.evidence) == (
        "gradients-mispaired",
        ("step 0: collective 2 gets rank 0's b and rank 1's c",),
    )


def test_one_parameter_may_have_another_name_or_number_on_another_rank():
    alone = exchange(0, 1, 2, rank=1, names="xyz")
    (agreed,) = examine(exchange(0, 1, 2, rank=0), alone)
    assert isinstance(agreed, Right)
