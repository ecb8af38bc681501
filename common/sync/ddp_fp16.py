"""DistributedDataParallel with half of the bytes: torch's fp16 hook.

    bucket of fp32 --round--> fp16 / N --all_reduce in fp16--> fp16 --> bucket of fp32
         M_k bytes                  M_k / 2 bytes in the all_reduce          M_k bytes

It is lossy. What it keeps: each entry is the mean, up to fp16's rounding (11 bits) of the ranks'
    entries and of their partial sums. All ranks have the same bits. Gradients beyond 65,504 become
    infinite. Below 6e-5 an entry / N loses bits, below 3e-8 it becomes zero.
Sends: every rank, rank 0 included, 2(N-1)K messages, (N-1)/N M bytes, for K buckets of fp32
    gradients, and receives as much.
Time: as ddp.py, with M_k / 2 for M_k, and two more passes over M_k bytes in memory, to fp16 and
    back.
Common mistake: fp16 loss scaling on top, which pushes gradients beyond 65,504. Another: dividing
    by N after the sum, which may exceed 65,504 even if no single entry does.

(N ranks, M bytes of gradients; alpha seconds per message, B bytes per second on a link, gamma
seconds to add one byte.)
"""

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from common.sync.ddp import DDPWrapper


class DDPFp16(DDPWrapper):
    """As ``ddp``, but each bucket is rounded to fp16, divided by N, and summed in fp16."""

    exact = False

    def attach_hook(self, wrapped: DistributedDataParallel) -> None:
        """See the base class."""
        wrapped.register_comm_hook(None, fp16_compress_hook)
