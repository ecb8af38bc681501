"""Messages beside a pass that computes: what of them it hides. Imports no torch."""

from collections.abc import Sequence
from itertools import accumulate


def exposed_seconds(
    messages: Sequence[tuple[float | None, float]],
    backward_seconds: float,
    overlap_cost: float = 0.0,
) -> tuple[float, float]:
    """Return the seconds that messages add to backward, and those that they take after it.

    messages : in order, after how many seconds of backward each may begin (None: after all of it),
        and its own seconds. They go one after the other, c_k = max(r_k, c_{k-1}) + t_k. While one
        is under way, backward computes at a speed of 1 - ``overlap_cost``.

    A forward that waits for messages is the same seen in a mirror: time runs backwards, so the last
    message comes first, and may begin once all of forward that needs it is done. Its t_k is then
    the time from the end of the message before to its own.
    """
    now = computed = 0.0  # seconds on the clock, and how many seconds' worth of backward are done
    end_of_backward: float | None = None
    speed = 1 - overlap_cost
    for ready, seconds in messages:
        # r_k: with no message under way, backward computes at full speed until this one's gradients
        # are ready.
        wait = max(0.0, (backward_seconds if ready is None else ready) - computed)
        now += wait
        computed += wait
        left = backward_seconds - computed
        if end_of_backward is None and left <= seconds * speed:  # backward ends during this message
            end_of_backward = now + (left / speed if left else 0.0)
        now += seconds
        computed = min(backward_seconds, computed + seconds * speed)
    if end_of_backward is None:
        end_of_backward = now = now + backward_seconds - computed
    return end_of_backward - backward_seconds, now - end_of_backward


def ends_in_pairs(seconds: Sequence[float]) -> list[float]:
    """Return when each message ends if all are started at once, none before the one before it.

    Gloo has two threads. Two messages at a time share the link, so the first one of several takes
    up to twice its own ``seconds``. The last one's end is the same as one after the other.
    """
    now, ends = 0.0, [0.0] * len(seconds)
    waiting, under_way = list(enumerate(seconds)), list[tuple[float, int]]()
    while waiting or under_way:
        while waiting and len(under_way) < 2:
            index, left = waiting.pop(0)
            under_way.append((left, index))
        shortest, ended = min(under_way)
        now += shortest * len(under_way)
        ends[ended] = now
        under_way = [(left - shortest, index) for left, index in under_way if index != ended]
    return list(accumulate(ends, max))
