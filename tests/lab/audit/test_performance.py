"""The times and bytes of a step that an audit measures."""

import pytest

from lab.audit.performance import measure
from lab.audit.recording import Recording
from tests.lab.audit.recordings import Rank

CALL = {"name": "all_reduce", "bytes": 4000}


def measured(*calls, through="module", exposed=0.0, apart=0.1, hook=False, of_ddp=(), **done):
    """Return what is measured in six steps of one second each; the first two take ten seconds.

    Backward lasts from 0.2 to 0.6 s of each step, and the calls end from 0.7 s on.
    """
    ranks = [Rank(0), Rank(1)]
    for one in ranks:
        one.record("params", o=0, rows=[["0.0.0", "w", [1000], "float32", 1000, 0]])
        one.record("ddp", bytes=4000, ranks=list(of_ddp))
        if hook:
            one.record("hook")
        for step, end in enumerate((10.0, 20.0, 30.0, 31.0, 32.0, 33.0)):
            begin = end - (10.0 if step < 3 else 1.0)
            backward = {"seconds": 0.4, "exposed_seconds": exposed, "step": step}
            forwards = [[4, 0, through]]
            one.record("backward", t=begin + 0.6, forwards=forwards, **backward)
            for number, call in enumerate(calls):
                at = begin + 0.7 + apart * number
                one.record("call", t=at, **{"size": 2} | call)
                one.record("done", t=at, **{"seconds": 0.05, "wait_seconds": 0.0} | done)
            one.record("step", t=end, o=0, step=step)
            one.record("stepped", t=end + 0.1, o=0, step=step, seconds=0.1)
    return measure(Recording(2, ranks))


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
    assert facts.seconds == pytest.approx(1.0)
    assert facts.exposed_seconds == facts.exposed_share == pytest.approx(exposed)
    assert facts.backward_seconds == pytest.approx(backward)
    assert [one.strategy for one in facts.predicted] == ["ddp", "overlapped"]
    ideal = 1.0 - exposed
    assert all(ideal - 0.1 < one.step_seconds < ideal + 0.1 for one in facts.predicted)


@pytest.mark.parametrize(
    ("names", "options", "sent"),
    [
        (("gather", "scatter"), {}, 4000),  # rank 1 to rank 0, then back
        (("all_gather_into_tensor",), {}, 4000),
        (("all_gather_single",), {}, 4000),
        (("_reduce_scatter_base",), {}, 2000),
        (("reduce_scatter_single",), {}, 2000),
        (("all_to_all",), {}, 2000),
        (("isend",), {}, 4000),
        (("irecv", "barrier"), {}, 0),
        ((), {"through": "ddp"}, 4000),  # 2 (N-1)/N of its parameters' bytes, in C++
        (("broadcast",), {"through": "ddp"}, 6000),  # of the buffers
        (("all_reduce",), {"through": "ddp", "hook": True}, 4000),  # by a hook of the script's
        ((), {"through": "bypass"}, 0),
        (("broadcast",), {"group": [0, 7, 1, 8]}, 6000),  # rank 1 is third: it passes it on
        ((), {"through": "ddp", "of_ddp": [0, 1, 2, 3]}, 6000),
    ],
)
def test_bytes(names, options, sent):
    call = {"bytes": 4000, "peer": 0}
    if "group" in options:
        call |= {"group": ["nodes", options["group"]], "size": len(options["group"])}
    given = {name: value for name, value in options.items() if name != "group"}
    assert measured(*(call | {"name": name} for name in names), **given).bytes_sent == sent


def test_two_optimisers_make_one_step_together():
    one = Rank(0)
    assert measure(Recording(1, [one])) is None
    for begin in (0.0, 1.5, 3.0, 4.5, 6.0, 7.5):
        one.record("step", t=begin + 1.0, o=0)  # a GAN's discriminator
        one.record("step", t=begin + 1.5, o=1)
    found = measure(Recording(1, [one]))
    assert found.seconds == pytest.approx(1.5)
    assert found.predicted == []
