"""Communication in a step: waiting time, transfer time, and each message's time and size.

The clocks of the ranks may differ.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common.distributed.clock_offset
from common.distributed.clock_offset import clock_offset
from common.distributed.process_group import World
from common.profiling.comm_trace import MessageRecorder, Timeline
from common.reporting.rank_stats import median_seconds, timed
from common.training_engine import TrainingEngine
from common.training_engine.metrics import MetricsBuffer, StepOutcome, StepRecord
from tests.helpers import run_ranks


class FixedTimes:
    """A timer that returns given start and end times of each step's sync."""

    def seconds(self, taken):
        return {"sync": sum(end - begin for begin, end in taken["sync"])}

    def spans(self, taken):
        return taken


def ledger_waits(rank: int) -> list[float]:
    """Return the wait and sync seconds of three steps.

    Rank 1 is slower in the first step, rank 0 in the second. In the third, a second part of sync
    follows the update.
    """
    world = World(rank=rank, size=2)
    spans = (
        [[(10.0, 13.0)], [(20.5, 21.0)], [(30.0, 30.1), (31.0, 32.0)]]
        if rank == 0
        else [[(12.0, 13.0)], [(20.0, 21.0)], [(30.0, 30.1), (31.75, 32.0)]]
    )
    found = []
    metrics = MetricsBuffer(
        world,
        FixedTimes(),
        epoch=1,
        log_every=3,
        overflow_is_normal=False,
        equal_gradients=True,
        on_steps=found.extend,
    )
    for step, sync in enumerate(spans, start=1):
        outcome = StepOutcome(torch.tensor(1.0), torch.tensor(1), torch.tensor(1.0))
        metrics.add(step, outcome, samples=1, learning_rate=0.1, times={"sync": sync})
    metrics.flush(stop=False)
    return [value for record in found for value in (record.wait_seconds, record.seconds["sync"])]


def test_waiting_lasts_until_the_slowest_rank_begins_to_synchronise():
    first, second = run_ranks(2, ledger_waits)
    assert first == pytest.approx([2.0, 3.0, 0.0, 0.5, 0.75, 1.1])
    assert second == pytest.approx([0.0, 1.0, 0.5, 1.0, 0.0, 0.35])


def offsets(rank: int) -> tuple[float, float]:
    """Return this rank's offset with one clock, and with rank 1's clock 1,000 s ahead."""
    world = World(rank=rank, size=2)
    here = clock_offset(world)
    common.distributed.clock_offset._one_machine = lambda world: False
    real = time.perf_counter
    common.distributed.clock_offset.time = type(
        "Clock", (), {"perf_counter": staticmethod(lambda: real() + 1000.0 * rank)}
    )
    return here, clock_offset(world)


def test_clocks_of_other_machines_are_compared():
    (same0, far0), (same1, far1) = run_ranks(2, offsets)
    assert (same0, same1) == (0.0, 0.0)
    assert far1 - far0 == pytest.approx(1000.0, abs=0.5)


def recorded(rank: int, size: int) -> dict:
    """Record steps 2 and 3 of 4 with all_reduce, then a send and a broadcast without a strategy."""
    torch.manual_seed(0)
    model = nn.Linear(10, 3)
    engine = TrainingEngine(model, "cpu", distributed=True, sync="all_reduce")
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    engine.timeline = Timeline(2, 3)
    batches = [(torch.randn(2, 10), torch.tensor([0, 1])) for _ in range(4)]
    engine.train_epoch(batches, epoch=1)
    engine.close()
    recorder = MessageRecorder()
    tensor = torch.ones(1000)
    with recorder:
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        if rank == 0:
            time.sleep(0.05)  # the message arrives long before wait()
        work.wait()
        torch.ones(1)  # as a strategy does after its wait: the recorder ends the message here
        after = time.perf_counter()
        dist.broadcast(tensor, src=size - 1)
    recorder.finish()
    return {
        "lane": engine.timeline.busiest_step(0.0),
        "bytes": engine.timeline.sent_bytes_a_step,
        "messages": engine.timeline.messages_a_step,
        "by hand": recorder.messages,
        "after": after,
    }


def test_messages_are_taken_down_with_bytes_and_times():
    for rank, found in enumerate(run_ranks(2, recorded, 2)):
        lane = found["lane"]
        assert lane["step"] == 3
        assert [(m["kind"], m["bytes"]) for m in lane["messages"]] == [
            ("all_reduce", 120),
            ("all_reduce", 12),
        ]
        assert found["bytes"] == 132.0  # in a ring of two, each rank sends the data once
        assert found["messages"] == 2.0
        begin, end = lane["sections"]["sync"][0]
        for message in lane["messages"]:
            assert begin <= message["begin"] <= message["end"] <= end + 0.01
        single, broadcast = found["by hand"]
        assert (single.kind, single.nbytes, single.sent_bytes) == (
            ("send", "recv")[rank],
            4000,
            (4000.0, 0.0)[rank],
        )
        assert single.end <= found["after"]
        assert (broadcast.kind, broadcast.sent_bytes) == ("broadcast", (0.0, 4000.0)[rank])
        if rank == 0:
            assert single.end - single.begin >= 0.05


def steps_taking(seconds):
    """Return one step record for each sync time in seconds; forward takes 1 s."""
    return [
        StepRecord(1, number, 1, 0.0, 0.0, 0.0, 0.1, {"forward": 1.0, "sync": value}, value / 2)
        for number, value in enumerate(seconds, start=1)
    ]


def test_medians_leave_out_warm_up_and_timeline_and_see_what_happens_every_few_steps():
    steps = steps_taking([9.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 4.0, 50.0])
    kept = timed(steps, 1, Timeline(10, 10))
    assert [step.step for step in kept] == list(range(2, 10))
    assert median_seconds(kept)["sync"] == 0.0, "most steps send nothing"
    medians = median_seconds(kept, period=4)
    assert medians == {"forward": 1.0, "sync": 1.0, "step": 2.0, "wait": 0.5, "wire": 0.5}
    assert median_seconds([]) is None
    assert len(timed(steps[:1], 1)) == 1, "one step is better than none"
