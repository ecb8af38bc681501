"""Record what this rank sends in a step, and when: each collective and message.

The engine wraps each step in ``Timeline.around`` and passes on the step's times with ``took``.
rank_stats.py writes them to timeline.json, and lab/report/timeline.py draws them. Every call to
torch.distributed, by our strategies, by DistributedDataParallel or by its hooks, passes through
torch's dispatcher, where ``MessageRecorder`` sees it. Recording slows a step slightly, so only the
last steps of a run are recorded, and their times are left out of the medians.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.distributed.node_identity import node_numbers
from common.profiling.records import RankTimeline, Scope, SentMessage
from common.profiling.step_timer import Moment, RawSpans, StepTimer, now
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


_OPEN: Any = None  # the end of a message until it has ended


class MessageRecorder(TorchDispatchMode):
    """Context manager that records this thread's torch.distributed calls in ``messages``.

    A collective ends when its future does. A point-to-point message, and Gloo's reduce_scatter,
    end when the strategy has waited for them and computes again.

    Parameters
    ----------
    gpu_clock : returns a moment of the GPU's current stream, if calls only queue their work there
        (NCCL); None: the messages' times are those of ``time.perf_counter`` (Gloo).
    nodes : the number of each rank's node, to tell which messages stay inside one; () if unknown.

    Under NCCL a call and its future return before the message is sent. But the future's callback
    runs on a stream that waits for the message, so a moment of that stream is the message's end.
    NCCL merges the calls of a ``batch_isend_irecv`` and returns no work for them. They end when the
    step computes again, or when the next batch starts: a batch has at most one send and one
    receive, so a second message of the same kind belongs to the next batch.
    """

    def __init__(
        self,
        gpu_clock: Callable[[], Moment] | None = None,
        messages: list[SentMessage] | None = None,
        nodes: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._nodes = nodes if 1 < len(set(nodes)) < len(nodes) else ()
        self._now = gpu_clock or time.perf_counter
        self._queues = gpu_clock is not None
        self.messages = [] if messages is None else messages
        self._open: list[tuple[SentMessage, Any]] = []  # without a future

    def for_thread(self) -> "MessageRecorder":
        """Return a context for another thread, which records its calls in the same ``messages``.

        Use it only while this recorder is entered: torch shares some mode flags between threads.
        """
        return MessageRecorder(self._now if self._queues else None, self.messages, self._nodes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run the call; record it if it is one of torch.distributed."""
        kind = _KINDS.get(func._schema.name)
        if self._open:
            self._close_completed(kind)
        if kind is None:
            return func(*args, **(kwargs or {}))
        group = _group(args)
        size, sent = _bytes(kind, args, group)
        scope = self._scope(kind, args, group)
        message = SentMessage(kind, size, sent, begin=self._now(), end=_OPEN, scope=scope)
        self.messages.append(message)
        result = func(*args, **(kwargs or {}))
        work = _work(result)
        if work is None or (kind in _WITHOUT_FUTURE and not self._queues):
            # Gloo's reduce_scatter never says that it has completed; its caller has waited for it.
            self._open.append((message, None if kind == "reduce_scatter" else work))
        else:
            work.get_future().add_done_callback(
                lambda _future: setattr(message, "end", self._now())
            )
        return result

    def _scope(self, kind: str, args: tuple, group: dist.ProcessGroup | None) -> Scope:
        """Return whether all ranks that a message is among share a node."""
        if not self._nodes:
            return ""
        ranks = dist.get_process_group_ranks(group)
        if kind in _POINT_TO_POINT:
            ranks = [dist.get_rank(), ranks[_first_number(args)]]
        return "inside" if len({self._nodes[rank] for rank in ranks}) == 1 else "between"

    def _close_completed(self, next_kind: str | None) -> None:
        """End the open messages that have ended before the next call; None: it computes."""
        moment = self._now()
        kinds = [message.kind for message, _ in self._open]
        same_batch = next_kind in _POINT_TO_POINT and next_kind not in kinds
        for message, work in self._open:
            if work.is_completed() if work is not None else not same_batch:
                message.end = moment
        self._open = [(message, work) for message, work in self._open if message.end is _OPEN]

    def finish(self) -> None:
        """End the messages still open: the step is over."""
        for message in self.messages:
            if message.end is _OPEN:
                message.end = self._now()


