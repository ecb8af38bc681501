"""What evaluations count and which files ranks save, on records as the probe writes them."""

import pytest

from lab.audit.findings import evaluation, saving
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.recording import Recording
from tests.lab.audit.recordings import Rank, load
from tests.lab.audit.test_findings_samples import right

PADDED = [list(range(0, 24, 2)), [*range(1, 23, 2), 0]]  # 23 samples: the last one is repeated
SHARES = [list(range(0, 24, 2)), list(range(1, 24, 2))]
SAME = [list(range(24))] * 2


def evaluated(shares, calls=(), *, loads=(), contents=None, left=False):
    """Return a recording in which each rank trains, and then evaluates a share.

    calls : of the record ``call``, whose ``values`` are by rank.
    loads : by rank, the files that it loads afterwards.
    """
    recording = load(right, second=0)
    for rank in recording.ranks:
        share, batch = shares[rank.rank], {"indices": shares[rank.rank], "inner": None}
        other = (contents or {}).get(rank.rank, 0)
        facts = {"dataset": "Test", "length": 23, "batches": 1, "sampler": "", "replicas": None}
        rank.record("loader", l=1, content=5 + other, **facts)
        codes = [other + 31 * index for index in share]
        rank.record("batch", l=1, epoch=0, b=0, **batch | {"contents": codes})
        if not left:
            rank.record("epoch", l=1, epoch=0, batches=1, cut=False)
        for number, call in enumerate(calls):
            values = call.get("values")
            mine = {"tensor": number, "values": values and values[rank.rank]}
            rank.call(**{"content": "other", "step": 6} | call | mine)
        for path in loads and loads[rank.rank]:
            rank.record("loaded", step=6, path=path, at=None)
    return recording


def said(recording, check=evaluation.check):
    """Return the kinds of what is said, of a finding its name."""
    outcomes = [*check(recording)]
    return [one.name if isinstance(one, Finding) else type(one) for one in outcomes]


COUNTED = {"values": [[9.0, 12.0], [7.0, 12.0]]}
MASKED = {"values": [[9.0, 12.0], [7.0, 11.0]]}
ALL_RIGHT = {"values": [[12.0, 12.0], [11.0, 12.0]]}  # 23 of 24: the count might be masked


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        (evaluated(PADDED, [COUNTED]), ["padding-counted"]),
        (evaluated(PADDED, [MASKED]), [Right]),
        (evaluated(PADDED, [ALL_RIGHT]), [Unknown]),
        (evaluated(PADDED, [{"name": "all_gather"}]), [Unknown]),
        (evaluated(SHARES, [COUNTED]), [Right]),
        (evaluated(SHARES), [Unknown]),
        (evaluated(SHARES, [{"name": "barrier"}, {"name": "broadcast"}]), [Unknown]),
        (evaluated(SHARES, [{"content": "gradient"}]), [Unknown]),
        (evaluated(SHARES, loads=[["a"], ["b"]]), ["own-checkpoint"]),
        (evaluated(SHARES, loads=[["a"], ["a"]]), [Unknown]),
        (evaluated(SHARES, loads=[["a"], []]), [Unknown]),
        (evaluated(SHARES, [COUNTED], loads=[["a"], ["b"]]), [Right]),
        (evaluated(SAME), [Right]),
        # Equal indices of other data: each rank has a share of its own.
        (evaluated(SAME, contents={1: 7}), [Unknown]),
        (evaluated(SAME, [COUNTED], contents={1: 7}), [Right]),
        (evaluated(SAME, [COUNTED], contents={1: 31}), [Unknown]),  # shuffled by each rank
        (evaluated(SHARES, left=True), []),  # a look at a batch
        (load(right), []),
    ],
)
def test_samples_of_an_evaluation_count_once(recording, expected):
    assert said(recording) == expected


def totals(*values, tensors=None):
    """Return a recording of all_reduce calls, in each of which the ranks give these numbers."""
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        for number, given in enumerate(values):
            tensor = 0 if tensors is None else tensors[number]
            rank.call(content="other", tensor=tensor, values=given[rank.rank])
    return Recording(2, ranks)


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        (totals(([60], [58]), ([178], [180]), ([420], [415])), ["summed-again"]),
        (
            totals(([60, 64], [58, 64]), ([118, 192], [119, 192]), ([300, 448], [301, 448])),
            ["summed-again"],
        ),
        (totals(([60], [58]), ([119], [116]), ([180], [175])), []),  # sums of each rank's own
        (totals(([60], [58]), ([59], [60]), ([62], [55])), []),  # new numbers in one tensor
        (totals(([60], [58]), ([178], [180])), []),  # once may be by chance
        (totals(([10], [10]), ([30], [30]), ([64], [64]), tensors=[0, 1, 2]), []),  # three metrics
        (totals(([8], [8]), ([16], [16]), ([32], [32])), []),  # a speed test: nothing is added
        (totals(([60], [58]), ([178], [110]), ([420], [300])), []),  # rank 1 has its own total
    ],
)
def test_a_total_of_all_ranks_that_is_summed_again_is_found(recording, expected):
    assert said(recording) == expected


def saved(*order, path=lambda rank: "model.pt", one_command=True, calls=True):
    """Return a recording in which ranks save, in this order, with a call between them."""
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        rank.record("start", ppid=7, hint=None if one_command else rank.rank)
        for writer in order:
            if rank.rank == writer or writer is None:
                rank.record("saved", step=3, path=path(rank.rank), at=None)
            if calls:
                rank.call("barrier")
    return Recording(2, ranks)


@pytest.mark.parametrize(
    ("recording", "expected", "condition"),
    [
        (saved(None), ["one-file"], ""),
        (saved(None, one_command=False), [Unknown, "one-file"], "the ranks share a disk"),
        (saved(None, path=lambda rank: f"{rank}.pt"), [Right], None),
        (saved(0), [Right], None),
        (saved(0, 1), [Right], None),
        (saved(0, 1, calls=False), ["one-file"], ""),
        (saved(), [], None),
    ],
)
def test_a_file_that_several_ranks_write_at_once_is_found(recording, expected, condition):
    assert said(recording, saving.check) == expected
    conditions = [one.condition for one in saving.check(recording) if isinstance(one, Finding)]
    assert conditions == [condition] * (condition is not None)
