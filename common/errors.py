"""The two kinds of failure that are told to the user in one sentence instead of a traceback."""


class UserError(ValueError):
    """A setting, file or dataset that cannot be used; the message says what, got what, do what."""


class GroupError(RuntimeError):
    """The group of ranks cannot be formed or has broken; the message says who, where and what to do."""