def _work(result: Any) -> Any:
    """Return the work that a call has returned; None for one that NCCL joins with others."""
    boxed = result[-1] if isinstance(result, tuple | list) else result
    return None if boxed is None else torch._C._distributed_c10d.Work.unbox(boxed)


def _group(args: tuple) -> dist.ProcessGroup | None:
    """Return the group of a call, its first argument that is an object of torch's C++ code."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    return None


def _first_number(args: tuple) -> int:
    """Return the root of a collective, or the partner of a message, as a rank of its group."""
    return next((argument for argument in args if type(argument) is int), 0)


def _bytes(kind: str, args: tuple, group: dist.ProcessGroup | None) -> tuple[int, float]:
    """Return the bytes of this rank's tensors and the payload bytes that it sends."""
    own = tree_leaves(args[_OWN_PART.get(kind, 0)])
    size = sum(leaf.nbytes for leaf in own if isinstance(leaf, Tensor))
    if kind == "send":
        return size, float(size)
    if kind == "recv":
        return size, 0.0
    if kind == "reduce_scatter" and dist.get_backend(group) == dist.Backend.GLOO:
        kind = "all_reduce"  # which Gloo runs in its place
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    sent = sent_bytes(kind, size, rank=rank, ranks=ranks, root=_first_number(args))
    return size, float(sent)


def _host_seconds(moment: Any, timer: StepTimer) -> float:
    """Return a moment, which may be one of a GPU's stream, in seconds of the host's clock."""
    return moment if isinstance(moment, float) else timer.host_seconds(moment)


class Timeline:
    """Records the steps ``first`` to ``last`` of a training on this rank.

    ``nodes`` : the ranks of each node, if known.
    """

    def __init__(self, first: int, last: int, nodes: Sequence[Sequence[int]] = ()) -> None:
        self.to_record = range(first, last + 1)
        self._nodes = node_numbers(nodes)
        self.steps: dict[int, RankTimeline] = {}  # the recorded ones, on this rank's clock
        self._recorder: MessageRecorder | None = None

    def around(self, step: int) -> AbstractContextManager:
        """Return the context of a whole step: a recorder, if the step is to be recorded."""
        self._recorder = None
        if step not in self.to_record:
            return nullcontext()
        gpu_clock = None
        if dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL:
            gpu_clock = partial(now, torch.device("cuda"))
        self._recorder = MessageRecorder(gpu_clock, nodes=self._nodes)
        return self._recorder

    def for_thread(self) -> AbstractContextManager:
        """Return the context of a thread that sends during a step."""
        return nullcontext() if self._recorder is None else self._recorder.for_thread()

    def took(self, step: int, timer: StepTimer, times: RawSpans) -> None:
        """Keep a recorded step's messages and sections; ``times`` is what ``timer.take`` returned.

        Waits for the GPU, if the step is recorded.
        """
        if self._recorder is None:
            return
        self._recorder.finish()
        for message in self._recorder.messages:
            message.begin = _host_seconds(message.begin, timer)
            message.end = _host_seconds(message.end, timer)
        self.steps[step] = RankTimeline(
            rank=dist.get_rank() if dist.is_initialized() else 0,
            sections=timer.spans(times),
            messages=self._recorder.messages,
        )

    def sent_a_step(self) -> tuple[float, float]:
        """Return the payload bytes and the messages that this rank sent in a step.

        Means over the recorded steps; a collective is one message.
        """
        sent = [message.sent_bytes for step in self.steps.values() for message in step.messages]
        steps = max(1, len(self.steps))
        return sum(sent) / steps, len(sent) / steps

    @property
    def busiest_step(self) -> int:
        """The recorded step with the most bytes; 0 if none was recorded.

        If several steps tie, it is the last one, so that every rank chooses the same.
        """
        return max(
            self.steps,
            key=lambda step: (sum(message.bytes for message in self.steps[step].messages), step),
            default=0,
        )
