"""DistributedDataParallel that sends half of the bytes: torch's fp16 hook.

    bucket of fp32 --/ N--> fp16 --all_reduce in fp16--> fp16 --> bucket of fp32
         M_k bytes               M_k / 2 bytes on the links             M_k bytes

It is lossy. What it keeps: each entry lies within the rounding of fp16 (11 bits) of the exact
    mean, and all ranks have the same bits. Entries beyond 65,504 become infinite, those below
    6e-8 zero.
Sends: every rank, the root too, 2(N-1)K messages, (N-1)/N M bytes, for K buckets of fp32
    gradients, and receives as much.
Time: as ddp.py, with M_k / 2 for M_k, and two more passes over memory for the rounding.
Common mistake: fp16 loss scaling on top, which pushes the sums beyond 65,504. Another: summing
    before dividing by N, for the same reason.

(N ranks, M bytes of gradients; alpha seconds a message, B bytes a second on a link, gamma seconds
to add a byte.)
"""

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from common.sync.bucket_plans import DDPFp16Plan
from common.sync.ddp import DDPWrapper


class DDPFp16(DDPFp16Plan, DDPWrapper):
    """As ``ddp``, but each bucket is divided by N, rounded to fp16, and summed in fp16.

    Parameters
    ----------
    bucket_mb, find_unused_parameters : as those of ``ddp``.
    """

    exact = False

    def attach_hook(self, wrapped: DistributedDataParallel) -> None:
        """See the base class."""
        wrapped.register_comm_hook(None, fp16_compress_hook)
