"""Call a function on real Gloo ranks on this machine and return their results.

The ranks are forked from a server process that has imported torch once, so a group of two starts
within a fraction of a second. Every wait has a limit. Functions and results go through pipes to
these processes alone; only this user can open the folder in which they meet (mode 0700).
"""

import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from queue import Empty
from typing import Any

import cloudpickle

from common.utils.paths import REPOSITORY
from common.utils.processes import how_ended
from common.utils.system import batch_scheduling, usable_cores

PRELOADED = [
    "torch",
    "torch._dynamo",
    "common.training",
    "common.evaluation",
    "lab.proofs.equivalence",
]
"""What the server imports before it forks the first rank; callers may add more before that."""

_method = "forkserver"
_LOOK_SECONDS = 1.0


def context() -> Any:
    """Return the multiprocessing context for ranks; the first call starts its server."""
    found = multiprocessing.get_context(_method)
    if _method == "forkserver":
        _start_server(found)
    return found


@functools.cache
def _start_server(of_context: Any) -> None:
    """Start the server that imports the modules of PRELOADED and forks the ranks."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when the server imports torch
    of_context.set_forkserver_preload(PRELOADED)
    # Until Python 3.12 the server does not get this process's sys.path: it finds modules in its
    # current folder, and skips those that it does not find.
    with contextlib.chdir(REPOSITORY):
        forkserver.ensure_running()


def fork_from_this_process() -> None:
    """Fork later ranks from this process, so that they inherit what has changed here."""
    global _method
    _method = "fork"


class RankError(AssertionError):
    """A rank raised (the message holds its traceback) or gave no answer in time."""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = 120,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``function(rank, *arguments)`` on each of ``size`` ranks; return the results by rank.

    Function and arguments are sent with cloudpickle (so closures and a notebook's classes work),
    results with pickle. Each rank computes with one thread. With ``backend`` "nccl" ranks may share
    a GPU: NCCL takes them for ranks of different hosts.

    Raises RankError if a rank fails, with the first traceback, or if ``timeout_seconds`` pass.
    """
    payload = cloudpickle.dumps((function, arguments))
    maker = context()
    results = maker.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            maker.Process(
                target=_rank_main,
                daemon=True,
                args=(rank, size, f"{folder}/store", timeout_seconds, backend, payload, results),
            )
            for rank in range(size)
        ]
        with _without_main():
            for process in ranks:
                process.start()
        try:
            found = _collect(results, ranks, timeout_seconds)
            for process in ranks:
                process.join(timeout=5)
            return found
        finally:
            for process in ranks:
                process.kill()
                process.join()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep new processes from running the caller's script again, as multiprocessing does.

    The script then needs no ``__main__`` guard.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _collect(results: Any, ranks: Sequence[Any], timeout_seconds: float) -> list[Any]:
    """Return the ranks' results, by rank.

    Raises RankError with the first error that arrives, or if a rank ends or is late without answer.
    """
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(found) < len(ranks):
        ended = [
            rank
            for rank, process in enumerate(ranks)
            if rank not in found and process.exitcode is not None
        ]
        try:
            rank, error, result = results.get(timeout=_LOOK_SECONDS)
        except Empty:
            if ended:
                how = how_ended(ranks[ended[0]].exitcode)
                raise RankError(
                    f"rank {ended[0]} of {len(ranks)} {how} and gave no answer"
                ) from None
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(len(ranks)) if rank not in found)
                raise RankError(
                    f"no answer within {timeout_seconds:g} s from rank {missing} of {len(ranks)}"
                ) from None
            continue
        if error is not None:
            raise RankError(f"rank {rank} of {len(ranks)}:\n{error}")
        found[rank] = result
    return [found[rank] for rank in range(len(ranks))]


def _rank_main(
    rank: int,
    size: int,
    store: str,
    timeout_seconds: float,
    backend: str,
    payload: bytes,
    results: Any,
) -> None:
    """Call the function of ``payload`` in a process group, and put its result or error.

    results : gets (rank, traceback or None, result).
    """
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    answer: tuple[int, str | None, Any]
    try:
        function, arguments = cloudpickle.loads(payload)
        if backend == "nccl":
            os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            torch.cuda.set_device(rank % torch.cuda.device_count())
        with batch_scheduling(size > usable_cores()):
            dist.init_process_group(
                backend,
                store=dist.FileStore(store, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_seconds),
            )
            dist.barrier()  # a rank that finishes at once must not leave while others still connect
            answer = (rank, None, function(rank, *arguments))
    except BaseException:
        answer = (rank, traceback.format_exc(), None)
    # Send the answer before closing the connections, so that the first failure arrives before the
    # failures that it causes on other ranks.
    results.put(answer)
    results.close()
    results.join_thread()
    if dist.is_initialized():
        dist.destroy_process_group()
