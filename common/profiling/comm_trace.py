"""Record what this rank sends in a step, and when: each collective and message.

The engine wraps each step in ``Timeline.around`` and passes on the step's times with ``took``.
rank_stats.py writes them to timeline.json, and lab/report/timeline.py draws them. Every call to
torch.distributed, by our strategies, by DistributedDataParallel or by its hooks, passes through
torch's dispatcher, where ``MessageRecorder`` sees it. Recording slows a step slightly, so only the
last steps of a run are recorded, and their times are left out of the medians.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.profiling.device_clock import Moment, now
from common.profiling.step_timer import RawSpans, StepTimer
from common.sync.message_cost import sent_bytes

_KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_": "reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::send": "send",
    "c10d::recv_": "recv",
}
_POINT_TO_POINT = ("send", "recv")
_WITHOUT_FUTURE = (*_POINT_TO_POINT, "reduce_scatter")  # of Gloo's works
# The argument with the tensor that this rank passes in; else the first.
_OWN_PART = {"all_gather": 1, "gather": 1, "all_to_all": 1, "reduce_scatter": 1}


@dataclass
class Message:
    """One collective or message: bytes of the rank's tensor, bytes that it sends, its times."""

    kind: str
    nbytes: int
    sent_bytes: float
    begin: Moment
    end: Moment = None  # until it has ended


class MessageRecorder(TorchDispatchMode):
    """Context manager that records this thread's torch.distributed calls in ``messages``.

    A collective ends when its future does. A point-to-point message, and Gloo's reduce_scatter,
    end when the strategy has waited for them and computes again.

    Parameters
    ----------
    gpu_clock : returns a moment of the GPU's current stream, if calls only queue their work there
        (NCCL); None: the messages' times are those of ``time.perf_counter`` (Gloo).

    Under NCCL a call and its future return before the message is sent. But the future's callback
    runs on a stream that waits for the message, so a moment of that stream is the message's end.
    NCCL merges the calls of a ``batch_isend_irecv`` and returns no work for them. They end when the
    step computes again, or when the next batch starts: a batch has at most one send and one
    receive, so a second message of the same kind belongs to the next batch.
    """

    def __init__(self, gpu_clock: Callable[[], Moment] | None = None) -> None:
        super().__init__()
        self._now, self._queues = gpu_clock or time.perf_counter, gpu_clock is not None
        self.messages: list[Message] = []
        self._open: list[tuple[Message, Any]] = []  # messages without a future; work may be None

    def for_thread(self) -> "MessageRecorder":
        """Return a context for another thread, which records its calls in the same ``messages``.

        Use it only while this recorder is entered: torch shares some mode flags between threads.
        """
        recorder = MessageRecorder(self._now if self._queues else None)
        recorder.messages = self.messages
        return recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run the call; record it if it is one of torch.distributed."""
        kind = _KINDS.get(func._schema.name)
        if self._open:
            self._close_completed(kind)
        began = self._now() if kind is not None else None
        result = func(*args, **(kwargs or {}))
        if kind is not None:
            self._record(Message(kind, *_bytes(kind, args), began), _work(result))
        return result

    def _record(self, message: Message, work: Any) -> None:
        self.messages.append(message)
        if work is None or (message.kind in _WITHOUT_FUTURE and not self._queues):
            # Gloo's reduce_scatter never says that it has completed; its caller has waited for it.
            self._open.append((message, None if message.kind == "reduce_scatter" else work))
        else:
            work.get_future().add_done_callback(
                lambda _future: setattr(message, "end", self._now())
            )

    def _close_completed(self, next_kind: str | None) -> None:
        """End the open messages that have ended before the next call; None: it computes."""
        moment, kinds = self._now(), [message.kind for message, _ in self._open]
        same_batch = next_kind in _POINT_TO_POINT and next_kind not in kinds
        for message, work in self._open:
            if work.is_completed() if work is not None else not same_batch:
                message.end = moment
        self._open = [entry for entry in self._open if entry[0].end is None]

    def finish(self) -> None:
        """End the messages still open: the step is over."""
        for message in self.messages:
            if message.end is None:
                message.end = self._now()


def _work(result: Any) -> Any:
    """Return the work that a call has returned; None for one that NCCL joins with others."""
    boxed = result[-1] if isinstance(result, tuple | list) else result
    return None if boxed is None else torch._C._distributed_c10d.Work.unbox(boxed)


def _bytes(kind: str, args: tuple) -> tuple[int, float]:
    """Return the bytes of this rank's tensors and the payload bytes that it sends."""
    leaves = tree_leaves(args[_OWN_PART.get(kind, 0)])
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
    if kind in _POINT_TO_POINT:
        return size, float(size) if kind == "send" else 0.0
    root = next((a for a in args if isinstance(a, int) and not isinstance(a, bool)), 0)
    if kind == "reduce_scatter" and dist.get_backend() == dist.Backend.GLOO:
        kind = "all_reduce"  # which Gloo runs in its place
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
        self._recorder = None
        if step in self:
            queues = dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL
            self._recorder = MessageRecorder(partial(now, torch.device("cuda")) if queues else None)
        return self._recorder or nullcontext()

    def for_thread(self) -> AbstractContextManager:
        """Return the context of a thread that sends during a step."""
        return self._recorder.for_thread() if self._recorder is not None else nullcontext()

    def took(self, step: int, timer: StepTimer, times: RawSpans) -> None:
        """Keep a recorded step's messages and sections; ``times`` is what ``timer.take`` returned.

        Waits for the GPU, if the step is recorded.
        """
        if self._recorder is None:
            return
        self._recorder.finish()
        for message in self._recorder.messages:
            message.begin, message.end = (
                moment if isinstance(moment, float) else timer.host_seconds(moment)
                for moment in (message.begin, message.end)
            )
        self._steps[step] = (self._recorder.messages, timer.spans(times))

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
