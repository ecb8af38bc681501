"""Errors that end a run with one message to the user instead of a traceback, and exit statuses.

``first_line`` and ``reason_of`` shorten other libraries' errors for such a message;
``print_to_stderr`` prints it.
"""

import sys


class UserError(ValueError):
    """A setting, file or dataset cannot be used; the message says what, got what, do what."""


class GroupError(RuntimeError):
    """The group of ranks cannot form or has broken; the message says who, where, do what."""


class Stopped(Exception):  # noqa: N818 - not a failure
    """The run was asked to stop and has saved its state; the message says where it resumes."""


# Exit statuses other than 0 (done), 1 (failed) and 2 (wrong input)
INTERRUPTED = 130
TO_BE_CONTINUED = 75


def print_to_stderr(line: str) -> None:
    """Print a line in one write, so that it stays whole where several ranks share a terminal.

    ``print`` writes the line and its end one after the other under ``python -u``.
    """
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, else the name of its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def reason_of(error: Exception) -> str:
    """Return why a file or a download failed, without the path."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason) if reason else first_line(error)
