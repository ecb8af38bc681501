"""The folder of an audit's records, and what happens when the audit is interrupted or killed."""

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from common.utils.paths import REPOSITORY
from lab.audit.leftovers import TEMPORARY

_GUARD_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lab.audit.leftovers import guard; guard(sys.argv[2])"
)


@contextlib.contextmanager
def record_folder(keep: Path | None) -> Iterator[Path]:
    """Make a folder for the records; at the end, or if this process is killed, leave nothing.

    A guard process waits for the end of this one: it ends what a script has left running.
    keep : a folder that stays.
    """
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY)) if keep is None else keep.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    guard = subprocess.Popen(
        [sys.executable, "-P", "-c", _GUARD_CODE, str(REPOSITORY), str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        guard.communicate()  # closes its stdin


@contextlib.contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that it leaves nothing behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
