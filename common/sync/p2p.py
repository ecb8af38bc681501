"""Send to one rank while receiving from another, or from the same one."""

import torch.distributed as dist
from torch import Tensor


def send_and_receive(mine: Tensor, coming: Tensor, *, to: int, source: int, tag: int = 0) -> None:
    """Send ``mine`` to rank ``to`` and receive ``coming`` from rank ``source`` at the same time.

    Both ends skip empty tensors. The receive comes first: Gloo sends only after the other end has
    announced its receive. An announcement queued behind data on the same link would be delayed, and
    the two ranks would take turns (twice the time, measured on links of 500 Mbit/s).

    tag : equal at both ends; separates the messages of several threads. NCCL ignores it.
    """
    both = [dist.P2POp(dist.irecv, coming, source, tag=tag)] if len(coming) else []
    both += [dist.P2POp(dist.isend, mine, to, tag=tag)] if len(mine) else []
    # NCCL needs both in one batch.
    for work in dist.batch_isend_irecv(both) if both else []:
        work.wait()
