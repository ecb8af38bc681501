"""Sending to one rank while receiving from one, which may be the same."""

import torch.distributed as dist
from torch import Tensor


def send_and_receive(mine: Tensor, coming: Tensor, *, to: int, source: int) -> None:
    """Send ``mine`` to rank ``to`` and receive ``coming`` from rank ``source`` at once; empty tensors are left out at both ends.

    Receiving is asked for first. Gloo begins to send when the other end has said that it is ready, and between two ranks that
    word would wait behind all that is sent the other way: each would send only when the other is done (measured on links of
    500 Mbit/s: twice the time).
    """
    both = [dist.P2POp(dist.irecv, coming, source)] if len(coming) else []
    both += [dist.P2POp(dist.isend, mine, to)] if len(mine) else []
    for work in (
        dist.batch_isend_irecv(both) if both else []
    ):  # started together, which NCCL insists on
        work.wait()
