"""A disk that is full, for one process alone."""

import functools
import resource
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def room_for(nbytes):
    """Limit each file that this process writes to ``nbytes``, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_small_disk(size):
    """Return what starts the command after it with a disk of its own as the folder ``out``."""
    mount = f'mount -t tmpfs -o size={size} none out && exec "$@"'
    return ("unshare", "-Urm", "bash", "-c", mount, "bash")


@functools.cache
def why_no_small_disk():
    """Return why this user cannot mount a disk in a namespace; "" if that works."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "out").mkdir()
        tried = subprocess.run(
            [*on_small_disk("400k"), "true"],
            **{"cwd": folder, "capture_output": True, "text": True, "timeout": 30},
        )
    return tried.stderr.strip() if tried.returncode else ""
