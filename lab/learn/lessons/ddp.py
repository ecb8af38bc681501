"""Lesson 11: torch's DDP, watched from outside: what it wraps, when it sends, what it trains."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.optim import optimizer as optimizer_hooks

from common.distributed.collectives import gather_states
from common.distributed.process_group import current_world
from common.models import build_model
from common.utils.gradient_fit import EXACT
from lab.learn.causes import told
from lab.learn.program import flat_gradients
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile, shown

# Ranks, and micro-batches of a step.
SIZES = ((2, 4), (4, 2))
_Batch = tuple[Tensor, Tensor]


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 11; return the messages of VGG-11's step under DDP."""
    for size, micro_batches in SIZES:
        ranks = student.on_ranks(size, _train_watched, micro_batches, limit_seconds=90)
        where = f"on {size} ranks, with MICRO_BATCHES = {micro_batches}"
        problem = _wrong_training(ranks) or _wrong_checkpoint(ranks)
        if problem:
            raise Mistake(f"{where}, {problem}")
        say(
            f"{where}, DDP sends with the last micro-batch of each step alone, the weights are "
            "those of one process on the whole batches, and it can load the checkpoint"
        )
    [buckets] = student.on_ranks(1, _buckets_of_vgg11, limit_seconds=90)
    sizes = ", ".join(f"{nbytes / 1e6:.1f}" for nbytes in buckets)
    say(f"DDP's buckets for VGG-11, in the order in which they leave: {sizes} MB")
    return len(buckets)


class DdpTraining(NamedTuple):
    """What a rank's training did.

    wrapped : how many times DDP was built.
    micro_batches : of a step.
    messages : DDP's messages with each micro-batch's backward.
    gradient, end : what the first update got, and the weights at the end.
    one_process : the same two of one process on the whole batches.
    names : in the file that this rank wrote; None if it wrote none.
    saved : the weights in that file.
    own_names : those of the network without DDP.
    """

    wrapped: int
    micro_batches: int
    messages: list[int]
    gradient: NDArray
    end: NDArray
    one_process: tuple[NDArray, NDArray]
    names: list[str] | None
    saved: NDArray | None
    own_names: list[str]


def _wrong_training(ranks: Sequence[DdpTraining]) -> str | None:
    """Say what is wrong with what DDP sent and what the ranks trained; None if nothing is."""
    if not all(rank.wrapped for rank in ranks):
        return told(
            "group-unused",
            "the model is in no DistributedDataParallel",
            "no message was sent by DDP",
            "Wrap it: model = DistributedDataParallel(build_model()).",
        )
    sent = ranks[0].messages
    last = sent[ranks[0].micro_batches - 1 :: ranks[0].micro_batches]
    early = sum(sent) - sum(last)
    if not any(last):
        return told(
            "own-gradient",
            "DDP never sends",
            f"0 messages in {len(last)} steps",
            "The last micro-batch of a step needs the model's forward outside no_sync().",
        )
    if early:
        return told(
            "needless-communication",
            "DDP sends before the last micro-batch of a step",
            f"{early} messages come too early, {sum(last)} with the last micro-batches",
            "Only the last one of a step must: use model.no_sync() for the others.",
        )
    for rank in ranks[1:]:
        if _apart(rank.end, ranks[0].end) > EXACT:
            evidence = f"at the end by {_apart(rank.end, ranks[0].end):.1e} of their norm"
            return told("weights-diverge", "the ranks' weights differ", evidence)
    return _unlike_one_process(ranks[0])


def _unlike_one_process(rank: DdpTraining) -> str | None:
    """Say how the training differs from that of one process on the whole batches."""
    gradient, end = rank.one_process
    if _apart(rank.gradient, gradient) > EXACT:
        times = float(rank.gradient @ gradient / (gradient @ gradient))
        return (
            f"the first step's gradient is {times:.3g} times that of one process on the whole "
            "batch. backward() adds up the gradients of a step's micro-batches, and the step needs "
            "their mean: divide each loss by MICRO_BATCHES"
        )
    if _apart(rank.end, end) > EXACT:
        return (
            f"the weights end {_apart(rank.end, end):.1e} of their norm away from one process's: "
            "is each step's gradient forgotten before the next one?"
        )
    return None


def _wrong_checkpoint(ranks: Sequence[DdpTraining]) -> str | None:
    """Say what is wrong with the checkpoint; None if nothing is."""
    writers = [number for number, rank in enumerate(ranks) if rank.names is not None]
    if len(writers) != 1:
        return (
            f"{len(writers)} ranks write the checkpoint: one must, since all hold the same weights"
        )
    writer = ranks[writers[0]]
    if writer.names != writer.own_names:
        return (
            f"the checkpoint's names are {shown(writer.names)}, and build_model() has "
            f"{shown(writer.own_names)}: the network itself is in DDP's attribute `module`"
        )
    if writer.saved is None or not np.array_equal(writer.saved, writer.end):
        return "the checkpoint holds other weights than the trained ones"
    return None


