"""Which gradients are sent together: the rule by which DistributedDataParallel fills its buckets."""

from collections.abc import Sequence

from common.sync.message_cost import GradientSize, Operation, itemsize

MIB = 1024 * 1024


def assign_buckets(sizes_in_ready_order: Sequence[int], bucket_mb: float | None) -> list[list[int]]:
    """Return the indices of each bucket's gradients: a bucket closes as soon as its bytes reach the limit.

    Types of entries have buckets of their own; what is left open at the end follows in the order of its first gradient.

    Parameters
    ----------
    sizes_in_ready_order : bytes of each gradient, the one that backward makes first to the front.
    bucket_mb : the limit in MiB; None: 1 for the first bucket (so that sending begins early), 25 for those after it. Of
        VGG-11's 36.9 MB that makes 9.5, 27.2 and 0.3 MB (10^6), and a limit of 25 makes 28.3 and 8.6.
    """
    limits = [1, 25] if bucket_mb is None else [bucket_mb]
    closed: list[list[int]] = []
    opened: dict[int, list[int]] = {}
    closed_of_type: dict[int, int] = {}
    for index, size in enumerate(sizes_in_ready_order):
        kind = itemsize(size)
        bucket = opened.setdefault(kind, [])
        bucket.append(index)
        limit = int(limits[min(closed_of_type.get(kind, 0), len(limits) - 1)] * MIB)
        if sum(sizes_in_ready_order[i] for i in bucket) >= limit:
            closed.append(opened.pop(kind))
            closed_of_type[kind] = closed_of_type.get(kind, 0) + 1
    return closed + sorted(opened.values())


def bucket_sizes(
    sizes: Sequence[int], bucket_mb: float | None, *, kept_as_built: bool = False
) -> list[tuple[GradientSize, int]]:
    """Return each bucket's bytes, and the bytes of all gradients that are ready when it is, in the order of sending.

    Parameters
    ----------
    sizes : of each parameter's gradient, in the order of the parameters; backward makes them in the reversed order. (Torch
        sees the true order, in which a convolution's weight comes before its bias: a bias may lie one bucket further.)
    kept_as_built : filled in the order of the parameters and sent from the last bucket on, as DistributedDataParallel
        does with ``find_unused_parameters``.
    """
    count = len(sizes)
    if kept_as_built:
        buckets = sorted(assign_buckets(sizes, bucket_mb), reverse=True)
    else:
        buckets = [
            [count - 1 - i for i in bucket] for bucket in assign_buckets(sizes[::-1], bucket_mb)
        ]
    ready = [sum(sizes[min(bucket) :]) for bucket in buckets]
    return [
        (
            GradientSize(
                (sum(sizes[i] // itemsize(sizes[i]) for i in bucket),), itemsize(sizes[bucket[0]])
            ),
            max(ready[: index + 1]),
        )
        for index, bucket in enumerate(buckets)
    ]


def bucket_operations(
    sizes: Sequence[int], bucket_mb: float | None, *, kept_as_built: bool = False
) -> list[Operation]:
    """Return an all_reduce for each bucket, with the copy into it."""
    return [
        Operation("all_reduce", size, copied_bytes=size, ready_bytes=ready)
        for size, ready in bucket_sizes(sizes, bucket_mb, kept_as_built=kept_as_built)
    ]
