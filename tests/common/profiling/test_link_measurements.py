"""The calls that are timed send what the cost model has formulas for."""

import pytest
import torch

from common.profiling.comm_trace import MessageRecorder
from common.profiling.link_measurements import message_call
from common.sync.message_cost import KINDS
from tests.helpers import run_ranks


def messages_of_each_kind(rank: int, size: int) -> dict[str, list[tuple[str, int]]]:
    """Call each kind with 1,000 entries, which three ranks cannot share equally."""
    found = {}
    for kind in KINDS:
        with MessageRecorder() as recorder:
            message_call(kind, rank, size)(torch.ones(1000))
        recorder.finish()
        found[kind] = [(message.kind, message.nbytes) for message in recorder.messages]
    return found


def test_each_kind_is_measured_by_its_own_call_with_the_tensor_given() -> None:
    for found in run_ranks(3, messages_of_each_kind, 3):
        exchange = found.pop("exchange")
        assert sorted(exchange) == [("recv", 4000), ("send", 4000)]
        for kind, [(recorded, nbytes)] in found.items():
            assert recorded == kind
            assert nbytes == pytest.approx(4000, abs=4), kind
