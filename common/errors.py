"""Errors that end a run with one message to the user instead of a traceback, and exit statuses."""


class UserError(ValueError):
    """A setting, file or dataset cannot be used; the message says what, what was got, what to do."""


class GroupError(RuntimeError):
    """The group of ranks cannot be formed or has broken; the message says who, where and what to do."""


class Stopped(Exception):  # noqa: N818 - not a failure
    """The run was asked to stop and has saved its state; the message says where it resumes."""


# Exit statuses other than 0 (done), 1 (failed) and 2 (wrong input)
INTERRUPTED = 130
TO_BE_CONTINUED = 75
