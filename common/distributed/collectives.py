"""Collectives other than gradient sync: compare settings, run an action, gather and send values.

Every rank calls them, and each raises its UserError on all ranks. An error of one rank anywhere
else reaches the others by failures.py. Ranks send each other JSON, which is read through a schema,
and tensors, which are read as a checkpoint is: no code of a message runs. Whatever a rank sends,
the receivers' only error is one GroupError that names that rank.
"""

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from common.checkpoint import load_checkpoint, read_saved
from common.distributed.process_group import World
from common.errors import GroupError, UserError, explain, first_line, reason_of
from common.say import ranks_text
from common.utils.atomic_files import read_regular
from common.utils.grouping import grouped
from common.utils.hashing import digest
from common.utils.processes import in_thread
from common.utils.typed_json import decode, encode

T = TypeVar("T")
MOST_BYTES = 16 * 2**20
"""The longest message of plain values; the project's own are below 1 MiB."""
_FIRST_PAUSE_SECONDS = 0.02

# torch 2.14 warns of the older names, torch 2.11 does not know the newer ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def check_same_on_all_ranks(world: World, facts: Mapping[str, Any], *, what: str) -> None:
    """Raise UserError naming each fact that differs between ranks, with its values and their ranks.

    If all are the same, it sends one all_reduce of 64 bytes, whatever the number of ranks.
    ``facts`` are plain values by name, e.g. settings or tensor shapes.
    """
    if world.size == 1:
        return
    facts_bytes = json.dumps(facts, sort_keys=True, default=str).encode()
    mine = bytearray(hashlib.sha256(facts_bytes).digest())
    # (4,) int64. The largest of all complements is the complement of the smallest.
    words = torch.frombuffer(mine, dtype=torch.int64).to(world.device)
    largest = torch.stack([words, ~words])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if torch.equal(largest[0], ~largest[1]):  # every rank decides the same
        return
    # The JSON tells 1 from "1"; the text is for the message.
    texts = {
        name: (json.dumps(value, sort_keys=True, default=str), str(value))
        for name, value in facts.items()
    }
    all_facts = gather_objects(world, texts, schema=dict[str, tuple[str, str]])
    names = dict.fromkeys(chain.from_iterable(all_facts))
    lines = []
    for name in names:
        values = [of_rank.get(name, ("", "absent")) for of_rank in all_facts]
        if len(set(values)) > 1:
            lines.append(f"{name}: {_values_text([text for _, text in values])}")
    if len(lines) > 5:
        lines[5:] = [f"and {len(lines) - 5} more"]
    raise UserError(
        f"the ranks differ in {what}. {'; '.join(lines)}. Start every rank with the same command "
        "except --rank, with the same code and data"
    )


def _values_text(values: Sequence[str]) -> str:
    """Return each value with the ranks that have it, e.g. "0.1 on rank 0, 0.2 on ranks 1 and 2"."""
    owners = grouped((value, rank) for rank, value in enumerate(values))
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in owners.items())


def run_on_all_ranks(world: World, action: Callable[[], T], *, patient: bool = False) -> T:
    """Run ``action`` on every rank; if one raises UserError or OSError, raise UserError on all.

    With ``patient`` the action, e.g. a download, may take longer than the group's timeout; a lost
    rank is still noticed within that timeout.
    """
    if patient and world.size > 1:
        action = _done_on_all(world, action)
    mine = ""
    try:
        result = action()
    except (UserError, OSError) as error:
        mine = explain(error) or reason_of(error)
    messages = gather_objects(world, mine, schema=str)
    if mine:
        raise UserError(mine)
    for rank, message in enumerate(messages):
        if message:
            raise UserError(f"rank {rank} stopped: {message}")
    return result


def _done_on_all(world: World, action: Callable[[], T]) -> Callable[[], T]:
    """Run ``action`` in a thread until it has ended on every rank.

    Return a function that gives its result or raises its error. Meanwhile the ranks exchange a
    message every second, so that a lost rank is noticed within the group's timeout.
    """
    outcome = in_thread(action)
    pause = _FIRST_PAUSE_SECONDS
    while True:
        wait([outcome], timeout=pause)
        working = torch.tensor([int(not outcome.done())], device=world.device)
        dist.all_reduce(working)
        if not int(working):
            return outcome.result
        pause = min(2 * pause, 1.0)


def run_on_rank0(world: World, action: Callable[[], str]) -> str:
    """Run ``action`` on rank 0 alone and return its result, or raise its error, on every rank."""
    mine = run_on_all_ranks(world, lambda: action() if world.is_rank0 else "")
    return gather_objects(world, mine, schema=str)[0]


def broadcast_checkpoint(world: World, path: str | Path, *, source: int = 0) -> dict[str, Any]:
    """Return a checkpoint's entries on every rank; only rank ``source`` needs the file.

    Raises GroupError if the file is larger than this machine's free memory.
    """

    def read() -> bytes:
        if world.rank != source:
            return b""
        load_checkpoint(Path(path))  # a damaged file is an error before it is sent
        return read_regular(Path(path))

    content = run_on_all_ranks(world, read)
    if world.size > 1:
        content = _broadcast_bytes(world, content, source=source)
    return load_checkpoint(content, name=str(path))


def _broadcast_bytes(world: World, content: bytes, *, source: int) -> bytes:
    """Return the bytes of rank ``source``: a message with their number, then the bytes."""
    number = torch.tensor([len(content)], device=world.device)
    dist.broadcast(number, source)
    nbytes = int(number)
    free = psutil.virtual_memory().available
    if not 0 <= nbytes <= free:
        raise GroupError(
            f"rank {source} sends a checkpoint of {nbytes:,} bytes, but this machine has "
            f"{free:,} bytes of free memory: start fewer ranks on it, or free memory"
        )
    if world.rank == source:
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(world.device)
        dist.broadcast(sent, source)
        return content
    received = torch.empty(nbytes, dtype=torch.uint8, device=world.device)
    dist.broadcast(received, source)
    return received.cpu().numpy().tobytes()


