"""Give a reader hostile input: many generated cases, with limits on time, memory and files.

``CASES`` parametrises a test with the number of cases: 30 in CI, 300 in ``make test-long``.
"""

import contextlib
import copy
import functools
import operator
import resource
import time
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError

MOST_CPU_SECONDS = 10.0
MOST_SECONDS = 60.0  # a busy machine takes many times the CPU time
MOST_BYTES = 2**30

CASES = pytest.mark.parametrize("cases", [30, pytest.param(300, marks=pytest.mark.long)])

# Plain JSON values, among them the ones that readers forget.
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(
        [0, -1, 2**63, 10**400, 1e308, -1e308, 1e-320, "", "x", "1", "\n", '"', "../x"]
    )
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(content, prefix=()):
    """Return the path of every entry in nested dicts and lists."""
    found = [prefix] if prefix else []
    if isinstance(content, list):
        content = dict(enumerate(content))
    for key, value in content.items() if isinstance(content, dict) else ():
        found += places(value, (*prefix, key))
    return found


def changed(content, place, value):
    """Return a copy of JSON content with another value at a place, such as "cells/0/id"."""
    content = copy.deepcopy(content)
    *above, last = [int(name) if name.isdigit() else name for name in place.split("/")]
    functools.reduce(operator.getitem, above, content)[last] = value
    return content


@st.composite
def altered(draw, content):
    """Return a good JSON value with one to three entries replaced or removed."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        found = places(content)
        if not found:
            return draw(VALUES)
        *above, last = draw(st.sampled_from(found))
        target = functools.reduce(operator.getitem, above, content)
        if draw(st.booleans()) and isinstance(target, dict):
            del target[last]
        else:
            target[last] = draw(VALUES)
    return content


@st.composite
def damaged(draw, content):
    """Return good bytes cut, with bytes flipped, doubled, or replaced altogether."""
    how = draw(st.sampled_from(["cut", "flip", "insert", "other"]))
    if how == "other":
        return draw(st.binary(max_size=200))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if how == "cut":
        return content[:at]
    if how == "insert":
        return content[:at] + draw(st.binary(min_size=1, max_size=50)) + content[at:]
    flipped = bytearray(content)
    for place in [at, *draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=5))]:
        flipped[place] ^= draw(st.integers(1, 255))
    return bytes(flipped)


def run_cases(cases, strategy, check):
    """Call ``check`` with ``cases`` generated values; it fails by any error but UserError.

    CI draws the same cases every time, ``make test-long`` new ones.
    """

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=cases <= 30,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(value):
        began, cpu_began = time.monotonic(), time.process_time()
        with contextlib.suppress(UserError):
            check(value)
        took, cpu_took = time.monotonic() - began, time.process_time() - cpu_began
        assert cpu_took < MOST_CPU_SECONDS, f"{cpu_took:.1f} s of CPU time"
        assert took < MOST_SECONDS, f"{took:.1f} s"

    with memory_limit(MOST_BYTES):
        one()


@contextlib.contextmanager
def memory_limit(more_bytes):
    """Let this process allocate at most so much more; beyond that MemoryError is raised."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def untouched(folder):
    """Check that the files in ``folder`` are the same afterwards, with the same times."""
    before = _state(folder)
    yield
    assert _state(folder) == before


def _state(folder):
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }
