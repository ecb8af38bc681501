"""collectives-differ, group-unused, failures of the probe: on records of ranks that never ran."""

from collections.abc import Callable

import pytest

from lab.audit.findings import run_checks
from lab.audit.findings.collectives import check
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.recording import read_recording
from lab.audit.result import verdict
from tests.lab.audit.recordings import Writer, train

AT = ["train.py", 7, "dist.all_reduce(p.grad)"]
IN_BACKWARD = ["train.py", 9, "loss.backward()"]
Script = Callable[["RankWriter"], None]


class RankWriter(Writer):
    """The records of one rank's calls."""

    def __init__(self, folder, rank, size):
        super().__init__(folder, 100 + rank)
        self.rank, self.calls = rank, 0
        self.record("group", rank=rank, world=size, backend="gloo", at=AT)

    def call(self, name="all_reduce", *, done=True, **fields):
        """Record a call; ``done`` False: the rank waits in it for ever."""
        known = {"op": "SUM", "size": 2, "group": None, "bytes": 40, "dtype": "float32"}
        known |= {"shape": [10], "step": 1, "peer": None, "async": False, "content": "gradient"}
        known |= {"within": None, "at": AT}
        self.record("call", c=self.calls, name=name, **(known | fields))
        if done:
            self.record("done", c=self.calls, seconds=0.1, error=fields.get("error"))
        self.calls += 1


def calls(*several):
    """Return a rank that makes these calls, then does nothing more."""

    def script(rank):
        for one in several:
            rank.call(**one)

    return script


def then(kind, first=None, **fields):
    """Return a rank that makes a call, or does what ``first`` says, then writes a record."""

    def script(rank):
        (first or calls({}))(rank)
        rank.record(kind, **fields)

    return script


def in_order(*scripts):
    """Return a rank that does what each of the scripts says."""

    def script(rank):
        for one in scripts:
            one(rank)

    return script


WAITS = calls({}, {"done": False})
STANDS = then("stack", then("stands", WAITS, c=1, name="all_reduce", at=AT), at=AT)
IN_DDP = then("stands", c=None, name=None, at=IN_BACKWARD)
FAILS = calls({}, {"error": "RuntimeError: Connection closed by peer"})
CLOSED = "Connection closed by peer [127.0.0.1]:1"
LEFT_IN_DDP = then("error", type="RuntimeError", message=CLOSED, at=IN_BACKWARD, after_cut=False)
ENDS = then("end", status=None, after_cut=False)
LEAVES = then("end", status=0, after_cut=False)
BREAKS = then("error", type="OSError", message="no data", at=AT, after_cut=False)
KILLED = calls({})
CUT = then("cut", step=6, why="6 steps")


def examine(folder, scripts, *, hung=False):
    """Return the outcomes of ranks that do what one function each says."""
    folder.mkdir(exist_ok=True)
    for rank, script in enumerate(scripts):
        script(RankWriter(folder, rank, len(scripts)))
    return list(check(read_recording(folder, hung=hung)))


def faults(outcomes):
    return [one.name for one in outcomes if isinstance(one, Finding)]


def test_equal_calls_are_right_and_counted_by_step(tmp_path):
    three_a_step = calls(*({"step": step} for step in range(4) for _ in range(3)))
    (observed,) = examine(tmp_path, [three_a_step, three_a_step])
    assert isinstance(observed, Right)
    assert "in the watched steps, 3 a step" in observed.text


@pytest.mark.parametrize(
    ("mine", "theirs", "differ"),
    [
        ({}, {"name": "broadcast", "peer": 1}, True),
        ({"name": "broadcast", "peer": 0}, {"name": "broadcast", "peer": 1}, True),
        ({}, {"bytes": 80}, True),
        ({}, {"dtype": "float64"}, True),
        ({}, {"op": "MAX"}, True),
        ({}, {"step": 2}, True),  # rank 1 has skipped an exchange, and stays a step ahead
        ({}, {"content": "other", "async": True, "shape": [2, 5]}, False),
        ({"name": "all_gather"}, {"name": "all_gather", "bytes": 80}, False),
        ({"group": ["1", [0, 1]]}, {"group": None, "bytes": 8}, False),
    ],
)
def test_what_must_be_equal(tmp_path, mine, theirs, differ):
    def steps(call):
        def script(rank):
            calls({}, call)(rank)
            rank.record("step", o=0, step=1, own=None, got=None)

        return script

    outcomes = examine(tmp_path, [steps(mine), steps(theirs)])
    assert faults(outcomes) == ["collectives-differ"] * differ


