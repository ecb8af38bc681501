"""What a step sends and when, taken down on this rank: each collective and message, from where torch.distributed is called.

``Timeline`` is given to the engine, which opens ``around`` each step and hands over its times; ``lab`` draws and counts them.
Every call of torch.distributed, by a strategy of ours, by torch's own DistributedDataParallel or by its hooks, passes torch's
dispatcher, where ``MessageRecorder`` sees it. That slows a step by a little, so only the last steps of a run are recorded, and
their times are left out of the medians.
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
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
}
_TENSORS = {"all_gather": 1, "gather": 1, "scatter": 0}
"""Which argument holds this rank's own part, where the first one does not."""


@dataclass
class Message:
    """One collective or message: ``nbytes`` of this rank's tensor, ``sent_bytes`` that it sends, when by perf_counter."""

    kind: str
    nbytes: int
    sent_bytes: float
    begin: float
    end: float = math.nan


class MessageRecorder(TorchDispatchMode):
    """While it is entered, every call of torch.distributed of this thread is added to ``messages``.

    A collective ends when its future does; a single message when the strategy has waited for it and computes again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self._open: list[tuple[Message, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Pass the call on; see the class."""
        now = time.perf_counter()
        self._close_waited(now)
        result = func(*args, **(kwargs or {}))
        if (
            func.namespace == "c10d"
            and (kind := _KINDS.get(func._schema.name.split("::")[1])) is not None
        ):
            self._note(kind, args, result, now)
        return result

    def _note(self, kind: str, args: tuple, result: Any, began: float) -> None:
        size = _own_bytes(kind, args)
        if kind in ("send", "recv"):
            sent = float(size) if kind == "send" else 0.0
        else:
            root = next((a for a in args if isinstance(a, int) and not isinstance(a, bool)), 0)
            sent = float(
                sent_bytes(kind, size, rank=dist.get_rank(), ranks=dist.get_world_size(), root=root)
            )
        message = Message(kind, size, sent, began)
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

    def _close_waited(self, now: float) -> None:
        for entry in self._open[:]:
            if entry[1].is_completed():
                entry[0].end = now
                self._open.remove(entry)

    def finish(self) -> None:
        """Close what is still open: the step is over."""
        self._close_waited(time.perf_counter())
        for message in self.messages:
            if math.isnan(message.end):
                message.end = time.perf_counter()
        self._open = []


def _own_bytes(kind: str, args: tuple) -> int:
    tensors = [
        leaf for leaf in tree_leaves(args[_TENSORS.get(kind, 0)]) if isinstance(leaf, Tensor)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Timeline:
    """Records the steps ``first`` to ``last`` of a training on this rank."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._steps: dict[int, tuple[list[Message], dict[str, list[tuple[float, float]]]]] = {}
        self._recorder: MessageRecorder | None = None

    def around(self, step: int) -> AbstractContextManager:
        """Around the whole of a step: records its messages if it is one of those to be recorded."""
        self._recorder = MessageRecorder() if step in self else None
        return self._recorder or nullcontext()

    def took(self, step: int, spans: dict[str, list[tuple[float, float]]]) -> None:
        """Take a step's sections, when each began and ended."""
        if self._recorder is not None:
            self._recorder.finish()
            self._steps[step] = (self._recorder.messages, spans)

    @property
    def sent_bytes_a_step(self) -> float:
        """Payload bytes that this rank sent a step, mean of the recorded ones."""
        return sum(m.sent_bytes for messages, _ in self._steps.values() for m in messages) / max(
            1, len(self._steps)
        )

    @property
    def messages_a_step(self) -> float:
        """Collectives and messages that this rank took part in a step, mean of the recorded ones."""
        return sum(len(messages) for messages, _ in self._steps.values()) / max(1, len(self._steps))

    def __contains__(self, step: int) -> bool:
        return self._first <= step <= self._last

    def busiest_step(self, clock_offset: float) -> dict[str, Any] | None:
        """Return sections and messages of the last recorded step with the most bytes, the same one on every rank, in seconds of
        perf_counter less ``clock_offset``; None where no step was recorded."""
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