def _train_watched(student: Namespace, micro_batches: int) -> DdpTraining:
    """Train for an epoch and save, and record what DDP did; then train as one process does."""
    student["train"].__globals__["MICRO_BATCHES"] = micro_batches
    messages: list[int] = []
    batches: list[_Batch] = []
    starts: list[NDArray] = []
    gradients: list[NDArray] = []

    def before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        [group] = optimizer.param_groups
        used = [parameter.grad for parameter in group["params"]]
        gradients.append(_flat(gradient for gradient in used if gradient is not None))

    hook = optimizer_hooks.register_optimizer_step_pre_hook(before_update)
    with _ddp_watched(messages, starts), _batches_noted(batches, messages):
        _, model = student["train"](1)
    hook.remove()
    if not gradients:
        raise Mistake("optimizer.step() is never called")
    own = student["build_model"]()
    names, saved = _saved(student, model)
    end = _flat(model.parameters())
    start = starts[0] if starts else end
    return DdpTraining(
        wrapped=len(starts),
        micro_batches=micro_batches,
        messages=messages,
        gradient=gradients[0],
        end=end,
        one_process=_one_process(own, start, batches, micro_batches, student["LEARNING_RATE"]),
        names=names,
        saved=saved,
        own_names=list(own.state_dict()),
    )


@contextmanager
def _ddp_watched(messages: list[int], starts: list[NDArray]) -> Iterator[None]:
    """Count the messages of each DDP that is built, and keep the weights that it begins with."""
    build = DistributedDataParallel.__init__

    def send(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if messages:
            messages[-1] += 1
        return _mean(bucket)

    def noted(self: DistributedDataParallel, *given: Any, **options: Any) -> None:
        build(self, *given, **options)
        self.register_comm_hook(None, send)
        starts.append(_flat(self.parameters()))

    with patch.object(DistributedDataParallel, "__init__", noted):
        yield


@contextmanager
def _batches_noted(batches: list[_Batch], messages: list[int]) -> Iterator[None]:
    """Keep each micro-batch, and begin to count its messages."""
    images: list[Tensor] = []
    forward = nn.Sequential.forward
    loss = nn.functional.cross_entropy

    def noted_forward(self: nn.Sequential, given: Tensor) -> Tensor:
        images.append(given)
        return forward(self, given)

    def noted_loss(outputs: Tensor, labels: Tensor, *given: Any, **options: Any) -> Tensor:
        batches.append((images[-1], labels))
        messages.append(0)
        return loss(outputs, labels, *given, **options)

    with (
        patch.object(nn.Sequential, "forward", noted_forward),
        patch.object(nn.functional, "cross_entropy", noted_loss),
    ):
        yield


def _saved(student: Namespace, model: nn.Module) -> tuple[list[str] | None, NDArray | None]:
    """Return the names and the weights that the student's ``save`` writes; None without a file."""
    written: list[Any] = []

    def noted_save(content: Any, *_: Any, **__: Any) -> None:
        written.append(content)

    with patch.object(torch, "save", noted_save):
        student["save"](model, "weights.pt")
    if not written:
        return None, None
    state = written[-1]
    if not isinstance(state, dict):
        raise Mistake(f"the checkpoint is {shown(state)}, not a state_dict")
    return list(state), _flat(state.values())


def _one_process(
    model: nn.Module, start: NDArray, own: Sequence[_Batch], micro_batches: int, rate: float
) -> tuple[NDArray, NDArray]:
    """Return the first gradient and the last weights of one process on whole batches.

    start : the weights to begin with.
    own : this rank's micro-batches. Collective.
    """
    world = current_world(torch.device("cpu"))
    everybody = gather_states(world, {"batches": list(own)})
    nn.utils.vector_to_parameters(torch.tensor(start), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    gradients: list[NDArray] = []
    for begin in range(0, len(own), micro_batches):
        together: list[_Batch] = []
        for rank in everybody:
            together += rank["batches"][begin : begin + micro_batches]
        images, labels = map(torch.cat, zip(*together, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        gradients.append(flat_gradients(model).numpy())
        optimizer.step()
    return gradients[0], _flat(model.parameters())


def _buckets_of_vgg11(_names: Namespace) -> list[int]:
    """Return the bytes of DDP's buckets in VGG-11's second step: after the first it has an order.

    One rank has the buckets of many.
    """
    sent: list[int] = []

    def send(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().nbytes)
        return _mean(bucket)

    model = DistributedDataParallel(build_model("vgg11", num_classes=10))
    model.register_comm_hook(None, send)
    for _ in range(2):
        sent.clear()
        model(torch.randn(4, 3, 32, 32)).sum().backward()
    return sent


def _mean(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks, as DDP does by itself."""
    return allreduce_hook(dist.distributed_c10d._get_default_group(), bucket)


def _flat(tensors: Iterable[Tensor]) -> NDArray:
    return parameters_to_vector(tensors).detach().numpy()


def _apart(found: NDArray, right: NDArray) -> float:
    """Return the norm of the difference over the norm of ``right``."""
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))
