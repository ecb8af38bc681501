"""Gather and scatter of one flat buffer: all traffic still passes rank 0, in fewer messages.

    1 --M--> +--------+ --M--> 1
    2 --M--> | rank 0 | --M--> 2       as gather_scatter.py, but one message per rank each way
    3 --M--> +--------+ --M--> 3

Sends: every rank but the root 1 message, M bytes; the root N-1 messages, (N-1)M bytes. Each
    receives as much as it sends. The root needs memory for N more buffers.
Time: 2 alpha + 2(N-1)M / B + (N-1)M gamma, and one copy of M bytes in memory. Nothing is copied
    back, because ``p.grad`` becomes a view of the buffer (flat_buffer.py).
Common mistake: averaging the buffer and forgetting ``p.grad``, which then still holds this rank's
    own gradient.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.) Each dtype has its own buffer.
"""

from torch import Tensor

from common.sync.base import FlatSync
from common.sync.gather_scatter import sum_through_root


class GatherScatterFlat(FlatSync):
    """One ``gather`` of all gradients to rank 0, which adds them; one ``scatter`` of the sum."""

    def sum_over_ranks(self, total: Tensor) -> None:
        """See the base class."""
        sum_through_root(total)
