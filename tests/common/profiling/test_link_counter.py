"""The bytes on a node's link, from the kernel's counters."""

import pytest

from common.profiling import link_counter
from common.profiling.link_counter import LinkCounter

FILE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 999 9 0 0 0 0 0 0 999 9 0 0 0 0 0 0
  eth0:{received} 10 0 0 0 0 0 0 {sent} 10 0 0 0 0 0 0
"""


@pytest.fixture
def counters(monkeypatch):
    """Return the numbers that the kernel's file has, to be changed."""
    numbers = {"sent": 0, "received": 0}
    monkeypatch.setattr(link_counter, "lines_of", lambda path: FILE.format(**numbers).splitlines())
    return numbers


def test_bytes_of_a_step_are_those_between_its_ends(counters, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    link = LinkCounter()
    for sent, received in ((1_000, 500), (1_700, 600), (2_000, 800), (2_300, 1_000)):
        counters |= {"sent": sent, "received": received}
        link.count()
    assert link.a_step(1, 1) == (700, 100)
    assert link.a_step(2, 3) == (300, 200)
    assert link.a_step(2, 4) is None, "the fourth step was not counted"


@pytest.mark.parametrize("interface", ["lo", "eth7", None])
def test_nothing_is_counted_without_such_a_link(counters, monkeypatch, interface):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    link = LinkCounter()
    for _ in range(3):
        link.count()
    assert link.a_step(1, 2) is None
