"""What ends a run with one sentence to the user instead of a traceback."""


class UserError(ValueError):
    """A setting, file or dataset that cannot be used; the message says what, got what, do what."""


class GroupError(RuntimeError):
    """The group of ranks cannot be formed or has broken; the message says who, where and what to do."""


class Stopped(Exception):  # noqa: N818 - not a failure
    """The run was asked to stop and has saved its state; the message says where it resumes."""


# Exit statuses, beside 0 (done), 1 (failed) and 2 (wrong input).
INTERRUPTED = 130
TO_BE_CONTINUED = 75
