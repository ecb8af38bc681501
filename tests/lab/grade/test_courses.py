"""The rubrics of courses whose functions a driver calls: right solutions, and known mistakes."""

import csv
import re
from pathlib import Path

import pytest

from lab.cli import main
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
                [
                    (
                        "            if parameter.requires_grad:\n                parameter.reg",
                        "            if True:\n                parameter.reg",
                    )
                ],
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
            "not-sent": (
                [("dist.broadcast(parameter.data, src=owner)", "pass")],
                "shard-not-sent",
                0,
            ),
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
                "wrong-output",
                0,
            ),
            "two-messages": (
                [
                    (
                        "dist.all_reduce(sums)\n        total",
                        "for part in sums:\n            dist.all_reduce(part)\n        total",
                    )
                ],
                "several-messages",
                3,
            ),
            "local-backward": (
                [("        dist.all_reduce(sums)\n        return", "        return")],
                "wrong-input-gradient",
                0,
            ),
            "momentum": (
                [("(mean, momentum)", "(mean, 1 - momentum)")],
                "running-statistics",
                3.75,
            ),
        },
    ),
    "ring": (
        "hw/allreduce.py",
        3,
        {
            "sum": ([("    send /= size", "    pass")], "wrong-average", 0),
            "stub": ([("    chunks = send", "    return\n    chunks = send")], "wrong-average", 0),
            "collective": (
                [
                    (
                        "    chunks = send",
                        "    dist.all_reduce(send)\n    return send.div_(size)\n    chunks = send",
                    )
                ],
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
                2.25,
            ),
        },
    ),
    "training": (
        "hw/ddp_cifar100.py",
        2,
        {
            "each-batch": (
                [
                    (
                        "            if number",
                        "            average_gradients(model)\n            if number",
                    ),
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
    """Return a shipped rubric with this part alone, on one number of ranks, without mounts."""
    text = rubric_text(COURSES.get(part, "efficient-dl"))
    text = re.sub(r"\[mounts\][^[]*", "", text)
    text = re.sub(r"^ranks = .*\n", "", text, flags=re.MULTILINE)
    head, *sections = re.split(r"(?=^\[parts\.)", text, flags=re.MULTILINE)
    [section] = [section for section in sections if section.startswith(f"[parts.{part}]")]
    ranks = 2 if part in ("syncbn", "training") else 3
    return head + section.replace("points = ", f"ranks = [{ranks}]\npoints = ")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", MISTAKES)
def test_a_right_solution_has_full_marks_and_each_mistake_its_finding_and_price(
    part, tmp_path, monkeypatch
):
    file, points, mistakes = MISTAKES[part]
    right = (SOLUTIONS / ("cs336.py" if part in COURSES else Path(file).name)).read_text()
    solutions = {"right": right}
    for name, (edits, _, _) in mistakes.items():
        solutions[name] = right
        for old, new in edits:
            assert old in right, old
            solutions[name] = solutions[name].replace(old, new)
    monkeypatch.chdir(tmp_path)
    for name, text in solutions.items():
        place = tmp_path / "class" / name / file
        place.parent.mkdir(parents=True)
        place.write_text(text)
    (tmp_path / "rubric.toml").write_text(one_part(part))
    folders = [str(tmp_path / "class" / name) for name in solutions]
    assert main(["grade", *folders, "--rubric", "rubric.toml"]) == 0
    with (tmp_path / "grades/class.csv").open() as table:
        rows = {row["submission"]: row for row in csv.DictReader(table)}
    print(rows)
    expected = {name: (faults, f"{marks:g}") for name, (_, faults, marks) in mistakes.items()}
    expected["right"] = ("", f"{points:g}")
    seen = {name: (row["faults"].replace(f"{part}:", ""), row[part]) for name, row in rows.items()}
    assert seen == expected
