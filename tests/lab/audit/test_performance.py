"""The times and bytes of a step that an audit measures."""

import numpy as np
import pytest

from lab.audit.performance import measure
from lab.audit.recording import RankRecords, Recording

PARAMS = {"k": "params", "t": 0.0, "o": 0, "rows": [["0.0.0", "w", [1000], "torch.float32", 1000]]}
DDP = {"k": "ddp", "t": 0.0, "bytes": 4000}
CALL = {"name": "all_reduce", "bytes": 4000}


def measured(*calls, through="module", exposed=0.0, apart=0.1, hook=False, **done):
    """Return what is measured in six steps of one second each; the first two take ten seconds.

    Backward lasts from 0.2 to 0.6 s of each step, and the calls end from 0.7 s on.
    """
    found = [PARAMS, DDP, *([{"k": "hook", "t": 0.0}] if hook else [])]
    end = 0.0
    for step in range(6):
        begin, end = end, end + (10.0 if step < 3 else 1.0)
        forwards = [[4, 0, through, "Net"]]
        backward = {"seconds": 0.4, "exposed_seconds": exposed, "forwards": forwards}
        found.append({"k": "backward", "t": begin + 0.6, "step": step, **backward})
        for number, call in enumerate(calls):
            at = begin + 0.7 + apart * number
            found.append({"k": "call", "t": at, "size": 2, **call})
            found.append({"k": "done", "t": at, "seconds": 0.05, "wait_seconds": 0.0, **done})
        found.append({"k": "step", "t": end, "o": 0, "step": step})
        found.append({"k": "stepped", "t": end + 0.1, "o": 0, "step": step, "seconds": 0.1})
    result = measure(Recording(2, [RankRecords(r, found, np.zeros(0), r) for r in range(2)]))
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("facts", "exposed", "backward"),
    [
        (measured(CALL, CALL), 0.1, 0.4),
        (measured(CALL, CALL, CALL, apart=0.02), 0.09, 0.4),  # from several threads: counts once
        (measured(CALL, seconds=0.1, wait_seconds=0.3), 0.4, 0.1),  # from 0.3 to 0.7 s
        (measured(CALL, seconds=0.1, wait_seconds=0.3, own_thread=True), 0.1, 0.4),
        (measured(through="ddp", exposed=0.15), 0.15, 0.25),
    ],
)
def test_seconds(facts, exposed, backward):
    assert facts["seconds"] == pytest.approx(1.0)
    assert facts["exposed_seconds"] == pytest.approx(exposed)
    assert facts["exposed_share"] == pytest.approx(exposed)
    assert facts["backward_seconds"] == pytest.approx(backward)
    assert [one["strategy"] for one in facts["predicted"]] == ["ddp", "overlapped"]
    ideal = 1.0 - exposed
    assert all(ideal - 0.1 < one["step_seconds"] < ideal + 0.1 for one in facts["predicted"])


@pytest.mark.parametrize(
    ("names", "through", "hook", "sent"),
    [
        (("gather", "scatter"), "module", False, 4000),  # rank 1 to rank 0, then back
        (("all_gather_into_tensor",), "module", False, 4000),
        (("all_gather_single",), "module", False, 4000),
        (("_reduce_scatter_base",), "module", False, 2000),
        (("reduce_scatter_single",), "module", False, 2000),
        (("all_to_all",), "module", False, 2000),
        (("isend",), "module", False, 4000),
        (("irecv", "barrier"), "module", False, 0),
        ((), "ddp", False, 4000),  # 2 (N-1)/N of its parameters' bytes, in C++
        (("broadcast",), "ddp", False, 6000),  # of the buffers
        (("all_reduce",), "ddp", True, 4000),  # by a hook of the script's
        ((), "bypass", False, 0),
    ],
)
def test_bytes(names, through, hook, sent):
    calls = [{"name": name, "bytes": 4000, "peer": 0} for name in names]
    assert measured(*calls, through=through, hook=hook)["bytes_sent"] == sent


def test_two_optimisers_make_one_step_together():
    """A GAN: one second for the discriminator, then half a second for the generator."""
    steps = [
        {"k": "step", "t": 1.5 * round + (1.0, 1.5)[optimizer], "o": optimizer}
        for round in range(6)
        for optimizer in (0, 1)
    ]
    found = measure(Recording(1, [RankRecords(1, steps, np.zeros(0), 0)]))
    assert found is not None
    assert found["seconds"] == pytest.approx(1.5)
    assert found["predicted"] == []


def test_without_steps_nothing_is_measured():
    assert measure(Recording(2, [RankRecords(1, [], np.zeros(0), 0)])) is None
