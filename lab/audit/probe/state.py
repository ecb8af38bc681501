"""What the parts of the probe share: settings, the files that it writes, and the events.

``install`` is called once per process; ``part.watch(probe)`` of each part follows when torch has
been imported. A part tells the others what happens with ``probe.tell``; it hears them by methods
of the events' names, of an object among ``probe.listeners``. The events, with their arguments:

backward_begin (root tensors), backward_end (), communicate (tensors of a call that begins),
ddp_forward (), step_begin (optimizer), step_end (optimizer), forward_begin (module), forward
(module), epoch_begin (epoch, torch's loader), batch_begin (epoch: its
loader is asked for a batch), cut (), ending (). "forward" means an outermost call of
a module that has parameters, with or without gradients. Steps are those of the outermost optimiser.
An error in a listener is recorded as ``trouble`` and goes no further, so that the script goes on;
only StopIteration, SystemExit and the like get through.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Any)
# Holds the settings as JSON: folder, script (folder of the user's code), steps, rank (or null),
# clocks, whole (true: the script's end is its caller's business, so nothing cuts it).
ENVIRONMENT = "LAB_AUDIT"
# Folders of packages, and of Python's own modules, which may lie under the user's folder.
_INSTALLED = re.compile(r"[/\\](?:(?:site|dist)-packages|lib(?:64)?[/\\]python[\d.]+)[/\\]")


class Probe:
    """Writes the records of one process.

    settings : see ``ENVIRONMENT``.
    script : the folder of the user's code.
    written : the number of records.
    step : the updates that have ended, of the optimiser that has done the most: so the two
        optimisers of a GAN count one step an iteration.
    cutting : the script is being ended, see stopping.py.
    in_backward : a backward pass is under way.
    gradients, forwards : the ``GradientWatch`` and the ``PassWatch``, set by their modules.
    noted : the kinds of records that ``note`` has written.
    listeners : the objects that hear of events, see ``tell``.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.folder = Path(settings["folder"])
        self.script = os.path.realpath(settings["script"])
        self.written = 0
        self.step = 0
        self.cutting = False
        self.in_backward = False
        self.gradients: Any = None
        self.forwards: Any = None
        self.is_users = functools.lru_cache(maxsize=None)(self._is_users)
        self._troubles: set[str] = set()
        self.listeners: list[Any] = []
        self.noted: set[str] = set()
        self._open()
        os.register_at_fork(after_in_child=self._open)

    def _open(self) -> None:
        """Open this process's own files. What a forked one's parent had open stays the parent's."""
        own = str(self.folder / str(os.getpid()))
        self._lines = open(own + ".jsonl", "ab", buffering=0)  # noqa: SIM115
        self._numbers = open(own + ".f64", "ab", buffering=0)  # noqa: SIM115
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        self.record(
            "start",
            ppid=os.getppid(),
            python=sys.version.split()[0],
            executable=sys.executable,
            hint=self.settings.get("rank"),
            variables={name: os.environ[name] for name in names if name in os.environ},
        )

    def end(self) -> None:
        """Write the record ``end``. After the cut end at once: clearing torch takes a second."""
        if self.cutting:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # patched: stopping.py writes the record
        self.record_end(None)

    def record_end(self, status: Any) -> None:
        """Write the record ``end``, and before it what other parts know at the end."""
        self.tell("ending")
        self.record("end", status=status, after_cut=self.cutting, replaced=replaced())

    def record(self, kind: str, **fields: Any) -> None:
        """Write one record at once."""
        line = json.dumps({"k": kind, "t": time.monotonic(), **fields}, default=str) + "\n"
        self._lines.write(line.encode(errors="replace"))  # at once, so threads need no lock
        self.written += 1

    def note(self, kind: str, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Write a record of the call of a function, which ``patch`` gives as ``original``."""
        self.noted.add(kind)
        self.record(kind, at=self.place())
        return original(*args, **kwargs)

    def samples(self, parts: Any) -> list[int]:
        """Write the numbers of flat tensors and return the reference [offset, count] to them."""
        from .sampling import join  # it imports torch, which the script has done by now

        values = join(parts)
        offset = self._numbers.seek(0, os.SEEK_END) // values.itemsize
        self._numbers.write(values.tobytes())  # one thread trains
        return [offset, len(values)]

    def guard(self, function: Function) -> Function:
        """Return the function, but an error in it is recorded, and None returned.

        StopIteration gets through: ``stopping`` ends loops with it. Under torch.compile nothing is
        called: it is to see what the script wrote alone.
        """

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return None if compiling() else function(*args, **kwargs)
            except StopIteration:
                raise
            except Exception:
                self.note_trouble(function.__module__)
                return None

        return guarded  # type: ignore[return-value]  # it takes and returns the same

    def note_trouble(self, module: str) -> None:
        """Write the record ``trouble`` for the current error, once for each text."""
        text = traceback.format_exc(limit=-6)
        if text not in self._troubles and len(self._troubles) < 20:
            self._troubles.add(text)
            self.record("trouble", part=module.rpartition(".")[2], text=text)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the methods of this name of all listeners, in the order of these."""
        for listener in self.listeners:
            if hasattr(listener, event):
                self.guard(getattr(listener, event))(*arguments)

    def place(self, frames: Any = None) -> list[Any] | None:
        """Return [file, line, text] of the first frame of the script's own code, or None.

        frames : pairs of a frame and its line number; by default those of the caller's stack, the
            innermost first.
        """
        for frame, number in frames or traceback.walk_stack(sys._getframe(1)):
            if self.is_users(frame.f_code.co_filename):
                name = os.path.realpath(frame.f_code.co_filename)
                text = linecache.getline(name, number).strip()
                return [os.path.relpath(name, self.script), number, text]
        return None

    def _is_users(self, filename: str) -> bool:
        """Return whether a file belongs to the script: under its folder, not installed there."""
        path = os.path.realpath(filename)
        own = os.path.dirname(os.path.realpath(__file__))
        return belongs_to(filename, self.script) and not path.startswith(own)


def belongs_to(filename: str, folder: str) -> bool:
    """Return whether a file lies under a folder, and is neither installed nor Python's own."""
    path = os.path.realpath(filename)
    is_file = not filename.startswith("<")  # as "<frozen os>"
    return is_file and path.startswith(folder + os.sep) and _INSTALLED.search(path) is None


def compiling() -> bool:
    """Return whether torch.compile traces this code."""
    import torch

    owner = getattr(torch, "compiler", None)
    if not hasattr(owner, "is_compiling"):  # it came with torch 2.3
        owner = getattr(torch, "_dynamo", None)  # imported by the first torch.compile
    return owner is not None and bool(owner.is_compiling())


def wrapped(original: Function, wrapper: Callable[..., Any]) -> Function:
    """Return a function that returns ``wrapper(original, *args, **kwargs)``.

    Under torch.compile the original is called alone.
    """

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        return wrapper(original, *args, **kwargs)

    return called  # type: ignore[return-value]  # it is called as the original


# By the owner's id and the attribute's name: the owner, and what the probe has put there.
_PLACED: dict[tuple[int, str], tuple[Any, Any]] = {}


def patch(owner: Any, **wrappers: Callable[..., Any]) -> None:
    """Replace attributes of an owner by their ``wrapped``, except those that this torch lacks."""
    for name, wrapper in wrappers.items():
        if hasattr(owner, name):
            put(owner, name, wrapped(getattr(owner, name), wrapper))


def put(owner: Any, name: str, function: Any) -> None:
    """Replace ``owner.name``, and remember by what."""
    setattr(owner, name, function)
    _PLACED[id(owner), name] = owner, function


def replaced() -> list[str]:
    """Return the names in torch that the probe has replaced, and other code has replaced since.

    A function that wraps the probe's, and says so in ``__wrapped__`` as torch does, is none.
    """
    found = set()
    for (_, name), (owner, mine) in _PLACED.items():
        now = vars(owner).get(name)
        while now is not mine and hasattr(now, "__wrapped__"):
            now = now.__wrapped__
        module = getattr(owner, "__module__", None) or getattr(owner, "__name__", None)
        if now is not mine and str(module).startswith("torch"):
            found.add(name)
    return sorted(found)


def named(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names, with those that have a default."""
    given = inspect.signature(function).bind_partial(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def storage_of(tensor: Any) -> int | None:
    """Return what identifies the memory that a tensor is a view of; None if nothing does."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


# What finds the probe's own objects; no training needs it. The events are Python's own (PEP 578).
_SEARCHES = ("gc.get_objects", "gc.get_referrers", "gc.get_referents")


def _note_search(probe: Probe, event: str, _: Any) -> None:
    """Write the record ``searched`` if the script itself looks through Python's memory."""
    if event in _SEARCHES and probe.is_users(sys._getframe(1).f_code.co_filename):
        probe.record("searched", what=event, at=probe.place())


def install() -> Probe | None:
    """Watch this process as ``ENVIRONMENT`` says, and return its probe; do nothing without it."""
    settings = json.loads(os.environ.get(ENVIRONMENT, "null"))
    if settings is None or not os.path.isdir(settings["folder"]):  # this process outlived the audit
        return None
    probe = Probe(settings)
    atexit.register(probe.end)
    sys.addaudithook(functools.partial(_note_search, probe))
    if "torch" in sys.modules:
        _watch(probe, lambda _: None, None)
    finder: Any = SimpleNamespace(find_spec=functools.partial(_find_torch, probe))
    sys.meta_path.insert(0, finder)
    return probe


def _find_torch(probe: Probe, name: str, *rest: Any) -> Any:
    """Find torch for an import, see importlib.abc.MetaPathFinder, so that it will be watched."""
    if name != "torch":
        return None
    spec = PathFinder.find_spec(name, *rest)
    if spec is not None:
        patch(spec.loader, exec_module=functools.partial(_watch, probe))
    return spec


# In this order: a part may use what those before it have set.
_PARTS = (
    *("optimizers", "passes", "collectives", "data", "randomness", "saving", "precision"),
    *("stopping", "clocks"),
)


def _watch(probe: Probe, execute: Callable[[Any], None], module: Any) -> None:
    """Execute the module torch, then start the parts. One that fails is recorded; the others go on.

    execute : runs the code of the module, as its loader does.
    """
    execute(module)
    probe.record("torch", version=str(sys.modules["torch"].__version__))
    for part in _PARTS:
        if part == "stopping" and probe.settings.get("whole"):
            continue
        try:
            importlib.import_module(f".{part}", __package__).watch(probe)
        except Exception:
            probe.note_trouble(part)
