"""The rubrics of courses whose functions a driver calls: right solutions, and known mistakes."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.grade.rubric import rubric_text

SOLUTIONS = Path(__file__).with_name("solutions")
# By part: the file, and the mistakes: the edits (from, to), the findings, and the marks.
MISTAKES = {
    "individual": (
        "tests/adapters.py",
        5,
        {
            "nothing-broadcast": (
                [("dist.broadcast(parameter.data, src=0)", "pass")],
                "different-start",
                0,
            ),
            "sum": ([("parameter.grad /= dist.get_world_size()", "pass")], "sum-not-mean", 0),
            "by-two": ([("grad /= dist.get_world_size()", "grad /= 2")], "literal-divisor", 2.5),
            "afterwards": (
                [
                    ("register_post_accumulate_grad_hook(self.send)", "grad = None"),
                    (
                        "        for work, parameter in self.works:",
                        "        for own in self.module.parameters():\n"
                        "            if own.requires_grad:\n"
                        "                self.send(own)\n"
                        "        for work, parameter in self.works:",
                    ),
                ],
                "not-overlapped",
                3.75,
            ),
            "frozen-sent": (
                [("            if parameter.requires_grad:\n                parameter.reg", "            if True:\n                parameter.reg")],
                "raises",
                2.5,
            ),
        },
    ),
    "bucketed": (
        "tests/adapters.py",
        8,
        {
            "bytes": ([("bucket_size_mb * 2**20", "bucket_size_mb")], "bucket-size", 4),
            "never-counted-again": (
                [("    ddp_model.start()", "    pass")],
                "own-gradient",
                0,
            ),
        },
    ),
    "optimizer": (
        "tests/adapters.py",
        15,
        {
            "whole-state": ([("if owner == dist.get_rank()", "if True")], "state-not-sharded", 7.5),
            "not-sent": ([("dist.broadcast(parameter.data, src=owner)", "pass")], "shard-not-sent", 0),
            "one-group": (
                [("self.inner_groups.append(group)", 'self.inner_groups.append({"params": own})')],
                "groups-ignored",
                11.25,
            ),
        },
    ),
    "syncbn": (
        "hw/syncbn.py",
        5,
        {
            "alone": (
                [("        dist.all_reduce(sums)\n        total = ", "        total = ")],
                "wrong-output wrong-input-gradient",
                0,
            ),
            "two-messages": (
                [("dist.all_reduce(sums)\n        total", "for part in sums:\n            dist.all_reduce(part)\n        total")],
                "several-messages",
                3,
            ),
            "local-backward": (
                [("        dist.all_reduce(sums)\n        return", "        return")],
                "wrong-input-gradient",
                0,
            ),
            "momentum": ([("(mean, momentum)", "(mean, 1 - momentum)")], "running-statistics", 3.75),
        },
    ),
    "ring": (
        "hw/allreduce.py",
        3,
        {
            "sum": ([("    send /= size", "    pass")], "wrong-average", 0),
            "stub": ([("    chunks = send", "    return\n    chunks = send")], "wrong-average", 0),
            "collective": (
                [("    chunks = send", "    dist.all_reduce(send)\n    send /= size\n    return\n    chunks = send")],
                "not-a-ring",
                1.5,
            ),
            "whole-tensors": (
                [
                    (
                        "    chunks = send",
                        "    total = send.clone()\n    passed = send.clone()\n"
                        "    for step in range(size - 1):\n"
                        "        work = dist.isend(passed.clone(), (rank + 1) % size)\n"
                        "        dist.recv(passed, (rank - 1) % size)\n        work.wait()\n"
                        "        total += passed\n    send.copy_(total / size)\n    return\n"
                        "    chunks = send",
                    )
                ],
                "too-many-bytes",
                1.5,
            ),
            "equal-only": (
                [("    chunks = send", "    assert len(send) % size == 0\n    chunks = send")],
                "raises",
                1.5,
            ),
        },
    ),
    "training": (
        "hw/ddp_cifar100.py",
        2,
        {
            "each-batch": (
                [
                    ("            if number", "            average_gradients(model)\n            if number"),
                    ("                average_gradients(model)\n", ""),
                ],
                "needless-communication",
                1,
            )
        },
    ),
}
COURSES = {"individual": "cs336", "bucketed": "cs336", "optimizer": "cs336"}


def one_part(part):
    """Return a shipped rubric with this part alone, on few ranks, without mounts."""
    text = rubric_text(COURSES.get(part, "efficient-dl"))
    text = re.sub(r"\[mounts\][^[]*", "", text)
    head, *sections = re.split(r"(?=^\[parts\.)", text, flags=re.MULTILINE)
    [section] = [section for section in sections if section.startswith(f"[parts.{part}]")]
    if part in COURSES:
        section = section.replace("points = ", "ranks = [3]\npoints = ")
    return head + section


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", MISTAKES)
def test_a_right_solution_has_full_marks_and_each_mistake_its_finding_and_price(
    grade_files, part
):
    file, points, mistakes = MISTAKES[part]
    source = "cs336.py" if part in COURSES else Path(file).name
    right = (SOLUTIONS / source).read_text()
    submissions = {"right": {file: right}}
    for name, (edits, _, _) in mistakes.items():
        text = right
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new)
        submissions[name] = {file: text}
    rows = grade_files(submissions, rubric=one_part(part)).rows
    expected = {name: (faults, f"{marks:g}") for name, (_, faults, marks) in mistakes.items()}
    expected["right"] = ("", f"{points:g}")
    seen = {
        name: (row["faults"].replace(f"{part}:", ""), row[part]) for name, row in rows.items()
    }
    assert seen == expected
