"""Hostile messages of other ranks: the decoder answers with a value or one GroupError."""

import io
import json
from pathlib import Path

import pytest
import torch

from common.distributed import collectives
from common.distributed.process_group import World
from common.errors import GroupError, UserError
from common.reporting.rank_stats import _Measured
from common.runs import StepSeconds
from common.utils.typed_json import calm, encode
from lab.calibrate.measurements import RankMeasurements
from tests.helpers.hostile import CASES, altered, damaged, run_cases

ROW = {
    "rank": 1,
    "host": "node1",
    "threads": 2,
    "seconds": dict.fromkeys(StepSeconds.__annotations__, 0.25),
    "peak_memory_bytes": 10**9,
    "bytes_sent": 1e6,
    "messages": 34.0,
}
LANE = {
    "rank": 1,
    "sections": {"forward": [[0.0, 0.5]]},
    "messages": [{"kind": "all_reduce", "bytes": 8, "sent_bytes": 8.0, "begin": 0.1, "end": 0.2}],
}
CPU = {"clock": 1.0, "own": 0.5, "all": 0.9}
MEASURED = {
    "turns": [{"messages": {"send": [[8, 0.1, 0.0]]}, "memory": {"sum": [[8, 0.1]]}, "cpu": CPU}],
    "ready": [0.5, 1.0],
    "together": [{"samples": 32, "before": 0.1, "backward": 0.2, "update": 0.1, "cpu": CPU}],
    "overlap": [],
    "alone": [],
    "threads": 1,
    "environment": {"gpus": [], "cuda": None},
}
MESSAGES = {  # a good one, and its schema
    "text": ("a name", str),
    "checkpoint": (["runs/Epoch_3.pt", 30], tuple[str, int]),
    "batch": (["a1", "b2", True], tuple[str, str, bool]),
    "facts": ({"lr": ["0.1", "0.1"]}, dict[str, tuple[str, str]]),
    "rank": ({"row": ROW, "lane": LANE, "clock_offset": 0.5}, _Measured),
    "measurements": (MEASURED, RankMeasurements),
}
STATE = {
    "steps": 3,
    "errors": {"weight": torch.arange(6.0).reshape(2, 3), "none": torch.zeros(0, 4)},
    "list": [torch.tensor([True]), torch.tensor(2.5, dtype=torch.bfloat16)],
}


class Gathered:
    """A group in which rank 1 sends what the test says, and this process is rank 0."""

    def __init__(self, monkeypatch):
        self.sent, self.world = b"", World(0, 2)
        monkeypatch.setattr(collectives, "all_gather_single", self._gather)

    def _gather(self, gathered, own):
        rows = gathered.view(2, len(own))
        rows[0] = own
        sent = torch.frombuffer(bytearray(self.sent + b"\0"), dtype=torch.uint8)[:-1]
        rows[1] = len(sent) if own.dtype == torch.int64 else 0
        if own.dtype == torch.uint8:
            rows[1, : len(sent)] = sent

    def receive(self, content, gather):
        """Return what rank 1 is understood to send; UserError for the error that names it."""
        self.sent = content
        try:
            return gather(self.world)[1]
        except GroupError as error:
            text = str(error)
            assert text.startswith("rank 1's message")
            assert calm(text).isprintable()
            assert len(text) < 1000
            raise UserError(text) from error


@pytest.fixture
def group(monkeypatch):
    return Gathered(monkeypatch)


@CASES
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_other_ranks(name, cases, group):
    good, schema = MESSAGES[name]

    def gather(world):
        return collectives.gather_objects(world, good, schema=schema)

    group.receive(encode(good), gather)
    hostile = damaged(encode(good)) | altered(good).map(json.dumps).map(str.encode)
    run_cases(cases, hostile, lambda content: group.receive(content, gather))


@CASES
def test_states_of_other_ranks(cases, group):
    def receive(content):
        state = group.receive(content, lambda world: collectives.gather_states(world, {}))
        assert isinstance(state, dict)
        return state

    found = receive(saved(STATE))
    assert torch.equal(found["errors"]["weight"], STATE["errors"]["weight"])
    assert found["list"][1].dtype == torch.bfloat16
    run_cases(cases, damaged(saved(STATE)), receive)


@pytest.mark.parametrize("value", [[1], Path("x"), {"a": Path("x")}, b"no zip"])
def test_what_is_no_state_is_refused(value, group):
    content = value if isinstance(value, bytes) else saved(value)
    with pytest.raises(UserError, match="rank 1's message: "):
        group.receive(content, lambda world: collectives.gather_states(world, {}))


def test_tensors_of_other_forms_are_refused(group):
    mine = {"columns": torch.zeros(3, 2)}
    for other in ({"columns": [1]}, {"rows": mine["columns"]}):
        with pytest.raises(UserError, match=r"expected .*torch.float32 \(3, \*\)"):
            group.receive(saved(other), lambda world: collectives.gather_tensors(world, mine))


def saved(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
