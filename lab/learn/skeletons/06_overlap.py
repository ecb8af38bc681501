"""Lesson 6: send the gradients in buckets, while backward still computes.

Run it:
lab cluster run --nodes 4 --rate 1gbit -- python learn/06_overlap.py {master}:{port} {nodes} {rank}
"""

import functools
import statistics
import sys
import time
import timeit

import torch
import torch.distributed as dist
from torch import nn

LAYERS_MB = [0.3, 1.2, 2.4, 4.7, 9.4, 9.4, 9.4]  # of VGG-11, from the first layer to the last


class Buckets:
    """The gradients in buckets; each is all-reduced as soon as it is complete."""

    def __init__(self, parameters, bucket_mb):
        self.buckets, self.under_way = [[]], []
        for parameter in reversed(list(parameters)):  # backward computes the last layer first
            together = sum(one.nbytes for one in [*self.buckets[-1], parameter])
            if self.buckets[-1] and together > bucket_mb * 1e6:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(
                functools.partial(self.ready, len(self.buckets) - 1)
            )
        self.missing = [len(bucket) for bucket in self.buckets]

    def ready(self, number, _parameter):
        """Send bucket `number` if this gradient was the last one that it waited for."""
        self.missing[number] -= 1
        if self.missing[number] == ...:
            flat = nn.utils.parameters_to_vector([one.grad for one in self.buckets[number]])
            work = ...  # begin to all-reduce `flat`, and do not wait: async_op=True
            self.under_way.append((number, flat, work))

    def finish(self):
        """Wait for all buckets, and leave the mean over the ranks in each gradient."""
        for number, flat, work in self.under_way:
            ...  # until its sum has arrived
            flat /= ...
            nn.utils.vector_to_parameters(flat, [one.grad for one in self.buckets[number]])
            self.missing[number] = ...  # for the next step
        self.under_way = []


ANSWERS = {
    # Buckets of 9 MB: how many MB are in the last bucket, which no backward is left to hide? (A tensor
    # that is larger than a bucket has one of its own.)
    "a": ...,
    # The link needs your prediction's seconds for all buckets, and 90 of backward's 105 ms remain when
    # the first bucket of 9 MB leaves. How many s are exposed at best?
    "b": ...,
    # 8 MB and 0.3 MB travel at the same time and share the link. Which one ends first, the one
    # sent "earlier" or the one sent "later", if the small one is sent later?
    "c": ...,
}

if __name__ == "__main__":
    address, nodes, rank = sys.argv[1:]
    dist.init_process_group("gloo", f"tcp://{address}", world_size=int(nodes), rank=int(rank))
    for bucket_mb in (1, 9, 25, 100):
        weights = [nn.Parameter(torch.zeros(round(mb * 1e6 / 4))) for mb in LAYERS_MB]
        for weight in weights:
            weight.register_hook(lambda _: time.sleep(0.015))  # a layer's backward
        buckets, seconds = Buckets(weights, bucket_mb), []
        for _ in range(6):
            dist.barrier()
            sum(weight.sum() for weight in weights).backward()
            seconds.append(timeit.timeit(buckets.finish, number=1))
        if rank == "0":  # without the first step, which warms up
            print(f"{bucket_mb} MB in a bucket: {statistics.median(seconds[1:]):.3f} s exposed")
    dist.destroy_process_group()
