"""The streams of a command: some closed by who started it, an output that cannot be written."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import print_to_stderr, reason_of


@contextmanager
def standard_streams() -> Iterator[None]:
    """Open what is closed of input, output and errors, and write out the output at the end.

    What the output's encoding lacks, as ASCII lacks the µ, is written as an escape.
    Raises SystemExit with status 1 if the output cannot be written, with a message. A reader that
    left, as ``head`` does, needs none.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In a forked process a pipe may have taken the place of a file: "Illegal seek".
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not _output_fails():
            raise
        if not isinstance(error, BrokenPipeError):
            print_to_stderr(f"error: {output_message(error)}")
        raise SystemExit(1) from None


def output_message(error: OSError) -> str:
    """Return what to tell the user about an output that cannot be written."""
    return (
        f"the output could not be written ({reason_of(error)}): make room where it goes, or "
        "send it elsewhere"
    )


def _open_closed_streams() -> None:
    """Let closed streams lead to nowhere.

    Else the next file that is opened gets a closed one's number, and with it what C code and child
    processes print.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode)  # noqa: SIM115 - open until the process ends
            setattr(sys, name, stream)


def _output_fails() -> bool:
    """Return whether the output cannot be written; then what is left of it is dropped."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        # Python writes out what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
