"""A disk that is full, for a while and for this process alone."""

import resource
from contextlib import contextmanager


@contextmanager
def room_for(nbytes):
    """Limit each file that this process writes to ``nbytes``, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
