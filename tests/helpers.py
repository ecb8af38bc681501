"""Real ranks for tests: ``run_ranks`` calls a function in a Gloo group, ``start_part`` starts an entry point as a user does.

Ranks of ``run_ranks`` are forked from a server process that has imported torch once, so that a group costs a fraction of
a second. Every wait has a limit.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CIFAR = ROOT / "data"

needs_cifar10 = pytest.mark.skipif(
    not (CIFAR / "cifar-10-batches-py" / "test_batch").exists(), reason="the real CIFAR-10 is not in data/")
needs_cifar100 = pytest.mark.skipif(
    not (CIFAR / "cifar-100-python" / "test").exists(), reason="the real CIFAR-100 is not in data/")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "common.training", "common.evaluation", "tests.helpers"])


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


def _rank_main(rank: int, size: int, store: str, timeout_seconds: float, function: Callable[..., Any],
               arguments: Sequence[Any], results: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size,
                                timeout=timedelta(seconds=timeout_seconds))
        try:
            result = function(rank, *arguments)
        finally:
            dist.destroy_process_group()
        results.put((rank, None, result))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 120) -> list[Any]:
    """Call ``function(rank, *arguments)`` on ``size`` ranks of a Gloo group; return the results by rank.

    ``function``, arguments and results must be picklable (a module's function, numpy arrays, plain values). Raises
    RankError with the traceback of the first rank that failed.
    """
    results = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_context.Process(target=_rank_main, args=(rank, size, f"{folder}/store", timeout_seconds, function,
                                                           arguments, results), daemon=True) for rank in range(size)]
        for process in ranks:
            process.start()
        try:
            found: dict[int, Any] = {}
            deadline = time.monotonic() + timeout_seconds
            while len(found) < size:
                rank, error, result = results.get(timeout=max(0.1, deadline - time.monotonic()))
                if error is not None:
                    raise RankError(f"rank {rank} of {size}:\n{error}")
                found[rank] = result
            return [found[rank] for rank in range(size)]
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def free_port() -> int:
    """A TCP port of loopback on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Ended:
    """What a process left: exit status, output, errors, and seconds from start to end."""

    status: int
    out: str
    err: str
    seconds: float


_started: "list[Started]" = []


def kill_started() -> None:
    """End every entry point that a test has left running."""
    while _started:
        _started.pop().kill()


class Started:
    """A running entry point; ``end`` waits for it with a limit and returns what it left."""

    def __init__(self, command: Sequence[str], *, cwd: Path, env: dict[str, str]) -> None:
        self._began = time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = Path(self._folder.name, "out"), Path(self._folder.name, "err")
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=env,
                                            start_new_session=True)

        _started.append(self)

    def kill(self) -> None:
        """End it, and all that it has started in its session, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def read_out(self) -> str:
        """What it has printed so far."""
        return self._out.read_text()

    def wait_for(self, text: str, *, timeout_seconds: float = 60) -> None:
        """Return once ``text`` stands in the output; AssertionError if it ends or the time passes before."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self.read_out():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.read_out()}\n{self._err.read_text()}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_seconds} s:\n{self.read_out()}"
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.process.send_signal(number)

    def end(self, *, timeout_seconds: float = 120) -> Ended:
        """Wait for the end; AssertionError, and a kill of its process group, if it takes longer."""
        try:
            status = self.process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_seconds} s:\n{self.read_out()}\n"
                                 f"{self._err.read_text()}") from None
        return Ended(status, self._out.read_text(), self._err.read_text(), time.monotonic() - self._began)


def start_part(part: str, *arguments: object, cwd: Path, env: dict[str, str] | None = None) -> Started:
    """Start ``PartX/main.py`` with these arguments from the folder ``cwd``, outside any torchrun environment."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return Started([sys.executable, str(ROOT / part / "main.py"), *map(str, arguments)], cwd=cwd,
                   env=clean | (env or {}))


def start_ranks(part: str, size: int, *arguments: object, cwd: Path, port: int | None = None,
                env: dict[str, str] | None = None) -> list[Started]:
    """Start ``size`` ranks of a part on loopback as the assignment does, one thread each."""
    port = port or free_port()
    return [start_part(part, *arguments, "--master-ip", "127.0.0.1", "--master-port", port, "--num-nodes", size,
                       "--rank", rank, "--threads", 1, cwd=cwd, env=env) for rank in range(size)]


def run_part(part: str, *arguments: object, cwd: Path, ranks: int = 0, timeout_seconds: float = 120,
             env: dict[str, str] | None = None) -> list[Ended]:
    """Run a part to its end, on ``ranks`` ranks (0: one process without flags for the group); one result a process."""
    started = (start_ranks(part, ranks, *arguments, cwd=cwd, env=env) if ranks
               else [start_part(part, *arguments, cwd=cwd, env=env)])
    return [one.end(timeout_seconds=timeout_seconds) for one in started]


def only_run_folder(output_dir: Path, way: str) -> Path:
    """The folder of the one run under ``output_dir/way``."""
    folders = sorted((output_dir / way).iterdir())
    assert len(folders) == 1, folders
    return folders[0]


def make_image_folder(root: Path, *, train_per_class: int = 12, test_per_class: int = 4, seed: int = 0) -> Path:
    """Write PNG images of two classes in the layout of ``--dataset folder`` and return ``root``."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(seed)
    for split, count in (("train", train_per_class), ("test", test_per_class)):
        for label, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 128, (32, 32, 3)) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index:03}.png")
    return root
