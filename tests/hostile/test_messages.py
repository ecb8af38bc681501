"""Hostile messages of other ranks: the decoder answers with a value or one GroupError."""

import json
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from common.distributed.messages import (
    StateHeader,
    check_alike,
    check_header,
    pack_state,
    read_message,
    unpack_state,
)
from common.errors import GroupError, UserError
from common.reporting.rank_stats import _Measured
from common.reporting.run_files import StepSeconds
from common.utils.typed_json import encode
from lab.calibrate.rank_measurements import RankMeasurements
from tests.helpers.hostile import CASES, VALUES, altered, damaged, run_cases

ROW = {
    "rank": 1,
    "host": "node1",
    "threads": 2,
    "seconds": dict.fromkeys(StepSeconds.__annotations__, 0.25),
    "peak_memory_bytes": 10**9,
    "bytes_sent": 1e6,
    "messages": 34.0,
}
STEP = {
    "step": 3,
    "sections": {"forward": [[0.0, 0.5]]},
    "messages": [{"kind": "all_reduce", "bytes": 8, "sent_bytes": 8.0, "begin": 0.1, "end": 0.2}],
}
MEASURED = {
    "turns": [
        {"messages": {"send": [[8, 0.1, 0.0]]}, "memory": {"sum": [[8, 0.1]]}, "cpu": {"own": 1.0}}
    ],
    "ready": [0.5, 1.0],
    "together": [{"samples": 32, "before": 0.1, "cpu": {"own": 0.5}}],
    "overlap": [],
    "alone": [],
    "threads": 1,
    "environment": {"gpus": [], "cuda": None},
}
MESSAGES: dict[str, tuple[Any, Any]] = {  # a good one, and its schema
    "text": ("a name", str),
    "checkpoint": (["runs/Epoch_3.pt", 30], tuple[str, int]),
    "batch": (["a1", "b2", True], tuple[str, str, bool]),
    "facts": ({"lr": ["0.1", "0.1"]}, dict[str, tuple[str, str]]),
    "rank": ({"row": ROW, "recorded_step": STEP}, _Measured),
    "measurements": (MEASURED, RankMeasurements),
}
STATE = {
    "steps": 3,
    "errors": {"weight": torch.arange(6.0).reshape(2, 3), "none": torch.zeros(0, 4)},
    "list": [torch.tensor([True]), torch.tensor(2.5, dtype=torch.bfloat16)],
}
HEADER = {
    "plain": '{"steps": 3, "list": [{"$tensor": 0}, {"$tensor": 1}]}',
    "tensors": [{"dtype": "float32", "shape": [2, 3]}, {"dtype": "int8", "shape": [0, 4]}],
}


def receive(content: bytes, schema: Any) -> None:
    """Read a message; raise UserError in place of the GroupError that names the sender."""
    try:
        read_message(content, schema, rank=7)
    except GroupError as error:
        refused(error)


def receive_state(content: bytes) -> None:
    """Do what ``gather_states`` does with a header and as many bytes as the header announces."""
    try:
        header = read_message(content, StateHeader, rank=7)
        check_header(header, rank=7, most_bytes=2**20)
        state = unpack_state(header, torch.ones(header.nbytes, dtype=torch.uint8), rank=7)
        assert isinstance(state, dict)
        mine = {"columns": torch.zeros(3, 2)}
        check_alike([mine] * 7 + [state], mine)
    except GroupError as error:
        refused(error)


def refused(error: GroupError) -> None:
    text = str(error)
    assert text.startswith("rank 7's message")
    assert text.isprintable(), text  # no escape sequence of a stranger reaches the terminal
    assert len(text) < 1000
    raise UserError(text) from error


@CASES
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_other_ranks(name: str, cases: int) -> None:
    good, schema = MESSAGES[name]
    receive(encode(good), schema)
    content = encode(good)
    hostile = damaged(content) | altered(good).map(json.dumps).map(str.encode)
    run_cases(cases, hostile, lambda content: receive(content, schema))


@CASES
def test_states_of_other_ranks(cases: int) -> None:
    header, content = pack_state(STATE)
    found = unpack_state(read_message(encode(header), StateHeader, rank=7), content, rank=7)
    assert torch.equal(found["errors"]["weight"], STATE["errors"]["weight"])
    assert found["list"][1].dtype == torch.bfloat16
    with_plain = st.builds(
        lambda plain: json.dumps(HEADER | {"plain": json.dumps(plain)}),
        altered(json.loads(HEADER["plain"])) | VALUES,
    )
    hostile = (
        damaged(encode(header))
        | altered(HEADER).map(json.dumps).map(str.encode)
        | with_plain.map(str.encode)
    )
    run_cases(cases, hostile, receive_state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Found by hand: a size of 0 hides others, of which torch cannot compute strides.
        (
            {"tensors": [{"dtype": "float32", "shape": [0, 2**50, 2**50]}]},
            "has a tensor of shape [0, 1125899906842624, 1125899906842624]: that is too large",
        ),
        (
            {"tensors": [{"dtype": "float64", "shape": [2**19]}]},
            "has tensors of 4,194,304 bytes; up to 1,048,576 are expected",
        ),
        (
            {"tensors": [{"dtype": "object", "shape": []}]},
            "has a tensor of type 'object', not one of",
        ),
        ({"tensors": [{"dtype": "int8", "shape": [1] * 17}]}, ": tensors[0].shape: got [1, 1, 1"),
        ({"plain": "[" * 100_000, "tensors": []}, ": expected a state, got maximum recursion"),
        # Found by hypothesis: the message had the tensor's lines.
        (
            {"plain": '{"list": [{"$tensor": 0}]}'},
            ": expected {'columns': 'float32 (3, *)'}, got {'list': 'list'}",
        ),
        ({"plain": "[1]", "tensors": []}, ": expected a state, got list"),
        ({"plain": '{"$tensor": 2}'}, ": expected a state, got list index out of range"),
        ({"plain": '{"$tensor": "0"}'}, ": expected a state, got list indices must be integers"),
        ({"plain": '{"a": ' + "9" * 5000 + "}"}, ": expected a state, got Exceeds the limit"),
    ],
)
def test_states_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        receive_state(json.dumps(HEADER | changes).encode())
    assert str(caught.value).startswith(f"rank 7's message{'' if message[0] == ':' else ' '}")
    assert message in str(caught.value)


def test_a_state_of_something_else_is_not_sent() -> None:
    for value in (object(), torch.zeros(1, dtype=torch.complex64), {1, 2}):
        with pytest.raises(TypeError, match="a state holds tensors and plain values, not"):
            pack_state({"value": value})
