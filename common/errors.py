"""Errors that end a run with one message to the user instead of a traceback, and exit statuses.

``file_errors`` turns what the system or a parser says about a file into such an error, and the
command line prints what ``explain`` makes of it. ``first_line`` and ``reason_of`` shorten other
libraries' errors, and ``print_to_stderr`` prints a line.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def reason_of(error: Exception) -> str:
    """Return why a file or a download failed, without the path."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason) if reason else first_line(error)


@contextmanager
def file_errors(
    what: str, advice: str = "", *, passing: type[Exception] = UserError
) -> Iterator[None]:
    """Turn what the system or a parser says about the user's file into one UserError.

    Its message is ``what``, the reason, and ``advice``. Errors of type ``passing`` pass.
    """
    try:
        yield
    except (UserError, passing):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{what} ({reason_of(error)}){advice}") from error


def explain(error: Exception) -> str | None:
    """Return what the command line says about an error; None if only the traceback explains it.

    Whatever name of a file it quotes, a line end becomes a space, unless an indented list follows,
    and a very long word loses its middle.
    """
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif isinstance(error, UserError | GroupError):
        message = str(error)
    else:
        return None
    message = re.sub(r"\n(?!  )", " ", message)
    return re.sub(r"(\S{100})\S{100,}(\S{100})", r"\1…\2", message)
