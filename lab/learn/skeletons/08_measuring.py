"""Lesson 8: measure a step so that others can believe it.

Run it: python learn/08_measuring.py
"""

import math
import time

import torch


def time_steps(step, *, warmup, steps, clock=time.perf_counter):
    """Return the seconds of each of `steps` calls of step(), after `warmup` calls."""
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(steps):
        began = clock()
        ...  # one step
        seconds.append(...)
    return seconds


def median_interval(seconds):
    """Return (low, median, high): the median, and the interval that holds the true one in 95 %.

    Of n sorted values, the true median lies between numbers n/2 - 0.98 sqrt(n), rounded down, and
    n/2 + 0.98 sqrt(n), rounded up (counted from 1), in 95 of 100 cases: how many values lie below
    the true median is like the heads of n coins.
    """
    values, n = sorted(seconds), len(seconds)
    low = max(1, ...)
    high = min(n, ...)
    middle = (values[(n - 1) // 2] + values[n // 2]) / 2
    return values[low - 1], middle, values[high - 1]


ANSWERS = {
    # Unshaped, on one machine, 4 ranks all-reduce 36.92 MB in 0.15 s. A link of which rate in
    # Gbit/s would be as fast? A ring sends 2(N-1)/N of the bytes over each link.
    "a": ...,
    # 40 steps, then 11.6 % of 10,000 test images are right: the share varies by sqrt(p(1-p)/n). By
    # how many percentage points must two such scripts differ to be told apart in 95 %? The
    # difference of two varies sqrt(2) times as much, and 95 % is 1.96 times that.
    "b": ...,
    # 5 % of a step is exposed communication. How many times as fast is it on an infinitely fast
    # network, at most?
    "c": ...,
}

if __name__ == "__main__":
    one, other = torch.rand(2, 600, 600)
    seconds = time_steps(lambda: one @ other, warmup=3, steps=40)
    low, middle, high = median_interval(seconds)
    print(f"median {1e3 * middle:.2f} ms, 95 % [{1e3 * low:.2f}, {1e3 * high:.2f}]")
    print(f"mean {1e3 * sum(seconds) / len(seconds):.2f} ms, slowest {1e3 * max(seconds):.2f} ms")