@pytest.mark.parametrize(
    ("first", "second", "hung", "expected"),
    [
        (FAILS, ENDS, False, "rank 1 ends"),
        (FAILS, LEAVES, False, "rank 1 ends"),  # os._exit(0) in a step
        (LEFT_IN_DDP, LEAVES, False, "rank 1 ends"),
        (IN_DDP, ENDS, True, "rank 1 ends"),
        (STANDS, IN_DDP, True, "rank 1 waits elsewhere"),
        (IN_DDP, IN_DDP, True, None),
        (calls({}, {}, {}), ENDS, False, None),  # rank 0 alone calls more, and nobody waits
        (FAILS, BREAKS, False, None),  # its error explains why others wait
        (FAILS, then("end", status=1, after_cut=False), False, None),
        (WAITS, KILLED, True, None),  # a call had just begun when the run was ended
        (FAILS, CUT, False, None),
        (in_order(CUT, FAILS), in_order(CUT, IN_DDP), True, None),
    ],
)
def test_who_is_waited_for(tmp_path, first, second, hung, expected):
    outcomes = examine(tmp_path, [first, second], hung=hung)
    assert bool(faults(outcomes)) == (expected is not None)
    for one in outcomes:
        assert not isinstance(one, Finding) or expected in one.evidence[0]
        assert not hung or not isinstance(one, Right)


@pytest.mark.parametrize(
    ("first", "hung", "word"), [(FAILS, False, "good order"), (STANDS, True, "elsewhere")]
)
def test_a_rank_that_vanishes_or_works_leaves_it_open(tmp_path, first, hung, word):
    (observed,) = examine(tmp_path, [first, KILLED], hung=hung)
    assert isinstance(observed, Unknown)
    assert "rank 1" in observed.text
    assert word in observed.text
    assert observed.text.startswith("gradients: ")


def test_messages_pair_by_pair(tmp_path):
    def exchange(rank):
        for name in ("send", "recv") if rank.rank else ("recv", "send"):
            rank.call(name, peer=1 - rank.rank)

    def both_receive(rank):
        rank.call("recv", peer=1 - rank.rank, done=False)
        rank.record("stands", c=0, name="recv", at=AT)

    assert not faults(examine(tmp_path / "right", [exchange, exchange]))
    deadlock = examine(tmp_path / "deadlock", [both_receive, both_receive], hung=True)
    assert faults(deadlock) == ["collectives-differ"]


@pytest.mark.parametrize(
    ("names", "got", "also", "unused"),
    [
        ([], (2.0, 1.0), "", True),
        (["barrier", "broadcast_object_list"], (2.0, 1.0), "", True),
        ([], (1.0, 0.5), "", True),  # clipped, or scaled
        (["all_reduce"], (2.0, 1.0), "", False),  # of a loss; then own-gradient is told
        ([], (2.0, 0.0), "", False),  # exchanged by other means
        ([], (2.0, 1.0), "ddp", False),
        ([], (2.0, 1.0), "mesh", False),
    ],
)
def test_group_unused(tmp_path, names, got, also, unused):
    def alone(rank):
        rank.record(also or "cut", at=AT)
        for name in names:
            rank.call(name, bytes=4 * (name == "all_reduce"), content="other")
        for step in range(4):
            own, given = rank.numbers((2.0, 1.0)), rank.numbers(got)
            rank.record("step", o=0, step=step, own=own, got=given)

    assert faults(examine(tmp_path, [alone, alone])) == ["group-unused"] * unused


@pytest.mark.parametrize(("part", "answer"), [("losses", "cannot tell"), ("clocks", "yes")])
def test_a_failure_of_the_probe_is_said(tmp_path, part, answer):
    recording = train(tmp_path)
    text = "Traceback:\nKeyError: 'x'"
    recording.ranks[1].by_kind["trouble"].append({"k": "trouble", "part": part, "text": text})
    findings, _, unknown = run_checks([recording])
    assert verdict([recording], findings, unknown).answer == answer
    assert [one for one in unknown if part in one and "KeyError: 'x'" in one and "itself" in one]
