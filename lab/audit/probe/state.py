"""What the parts of the probe share: settings, the files that it writes, and the events.

``install`` is called once per process; ``part.watch(probe)`` of each part follows when torch has
been imported. A part tells the others what happens with ``probe.tell`` and hears it with
``probe.hear``. The events, with their arguments:

backward_begin (root tensors), backward_end (), communicate (name: a collective begins),
step_begin (optimizer), step_end (optimizer), forward_begin (module), forward (module, arguments,
output), cut (why). "forward" means an outermost call of a module that has parameters, with or
without gradients; ``arguments`` are the positional ones, then the values of the others. Steps are
those of the outermost optimiser. An error in a listener is recorded as ``trouble`` and goes no
further, so that the script goes on; only StopIteration, SystemExit and the like get through.
"""

import atexit
import functools
import importlib
import importlib.util
import json
import linecache
import os
import sys
import threading
import time
import traceback
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Numbers = Callable[["array[float]"], list[int]]
ENVIRONMENT = "LAB_AUDIT"
"""Holds the settings as JSON: folder, script (folder of the user's code), steps, rank (or null),
size (number of ranks, or null), clocks, replay."""
_PARTS = (
    "optimizers.gradients",
    "optimizers.updates",
    "forwards",
    "losses",
    "collectives",
    "data.loaders",
    "stopping",
    "clocks",
    "replay.kept",
)
_PACKAGE = __name__.rpartition(".")[0]


class Probe:
    """Writes the records of one process.

    ``step`` counts the updates that have ended: of the optimiser that has done the most, so that
    the two optimisers of a GAN count one step an iteration. ``cutting`` is True once the script is
    being ended. ``in_backward`` is True within a backward pass. ``gradients``, ``forwards`` and
    ``stopping`` are set by the parts of these names. ``parameter_names`` returns the names that are
    known, by the parameter's id.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.folder = Path(settings["folder"])
        self.script = os.path.realpath(settings["script"])
        self.step, self.cutting = 0, False
        self.in_backward = False
        self.gradients: Any = None
        self.forwards: Any = None
        self.stopping: Any = None
        self.parameter_names: Callable[[], dict[int, str]] = dict
        self._users: dict[str, bool] = {}
        self._troubles: set[str] = set()
        self._listeners: dict[str, list[Callable[..., object]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._open()
        os.register_at_fork(after_in_child=self._after_fork)

    def _open(self) -> None:
        self.pid = os.getpid()
        self._lines = open(self.folder / f"{self.pid}.jsonl", "ab", buffering=0)  # noqa: SIM115
        self._numbers = open(self.folder / f"{self.pid}.f64", "ab", buffering=0)  # noqa: SIM115

    def _after_fork(self) -> None:
        """A child writes files of its own. What the parent had open stays the parent's."""
        parent, self._lock = self.pid, threading.Lock()
        self._open()
        self.write_start(forked_from=parent)

    def write_start(self, *, forked_from: int | None = None) -> None:
        """Write the record ``start``."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        torch = sys.modules.get("torch")
        self.record(
            "start",
            pid=self.pid,
            ppid=os.getppid(),
            argv=getattr(sys, "orig_argv", sys.argv),
            python=sys.version.split()[0],
            torch=str(torch.__version__) if torch is not None else None,
            hint=self.settings.get("rank"),
            variables={name: os.environ[name] for name in names if name in os.environ},
            forked_from=forked_from,
        )

    def end(self) -> None:
        """Write the record ``end``. After the cut end at once: clearing torch takes a second."""
        self.record("end", status=None, after_cut=self.cutting)
        if self.cutting:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def record(self, kind: str, **fields: Any) -> None:
        """Write one record at once."""
        line = json.dumps({"k": kind, "t": time.monotonic(), **fields}, default=str) + "\n"
        with self._lock:
            self._lines.write(line.encode(errors="replace"))

    def numbers(self, values: "array[float]") -> list[int]:
        """Write float64 numbers and return the reference [offset, count] to them."""
        with self._lock:
            offset = os.fstat(self._numbers.fileno()).st_size // 8
            self._numbers.write(values.tobytes())
        return [offset, len(values)]

    def samples(self, parts: Any) -> list[int]:
        """Write the numbers of a list of flat tensors and return the reference to them."""
        from .sampling import join  # it imports torch, which the script has done by now

        return self.numbers(join(parts))

    def guard(self, function: Function) -> Function:
        """Return the function, but an error in it is recorded, and None returned.

        StopIteration gets through: ``stopping`` ends loops with it.
        """

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except StopIteration:
                raise
            except Exception:
                self._note_trouble(traceback.format_exc(limit=-6))
                return None

        return guarded  # type: ignore[return-value]  # it takes and returns the same

    def _note_trouble(self, text: str) -> None:
        """Write the record ``trouble``, once for each text."""
        if text not in self._troubles and len(self._troubles) < 20:
            self._troubles.add(text)
            self.record("trouble", text=text)

    def hear(self, event: str, listener: Callable[..., object]) -> None:
        """Call ``listener`` whenever ``event`` is told."""
        self._listeners[event].append(self.guard(listener))

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the listeners of ``event`` in the order in which they were added."""
        for listener in self._listeners[event]:
            listener(*arguments)

    def place(self, frame: FrameType | None = None) -> list[Any] | None:
        """Return [file, line, text] of the innermost frame of the script's own code, or None."""
        at: FrameType | None = frame or sys._getframe(1)
        while at is not None:
            if self.is_users(at.f_code.co_filename):
                name = os.path.realpath(at.f_code.co_filename)
                text = linecache.getline(name, at.f_lineno).strip()
                return [os.path.relpath(name, self.script), at.f_lineno, text]
            at = at.f_back
        return None

    def is_users(self, filename: str) -> bool:
        """Return whether a file belongs to the script: under its folder, not installed there."""
        if (known := self._users.get(filename)) is None:
            path = os.path.realpath(filename)
            known = "site-packages" not in path and path.startswith(self.script + os.sep)
            known = known and not path.startswith(os.path.dirname(os.path.realpath(__file__)))
            self._users[filename] = known
        return known


probe: Probe | None = None


def install() -> None:
    """Watch this process as ``ENVIRONMENT`` says; do nothing without it, or the second time."""
    global probe
    if probe is not None or not (text := os.environ.get(ENVIRONMENT)):
        return
    settings = json.loads(text)
    if not os.path.isdir(settings["folder"]):  # the audit has ended; this process outlived it
        return
    probe = made = Probe(settings)
    made.write_start()
    atexit.register(made.end)
    if "torch" in sys.modules:
        _watch()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _watch() -> None:
    """Start the parts. One that fails is recorded; the others go on."""
    assert probe is not None
    probe.record("torch", version=str(sys.modules["torch"].__version__))
    for part in _PARTS:
        probe.guard(_start)(part, probe)


def _start(part: str, watched: Probe) -> None:
    importlib.import_module(f"{_PACKAGE}.{part}").watch(watched)


class _AfterTorch:
    """Finds nothing itself, but lets the parts watch torch as soon as it has been imported."""

    _searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See importlib.abc.MetaPathFinder. A script may look for torch before it imports it."""
        if name != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_and_watch(module: Any) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _watch()

        spec.loader.exec_module = exec_and_watch  # type: ignore[method-assign]  # this spec's alone
        return spec
