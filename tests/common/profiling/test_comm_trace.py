"""Communication in a step: waiting time, transfer time, and each message's time and size."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import asdict
from torch import nn

import common.distributed.clock_offset
from common.distributed.clock_offset import clock_offset
from common.distributed.process_group import World
from common.profiling import comm_trace
from common.profiling.comm_trace import MessageRecorder, Timeline
from common.profiling.records import SECTIONS, StepRecord
from common.reporting.rank_stats import median_seconds, timed
from common.sync.message_cost import KINDS
from common.training_engine.metrics import MetricsBuffer, StepOutcome
from lab.calibrate.link_measurements import message_call
from tests.helpers import run_ranks
from tests.helpers.engines import prepared


def ledger_waits(rank):
    """Return the wait and sync seconds of three steps with given begins and ends of sync."""

    def seconds(taken):
        sync = sum(end - begin for begin, end in taken["sync"])
        return {"sync": sync, "step": 1.0 + sync}

    timer = SimpleNamespace(seconds=seconds, spans=lambda taken: taken, anchor=lambda: None)
    # Rank 1 is slower in the first step, rank 0 in the second. In the third, a second part of sync
    # follows the update.
    spans = (
        [[(10.0, 13.0)], [(20.5, 21.0)], [(30.0, 30.1), (31.0, 32.0)]],
        [[(12.0, 13.0)], [(20.0, 21.0)], [(30.0, 30.1), (31.75, 32.0)]],
    )
    found = []
    flags = {"epoch": 1, "log_every": 3, "overflow_is_normal": False, "equal_gradients": True}
    metrics = MetricsBuffer(World(rank, 2), timer, on_steps=found.extend, **flags)
    for step, sync in enumerate(spans[rank], start=1):
        numbers = [1.0, 1, 1, 1, 1.0]  # loss, its count, right predictions, samples, norm
        metrics.add(StepOutcome(step, numbers, 0.1, {"sync": sync}))
    metrics.flush(stop=False)
    return [value for record in found for value in (record.wait_seconds, record.seconds["sync"])]


def test_waiting_lasts_until_the_slowest_rank_begins_to_synchronise():
    first, second = run_ranks(2, ledger_waits)
    assert first == pytest.approx([2.0, 3.0, 0.0, 0.5, 0.75, 1.1])
    assert second == pytest.approx([0.0, 1.0, 0.5, 1.0, 0.0, 0.35])


def offsets(rank):
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


def recorded(rank, size):
    """Record steps 2 and 3 of 4 with all_reduce, then a send and a broadcast without a strategy."""
    torch.manual_seed(0)
    engine = prepared(nn.Linear(10, 3), "all_reduce")
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
        half = torch.ones(500)
        dist.all_to_all([half.clone(), half.clone()], [half, half])
        dist.reduce_scatter(torch.empty(500), [half, half])
        torch.ones(1)
        reduced = time.perf_counter()
        for kind in KINDS:  # as `lab calibrate` measures them, here with an odd number of entries
            message_call(kind, rank, size)(torch.ones(1001))
    recorder.finish()

    assert engine.timeline.busiest_step == 3
    assert engine.timeline.sent_a_step() == (132.0, 2.0)  # in a ring of two, a rank sends all once
    lane = engine.timeline.steps[3]
    in_step = [(m.kind, m.bytes) for m in lane.messages]
    assert in_step == [("all_reduce", 120), ("all_reduce", 12)]
    begin, end = lane.sections["sync"][0]
    for message in lane.messages:
        assert begin <= message.begin <= message.end <= end
    single, broadcast, *others = recorder.messages
    facts = (single.kind, single.bytes, single.sent_bytes)
    assert facts == [("send", 4000, 4000.0), ("recv", 4000, 0.0)][rank]
    assert single.end <= after
    assert (broadcast.kind, broadcast.sent_bytes) == ("broadcast", (0.0, 4000.0)[rank])
    if rank == 0:
        assert single.end - single.begin >= 0.05
    # Half of the tensor goes to the other rank; Gloo reduces by a whole all_reduce.
    parts = [(m.kind, m.bytes, m.sent_bytes) for m in others if m.bytes == 4000]
    assert parts == [("all_to_all", 4000, 2000.0), ("reduce_scatter", 4000, 4000.0)]
    assert next(m.end for m in others if m.kind == "reduce_scatter") <= reduced
    measured = [m.kind for m in others[2:] if m.bytes in (4000, 4004)]
    assert [kind for kind in measured if kind not in ("send", "recv")] == list(KINDS[:-2])


def test_messages_are_taken_down_with_bytes_and_times():
    run_ranks(2, recorded, 2)


def recorded_in_threads(rank):
    """Record the third of four steps of ``sharded``."""
    torch.manual_seed(0)
    engine = prepared(nn.Linear(10, 3), "sharded")
    engine.timeline = Timeline(3, 3)
    engine.train_epoch([(torch.randn(2, 10), torch.tensor([0, 1]))] * 4, epoch=1)
    engine.close()
    assert engine.timeline.sent_a_step()[0] == 2 * 68
    lane = engine.timeline.steps[3]
    *exchanged, gathered = lane.messages
    assert sorted((m.kind, m.bytes) for m in exchanged) == [("recv", 68), ("send", 68)]
    assert (gathered.kind, gathered.bytes) == ("all_gather", 68)
    [(begin, end_of_backward)] = lane.sections["backward"]
    # The first waits, in forward, are for the weights of the step before.
    end = next(end for start, end in lane.sections["sync"] if start >= end_of_backward)
    for message in exchanged:
        assert begin <= message.begin <= message.end <= end


def test_messages_of_a_strategys_threads_are_taken_down_too():
    """33 entries become two parts of 17: one to the other rank, one of new weights to gather."""
    run_ranks(2, recorded_in_threads)


class GPU:
    """A GPU under NCCL: calls only queue, and a future's callback runs on a stream of its own."""

    def __init__(self):
        self.stream, self.moments = "current", []

    def clock(self):
        self.moments.append((self.stream, len(self.moments)))
        return self.moments[-1]

    def get_future(self):
        return self

    def add_done_callback(self, callback):
        self.stream = "callback"
        callback(self)
        self.stream = "current"