def start_all_reduce(
    world: World, numbers: list[Any], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Callable[[], list[Any]]:
    """Start an all_reduce of a list, or of nested lists, of numbers. Collective.

    Returns the function that waits for the result and returns it in float64.
    """
    if world.size == 1:
        return lambda: numbers
    tensor = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    work = dist.all_reduce(tensor, op=op, async_op=True)

    def result() -> list[Any]:
        work.wait()
        return tensor.tolist()

    return result


def gather_objects(world: World, mine: T, *, schema: type[T]) -> list[T]:
    """Return every rank's value, by rank, as a ``schema``; a collective call.

    mine : a plain value or dataclass that is small as JSON. JSON has no NaN and no infinity: both
        arrive as None. Where they matter, send a tensor with ``gather_tensors``.

    Raises GroupError naming the rank whose message is too long or does not fit ``schema``.
    """
    if world.size == 1:
        return [mine]
    return _gather(
        world,
        encode(mine),
        most_bytes=MOST_BYTES,
        read=lambda content: decode(content, schema, name=""),
    )


def gather_states(world: World, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every rank's state, by rank, with tensors on the CPU; a collective call.

    mine : tensors and plain values in nested dicts and lists, e.g. the residuals of a strategy. The
        ranks' states are of about the same size.

    Raises GroupError naming the rank whose state is too large or cannot be read.
    """
    if world.size == 1:
        return [dict(mine)]
    buffer = io.BytesIO()
    torch.save(dict(mine), buffer)
    content = buffer.getvalue()
    return _gather(world, content, most_bytes=2 * len(content) + MOST_BYTES, read=_read_state)


def _read_state(content: bytes) -> dict[str, Any]:
    state = read_saved(content)
    if not isinstance(state, dict):
        raise ValueError(f"it is no state, but a {type(state).__name__}")
    return state


def gather_tensors(world: World, mine: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return every rank's tensors, by rank, on the CPU; a collective call.

    Raises GroupError unless all ranks send the same names, types and shapes; last dimensions may
    differ.
    """
    states = gather_states(world, mine)
    for rank, state in enumerate(states):
        if _forms(state) != _forms(mine):
            what = f": expected {_forms(mine)!r:.200}, got {_forms(state)!r:.200}"
            raise _broken_message(rank, what)
    return states


def _forms(state: Mapping[str, Any]) -> dict[str, str]:
    """Return each tensor's type and shape without the last size, e.g. "torch.int64 (3, *)"."""
    forms = {}
    for name, value in state.items():
        forms[name] = type(value).__name__
        if isinstance(value, Tensor):
            sizes = [str(size) for size in value.shape]
            if sizes:
                sizes[-1] = "*"
            forms[name] = f"{value.dtype} ({', '.join(sizes)})"
    return forms


def _gather(world: World, mine: bytes, *, most_bytes: int, read: Callable[[bytes], T]) -> list[T]:
    """Return what ``read`` makes of every rank's message, in the order of the ranks.

    One all_gather of the lengths, and one of the bytes. Raises GroupError naming a rank whose
    message is empty, longer than ``most_bytes``, or cannot be read.
    """
    numbers = torch.empty(world.size, dtype=torch.int64, device=world.device)
    all_gather_single(numbers, torch.tensor([len(mine)], device=world.device))
    lengths = numbers.tolist()
    for rank, nbytes in enumerate(lengths):
        if not 0 < nbytes <= most_bytes:
            raise _broken_message(rank, f" has {nbytes:,} bytes; 1 to {most_bytes:,} are allowed")
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    rows = torch.empty(world.size * len(padded), dtype=torch.uint8, device=world.device)
    all_gather_single(rows, padded.to(world.device))
    found = []
    for rank, row in enumerate(rows.cpu().view(world.size, len(padded))):
        try:
            found.append(read(row[: lengths[rank]].numpy().tobytes()))
        except Exception as error:  # torch raises anything for damaged or hostile bytes
            raise _broken_message(rank, f": {first_line(error).lstrip(': ')}") from error
    return found


def _broken_message(rank: int, what: str) -> GroupError:
    """Return the error for a message of ``rank``; ``what`` follows "rank 1's message"."""
    return GroupError(
        f"rank {rank}'s message{what}. Start every rank with the same version of this project. If "
        f"all have it, another program may have joined as rank {rank}"
    )


def warn_of_equal_batches(world: World, inputs: Any, labels: Any) -> None:
    """Warn if all ranks load the same samples: the most common mistake is a missing sampler.

    inputs, labels : a rank's first batch, nested tensors; labels that are no tensor do not tell.
    """
    if world.size == 1:
        return
    varied = False  # else equal labels may be a coincidence
    if isinstance(labels, Tensor):
        varied = labels.numel() >= 8 and len(labels.unique()) > 1
    mine = (digest(inputs), digest(labels), varied)
    all_ranks = gather_objects(world, mine, schema=tuple[str, str, bool])
    if isinstance(labels, Tensor) and not labels.numel():
        return
    inputs_of, labels_of, varied_of = zip(*all_ranks, strict=True)
    same_inputs = len(set(inputs_of)) == 1
    same_labels = len(set(labels_of)) == 1 and all(varied_of)
    if same_inputs or same_labels:
        warnings.warn(
            "all ranks train on the same samples: their first batches are equal. Give each rank "
            "its own share, e.g. with torch.utils.data.DistributedSampler",
            stacklevel=5,
        )
