"""Record what this rank sends in a step, and when: each collective and message.

The engine wraps each step in ``Timeline.around`` and passes on the step's times with ``took``.
rank_stats.py writes them to timeline.json, and lab/report/timeline.py draws them. Every call to
torch.distributed, by our strategies, by DistributedDataParallel or by its hooks, passes through
torch's dispatcher, where ``MessageRecorder`` sees it. Recording slows a step slightly, so only the
last steps of a run are recorded, and their times are left out of the medians.
"""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.sync.message_cost import sent_bytes

_KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_": "reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::send": "send",
    "c10d::recv_": "recv",
}
_OWN_PART = {"all_gather": 1, "gather": 1}  # the argument with this rank's own part; else the first


@dataclass
class Message:
    """One collective or message: bytes of the rank's tensor, bytes that it sends, its times."""

    kind: str
    nbytes: int
    sent_bytes: float
    begin: float
    end: float = math.nan


class MessageRecorder(TorchDispatchMode):
    """Context manager that records this thread's torch.distributed calls in ``messages``.

    A collective ends when its future does. A point-to-point message ends when the strategy has
    waited for it and computes again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self._open: list[tuple[Message, Any]] = []  # point-to-point messages that have not ended

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run the call; record it if it is one of torch.distributed."""
        now = time.perf_counter()
        self._close_completed(now)
        result = func(*args, **(kwargs or {}))
        kind = _KINDS.get(func._schema.name)
        if kind is not None:
            self._record(kind, args, result, now)
        return result

    def _record(self, kind: str, args: tuple, result: Any, began: float) -> None:
        message = Message(kind, *_bytes(kind, args), began)
        self.messages.append(message)
        work = torch._C._distributed_c10d.Work.unbox(
            result[-1] if isinstance(result, tuple | list) else result
        )
        if kind in ("send", "recv"):
            self._open.append((message, work))
        else:
            work.get_future().add_done_callback(
                lambda _future: setattr(message, "end", time.perf_counter())
            )

    def _close_completed(self, now: float) -> None:
        for message, work in self._open:
            if work.is_completed():
                message.end = now
        self._open = [entry for entry in self._open if math.isnan(entry[0].end)]

    def finish(self) -> None:
        """End the messages still open: the step is over."""
        for message in self.messages:
            if math.isnan(message.end):
                message.end = time.perf_counter()


def _bytes(kind: str, args: tuple) -> tuple[int, float]:
    """Return the bytes of this rank's tensors and the payload bytes that it sends."""
    leaves = tree_leaves(args[_OWN_PART.get(kind, 0)])
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
    if kind in ("send", "recv"):
        return size, float(size) if kind == "send" else 0.0
    root = next((a for a in args if isinstance(a, int) and not isinstance(a, bool)), 0)
    return size, float(
        sent_bytes(kind, size, rank=dist.get_rank(), ranks=dist.get_world_size(), root=root)
    )


class Timeline:
    """Records the steps ``first`` to ``last`` of a training on this rank."""

    def __init__(self, first: int, last: int) -> None:
        self._to_record = range(first, last + 1)
        self._steps: dict[int, tuple[list[Message], dict[str, list[tuple[float, float]]]]] = {}
        self._recorder: MessageRecorder | None = None

    def around(self, step: int) -> AbstractContextManager:
        """Return the context of a whole step: a recorder, if the step is to be recorded."""
        self._recorder = MessageRecorder() if step in self else None
        return self._recorder or nullcontext()

    def took(self, step: int, spans: dict[str, list[tuple[float, float]]]) -> None:
        """Keep the step's messages, and when its sections began and ended."""
        if self._recorder is not None:
            self._recorder.finish()
            self._steps[step] = (self._recorder.messages, spans)

    @property
    def sent_bytes_a_step(self) -> float:
        """Payload bytes that this rank sent in a step, the mean over the recorded ones."""
        return sum(m.sent_bytes for messages, _ in self._steps.values() for m in messages) / max(
            1, len(self._steps)
        )

    @property
    def messages_a_step(self) -> float:
        """Collectives and messages of this rank in a step, the mean over the recorded ones."""
        return sum(len(messages) for messages, _ in self._steps.values()) / max(1, len(self._steps))

    def __contains__(self, step: int) -> bool:
        return step in self._to_record

    def busiest_step(self, clock_offset: float) -> dict[str, Any] | None:
        """Return sections and messages of the step with the most bytes; None if none was recorded.

        If several steps tie, it returns the last, so that every rank returns the same step. Times
        are seconds of perf_counter minus ``clock_offset``.
        """
        if not self._steps:
            return None
        step = max(
            self._steps, key=lambda number: (sum(m.nbytes for m in self._steps[number][0]), number)
        )
        messages, spans = self._steps[step]
        return {
            "step": step,
            "sections": {
                name: [(begin - clock_offset, end - clock_offset) for begin, end in parts]
                for name, parts in spans.items()
            },
            "messages": [
                {
                    "kind": m.kind,
                    "bytes": m.nbytes,
                    "sent_bytes": m.sent_bytes,
                    "begin": m.begin - clock_offset,
                    "end": m.end - clock_offset,
                }
                for m in messages
            ],
        }
