"""A right ring all-reduce: 2 (size - 1) chunks to the next rank."""

import torch
import torch.distributed as dist


def ring_allreduce(send, rank, size):
    chunks = send.tensor_split(size)
    right = (rank + 1) % size
    left = (rank - 1) % size
    for step in range(2 * (size - 1)):
        outgoing = chunks[(rank - step) % size]
        incoming = chunks[(rank - step - 1) % size]
        buffer = torch.empty_like(incoming)
        work = dist.isend(outgoing.clone(), right)
        dist.recv(buffer, left)
        work.wait()
        if step < size - 1:
            incoming += buffer
        else:
            incoming.copy_(buffer)
    send /= size
