"""A solution of each lesson: what replaces each ``...`` of its skeleton, in its order."""

import difflib
import re

from lab.learn.course import Lesson
from lab.learn.lessons.find_the_bug import BLIND

SOLUTIONS = {
    1: [
        "time.perf_counter() - began",
        "optimizer.zero_grad()",
        "loss.backward()",
        "optimizer.step()",
        *("(64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10) * 4 / 1e6", "29", "1.89"),
    ],
    2: [
        *("0", "size", "rank", "GLOBAL_BATCH // size"),
        "loader.sampler.set_epoch(epoch)",
        *('"nothing"', "5 * 360 - 1797", "5 * 64"),
    ],
    3: [
        "dist.gather(parameter.grad, arriving, dst=0)",
        "[sum(arriving) / size] * size",
        "dist.scatter(parameter.grad, means, src=0)",
        *("3 / 2", "2 * 2 * 36.92", "2 * 34"),
    ],
    4: [
        "2 * (nodes - 1) * gradient_mb * 8 / 1000 / rate_gbit",
        *("2 * 7 * 36.92 * 8 / 1000", "7 / 3", "0.6 / (0.6 / 4 + 1.772)"),
    ],
    5: [
        *("rank - step", "rank - step - 1", "rank - step + 1", "rank - step"),
        *("2 * 4", "2 * 7 * 0.5", "34 * 2 * 7 * 0.5"),
    ],
    6: [
        "0",
        "dist.all_reduce(flat, async_op=True)",
        "work.wait()",
        "dist.get_world_size()",
        "len(self.buckets[number])",
        *("4.7 + 2.4 + 1.2 + 0.3", "0.442 - 0.09", '"later"'),
    ],
    7: [
        "sum(values) / len(values)",
        "sum((value - mean) ** 2 for value in values) / len(values)",
        "(value - mean) / (variance + 1e-5) ** 0.5",
        "gradient += part / shards",
        "torch.stack([torch.ones_like(x), x.double(), x.double() ** 2]).sum(1)",
        *("dist.all_reduce(sums)", "sums[0]", "sums[1] / count", "sums[2] / count - mean**2"),
        "variance * count / (count - 1)",
        *("(x - mean) / std", "(g * z).sum(0)", "g.sum(0)"),
        "torch.stack([grad_bias, grad_weight])",
        "dist.all_reduce(sums)",
        "weight / std * (g - sums[0] / count - z * sums[1] / count)",
        *("(1 - 5) / 14**0.5", "(11 - 8) / 9**0.5", '"shards"'),
        *("(0 - 1 / 4 - 6 / 14**0.5 * -4 / 14**0.5 / 4) / 14**0.5", "8 * 2 * 6 * 0.2"),
    ],
    8: [
        "step()",
        "clock() - began",
        "math.floor(n / 2 - 0.98 * n**0.5)",
        "math.ceil(n / 2 + 0.98 * n**0.5)",
        *("1.5 * 36.92 * 8 / 1000 / 0.15", "0.888", "1 / 0.95"),
    ],
    9: [*(f'"{finding}"' for finding in BLIND.values()), "2", "4", "2"],
    10: [
        "gave_up.index(False) if any(gave_up) else None",
        *('"at once"', '"limit"', '"no"'),
        "LIMIT_SECONDS",
    ],
    11: [
        "DistributedDataParallel(build_model())",
        *("model.no_sync()", "MICRO_BATCHES"),
        *("dist.get_rank() == 0", "model.module.state_dict()"),
        *("9.44 + 0.02", "4 * 2 * 3 / 4 * 36.92", '"module"'),
    ],
}


def solution_of(lesson: Lesson) -> str:
    """Return the lesson's skeleton with a solution in its blanks."""
    texts = iter(SOLUTIONS[lesson.number])
    skeleton = lesson.skeleton.read_text(encoding="utf-8")
    return re.sub(r"\.\.\.", lambda _: next(texts), skeleton)


def beside(own: str, lesson: Lesson) -> str:
    """Return the lines in which a solution differs from the student's file, a unified diff.

    own : the text of the student's file.
    """
    lines = difflib.unified_diff(
        own.splitlines(),
        solution_of(lesson).splitlines(),
        f"{lesson.file} (yours)",
        "a solution",
        n=1,
        lineterm="",
    )
    return "\n".join(lines)
