"""Where each thread stands: the record ``stack``, written when a rank waits too long or fails.

A rank that waits for more than ``stall_seconds``, or whose collective fails, touches the file
``dump`` in the folder of the run; then every rank of the run writes its stacks. That harms nothing,
so a long wait need not be a hang: only the runner ends a run, and it may touch ``dump`` before.
"""

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from .state import Probe

_TICK_SECONDS = 0.5
_STALL_SECONDS = 8.0
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))


class HangWatcher:
    """Looks twice a second, in a thread of this process, whether stacks are to be written.

    ``waits`` holds since when this process waits, by what it waits for. The owner of the watcher
    adds and removes its entries.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._pid: int | None = None
        self._dump = probe.folder / "dump"
        self._reported: set[object] = set()
        self._busy = 0.0
        self.waits: dict[object, float] = {}
        probe.hear("backward_begin", lambda *_: self.waits.update(backward=time.monotonic()))
        probe.hear("backward_end", lambda *_: self.waits.pop("backward", None))

    def start(self) -> None:
        """Watch from now on; a crash in C++ leaves its Python stack in ``<pid>.crash``."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self.waits.clear()
        if not faulthandler.is_enabled():
            self._crash = open(self._probe.folder / f"{self._pid}.crash", "wb")  # noqa: SIM115
            faulthandler.enable(file=self._crash)
        threading.Thread(target=self._run, name="lab-audit-hangs", daemon=True).start()

    def ask_all(self) -> None:
        """Have every rank write its stacks."""
        with suppress(OSError):  # the folder is gone once the audit has ended
            self._dump.touch()

    def write(self, why: str) -> None:
        """Write where the threads of this process stand, but for the caller's part in the probe."""
        names = {one.ident: one.name for one in threading.enumerate()}
        threads = []
        for ident, frame in sys._current_frames().items():
            if ident is not None and names.get(ident) != "lab-audit-hangs":
                threads.append([names.get(ident, str(ident)), self._frames(frame)])
        self._probe.record("stack", why=why, busy=round(self._busy, 3), threads=threads)

    def _frames(self, innermost: FrameType) -> list[list[Any]]:
        """Return the script's frames, outermost first, and the innermost frame of all."""
        found: list[list[Any]] = []
        at: FrameType | None = innermost
        last: FrameType | None = None
        while at is not None:
            name = at.f_code.co_filename
            if os.path.dirname(os.path.abspath(name)) != _OWN_FOLDER:
                last = last or at
                if self._probe.is_users(name) and (place := self._probe.place(at)):
                    found.insert(0, [*place[:2], at.f_code.co_name, place[2]])
            at = at.f_back
        if last is not None and not self._probe.is_users(last.f_code.co_filename):
            name = last.f_code.co_filename.rpartition("site-packages/")[2]
            found.append([name, last.f_lineno, last.f_code.co_name, ""])
        return found

    def _run(self) -> None:
        """Write stacks whenever ``dump`` was touched; touch it once for each wait too long."""
        seen = self._touched()
        used, then = time.process_time(), time.monotonic()
        limit = float(self._probe.settings.get("stall_seconds", _STALL_SECONDS))
        while self._pid == os.getpid():
            time.sleep(_TICK_SECONDS)
            now_used, now = time.process_time(), time.monotonic()
            self._busy = (now_used - used) / (now - then)
            used, then = now_used, now
            if (touched := self._touched()) != seen:
                seen = touched
                self.write("asked")
            for what, since in list(self.waits.items()):
                if now - since > limit and (what, since) not in self._reported:
                    self._reported.add((what, since))
                    self.ask_all()

    def _touched(self) -> int:
        try:
            return self._dump.stat().st_mtime_ns
        except OSError:
            return 0