def call(recorder, name, work=None):
    """Dispatch the operation ``name`` as torch does; it returns ``work``."""

    def operation(*_args):
        return [], work

    operation._schema = SimpleNamespace(name=name)
    recorder.__torch_dispatch__(operation, (), ([torch.ones(4)], None, 1, 0))


@pytest.fixture
def gpu(monkeypatch):
    """Return a GPU with an open group of two ranks under NCCL."""
    monkeypatch.setattr(comm_trace, "_work", lambda result: result[-1])
    answers = {"is_initialized": True, "get_backend": "nccl", "get_rank": 0, "get_world_size": 2}
    for name, value in answers.items():
        monkeypatch.setattr(dist, name, lambda *_group, value=value: value)
    gpu = GPU()
    monkeypatch.setattr(
        comm_trace, "now", lambda device: gpu.clock() if device.type == "cuda" else 0
    )
    return gpu


def test_under_nccl_a_message_ends_on_the_stream_that_waits_for_it(gpu):
    """Not when the call returns, or its future is done: both only queue the message."""
    recorder = MessageRecorder(gpu.clock)
    call(recorder, "aten::mul")
    assert gpu.moments == [], "a step that computes queues no events"
    call(recorder, "c10d::allreduce_", gpu)
    call(recorder, "c10d::send", gpu)
    recorder.finish()
    assert [(m.kind, m.begin, m.end) for m in recorder.messages] == [
        ("all_reduce", ("current", 0), ("callback", 1)),
        ("send", ("current", 2), ("callback", 3)),
    ]


def test_messages_that_nccl_joins_end_with_their_batch(gpu):
    """Two rounds of a ring without computing between them, a third, then nothing in the step."""
    recorder = MessageRecorder(gpu.clock)
    for follows in ("", "aten::add_", ""):
        call(recorder, "c10d::recv_")
        call(recorder, "c10d::send")
        if follows:
            call(recorder, follows)
    recorder.finish()
    begins, ends = zip(*((m.begin[1], m.end[1]) for m in recorder.messages), strict=True)
    first, second, third = ends[0:2], ends[2:4], ends[4:6]
    assert first[0] == first[1] < begins[2], "the second round waits for the first"
    assert begins[3] < second[0] == second[1] < begins[4]
    assert third[0] > begins[5]
    assert third[1] > begins[5]


def test_the_timeline_of_a_gpu_is_on_the_hosts_clock(gpu):
    """The GPU's moments stay as they are until the step is over: only then the host may wait."""
    timeline = Timeline(2, 2)
    timer = SimpleNamespace(
        host_seconds=lambda moment: 100.0 + moment[1],
        spans=lambda taken: {"sync": [(100.0, 110.0)]},
    )
    for step in (1, 2):
        with timeline.around(step) as recorder:
            if recorder is not None:
                call(recorder, "c10d::allreduce_", gpu)
        timeline.took(step, timer, {})
    [message] = timeline.steps[2].messages
    assert (message.begin, message.end) == (100.0, 101.0)


def steps_taking(seconds):
    """Return one step record for each sync time; forward takes 1 s, 0.25 s lie between them."""
    return [
        StepRecord(
            **{"step": number, "loss": 0.0, "forward_seconds": 1.0, "sync_seconds": value},
            step_seconds=1.25 + value,
            wait_seconds=value / 2,
        )
        for number, value in enumerate(seconds, start=1)
    ]


def test_medians_leave_out_warm_up_and_timeline_and_see_what_happens_every_few_steps():
    steps = steps_taking([9.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 4.0, 50.0])
    kept = timed(steps, 1, Timeline(10, 10).to_record)
    assert [step.step for step in kept] == list(range(2, 10))
    assert median_seconds(kept).sync == 0.0, "most steps send nothing"
    medians = median_seconds(kept, period=4)
    expected = {"forward": 1.0, "sync": 1.0, "step": 2.25, "wait": 0.5, "wire": 0.5}
    assert asdict(medians) == dict.fromkeys(SECTIONS, 0.0) | expected
    assert median_seconds([]) is None
    assert len(timed(steps[:1], 1)) == 1, "one step is better than none"
