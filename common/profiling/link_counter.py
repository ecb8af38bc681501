"""Count the bytes that pass this node's link to the other nodes, by the kernel's own counters."""

from common.utils.environment import setting
from common.utils.system import lines_of

_LOOPBACK = "lo"
_COUNTERS = "/proc/self/net/dev"  # of this process's own network namespace
_RECEIVED = 0  # columns of that file, after the interface's name
_SENT = 8


class LinkCounter:
    """Bytes of the interface through which Gloo sends: those of all ranks on the node, and headers.

    Whatever else uses the interface counts as well. Nothing is counted on loopback, and on systems
    without /proc.
    """

    def __init__(self) -> None:
        self._interface = setting("GLOO_SOCKET_IFNAME") or _LOOPBACK
        self._sent: list[int] = []
        self._received: list[int] = []

    def count(self) -> None:
        """Read the counters: before the first step, and after each one."""
        if self._interface == _LOOPBACK:
            return
        for line in lines_of(_COUNTERS):
            name, _, columns = line.partition(":")
            if name.strip() == self._interface:
                numbers = columns.split()
                self._sent.append(int(numbers[_SENT]))
                self._received.append(int(numbers[_RECEIVED]))

    def a_step(self, first: int, last: int) -> tuple[float, float] | None:
        """Return the bytes sent and received a step; None if they were not counted.

        first, last : steps, from 1, that count.
        """
        if len(self._sent) <= last:
            return None
        steps = last - first + 1
        sent = self._sent[last] - self._sent[first - 1]
        received = self._received[last] - self._received[first - 1]
        return sent / steps, received / steps
