"""The rubrics of courses whose functions a driver calls: right solutions, and known mistakes.

The driver and the rubric of docs/courses.md stand for a course of one's own.
"""

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lab.audit.audit import examine
from lab.audit.command import AuditCommand
from lab.audit.runner import RunSettings, run_audit_size
from lab.cli import main
from lab.grade.driven import PLACEHOLDER, STEPS, driven_facts, driver_words
from lab.grade.facts import Facts
from lab.grade.findings import entries
from lab.grade.judge import judged, new_run
from lab.grade.marks import mark_part
from lab.grade.rubric import load_rubric, rubric_text
from tests.helpers.audited import start_forked
from tests.helpers.documentation import Page
from tests.helpers.paths import ROOT
from tests.helpers.processes import wait_for_fork_server

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
            "torchs-own": (
                [
                    (
                        "return Bucketed(module, bucket_size_mb)",
                        "return nn.parallel.DistributedDataParallel(module)",
                    ),
                    ("    ddp_model.finish()", "    pass"),
                    ("    ddp_model.start()", "    pass"),
                ],
                "",
                None,
            ),
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
            "torchs-own": (
                [
                    (
                        "return Sharded(params, optimizer_cls, **kwargs)",
                        "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero\n"
                        "    return Zero([*params], optimizer_cls, **kwargs)",
                    )
                ],
                "",
                None,
            ),
            "not-sent": (
                [("dist.broadcast(parameter.data, src=owner)", "pass")],
                "shard-not-sent",
                0,
            ),
            "first-group": (
                [
                    (
                        "self.inner_groups.append(group)",
                        "own_rate = group if self.inner_groups else {'params': own}\n"
                        "        self.inner_groups.append({'lr': group['lr'], **own_rate})",
                    )
                ],
                "groups-ignored",
                11.25,
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
            "by-files": (
                [
                    (
                        "    chunks = send",
                        "    import pathlib, time\n"
                        "    place = pathlib.Path(__file__).parent\n"
                        "    part = place / f'{len(send)}-{rank}.new'\n"
                        "    torch.save(send, part)\n"
                        "    part.rename(place / f'{len(send)}-{rank}')\n"
                        "    wanted = [place / f'{len(send)}-{other}' for other in range(size)]\n"
                        "    while not all(path.exists() for path in wanted):\n"
                        "        time.sleep(0.01)\n"
                        "    send.copy_(sum(map(torch.load, wanted)) / size)\n    return\n"
                        "    chunks = send",
                    )
                ],
                "",
                None,
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


IN_THE_SANDBOX = {"optimizer": "first-group", "training": "each-batch"}
"""What runs in the sandbox on 2 ranks: parts, and a mistake of each."""


def ranks_of(part):
    """Return the number of ranks on which all mistakes of a part show."""
    return 2 if part in ("syncbn", "training") else 3


def solutions_of(part):
    """Return the right solution, and one for each mistake, by name."""
    file, _, mistakes = MISTAKES[part]
    right = (SOLUTIONS / ("cs336.py" if part in COURSES else Path(file).name)).read_text()
    solutions = {"right": right}
    for name, (edits, _, _) in mistakes.items():
        solutions[name] = right
        for old, new in edits:
            assert old in right, old
            solutions[name] = solutions[name].replace(old, new)
    return solutions


def expected_of(part):
    """Return the findings and the marks of each solution."""
    _, points, mistakes = MISTAKES[part]
    expected = {name: (faults, marks) for name, (_, faults, marks) in mistakes.items()}
    return expected | {"right": ("", points)}


def one_part(part, ranks):
    """Return a shipped rubric with this part alone, on one number of ranks, without mounts."""
    text = rubric_text(COURSES.get(part, "efficient-dl"))
    text = re.sub(r"\[mounts\][^[]*", "", text)
    text = re.sub(r"^ranks = .*\n", "", text, flags=re.MULTILINE)
    head, *sections = re.split(r"(?=^\[parts\.|^\[findings\.)", text, flags=re.MULTILINE)
    [section] = [section for section in sections if section.startswith(f"[parts.{part}]")]
    findings = [section for section in sections if section.startswith("[findings.")]
    one = section.replace("points = ", f"ranks = [{ranks}]\npoints = ")
    return "\n".join([head, *findings, one])


def checked(rubric, part, script, size):
    """Check a file as `lab grade` does, but in forked ranks; return its findings and marks."""
    words = shlex.join(driver_words(Path(rubric.driver), part))
    command = rubric.parts[part].command.replace(PLACEHOLDER, words)
    words = AuditCommand(tuple(shlex.split(command.replace("{script}", script.name))))
    logs = script.parent / "logs"
    logs.mkdir()
    secret = new_run(logs, size)
    settings = RunSettings(steps=STEPS, limit_seconds=60, cwd=script.parent, inputs=secret.inputs)
    wait_for_fork_server()
    run = run_audit_size(words, size, logs, settings, start=start_forked)
    result = examine(words, [run], None, asked=[size], rate=None)
    [verdict] = judged(rubric.driver, part, [secret])
    audit = driven_facts(result, {size: verdict}, entries(rubric.findings))
    seen = Facts(key="", audit=audit, used=[], whole=False, doubts=[], seconds=1.0)
    names = " ".join(finding.name for finding in audit.findings)
    return names, mark_part(part, seen, rubric).marks


def checked_solution(part, text, folder):
    """Check a solution of a shipped course."""
    size = ranks_of(part)
    script = folder / MISTAKES[part][0]
    script.parent.mkdir(parents=True)
    script.write_text(text)
    (folder / "rubric.toml").write_text(one_part(part, size))
    return checked(load_rubric(str(folder / "rubric.toml")), part, script, size)


# --- a course of a reader's own ---

AVERAGES = """\
import torch
import torch.distributed as dist


def average_gradients(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    whole = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    for gradient, part in zip(gradients, whole.split([one.numel() for one in gradients])):
        gradient.copy_(part.view_as(gradient))
"""
BY_TWO = """\
import torch.distributed as dist


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
"""


@pytest.fixture
def own_course(tmp_path, monkeypatch):
    """Write the driver and the rubric of the page into an empty folder, with two submissions."""
    blocks = dict(Page(ROOT / "docs/courses.md").blocks())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "week5.py").write_text(blocks["python"])
    (tmp_path / "week5.toml").write_text(blocks["text"])
    for name, text in {"ada": AVERAGES, "bob": BY_TWO}.items():
        (tmp_path / "submissions" / name).mkdir(parents=True)
        (tmp_path / "submissions" / name / "average.py").write_text(text)
    return tmp_path


def test_a_driver_of_a_readers_own_marks_a_right_and_a_wrong_submission(own_course):
    assert 20 <= len((own_course / "week5.py").read_text().splitlines()) <= 55
    text = (own_course / "week5.toml").read_text().replace("points = 4", "ranks = [3]\npoints = 4")
    (own_course / "three.toml").write_text(text)
    rubric = load_rubric("three.toml")
    seen = {
        name: checked(rubric, "average", own_course / f"submissions/{name}/average.py", 3)
        for name in ("ada", "bob")
    }
    assert seen == {"ada": ("", 4), "bob": ("literal-divisor several-messages", 1)}


@pytest.mark.slow
def test_the_command_of_the_page_marks_them_in_the_sandbox_on_two_and_three_ranks(own_course):
    folders = [str(folder) for folder in sorted((own_course / "submissions").iterdir())]
    assert main(["grade", *folders, "--rubric", "week5.toml"]) == 0
    with (own_course / "grades/class.csv").open() as table:
        rows = {row["submission"]: row for row in csv.DictReader(table)}
    assert {name: row["average"] for name, row in rows.items()} == {"ada": "4", "bob": "1"}
    assert set(rows["bob"]["faults"].split()) == {
        "average:literal-divisor",
        "average:several-messages",
    }
    page = (own_course / "grades/submissions/bob/index.html").read_text()
    assert "divided by 2" in page
    assert "average.py:6" in page
    assert "Copy all gradients into one tensor" in page


FORGED = """\
import json
OLD = {"found": [], "passed": ["the mean", "one message"], "end": "done", "stopped": ""}
NEW = [{"check": number, "values": ["dict", []], "error": None} for number in (0, 1)]
LINES = ["lab-grade-report " + json.dumps(report) for report in [OLD, *NEW]]
"""
# Files that do not average, and what they do to the runner instead.
FORGERIES = {
    "prints reports and leaves": f"""\
import os
{FORGED}
print(*LINES, sep="\\n", flush=True)
os._exit(0)
""",
    "prints reports at the end": f"""\
import atexit
{FORGED}
def average_gradients(model):
    pass
atexit.register(print, *LINES, sep="\\n", flush=True)
""",
    "gives all ranks one seed": """\
import sys
import torch
def average_gradients(model):
    frame = sys._getframe()
    while "rank" not in frame.f_locals:
        frame = frame.f_back
    torch.manual_seed(frame.f_locals["rank"].common)
    object.__setattr__(frame.f_locals["rank"], "seed", frame.f_locals["rank"].common)
""",
    "replaces what compares": """\
import gc
import types
for module in gc.get_objects():
    if isinstance(module, types.ModuleType) and hasattr(module, "averaged"):
        module.averaged = lambda *arguments: iter(())
        module.close = lambda *arguments: True
def average_gradients(model):
    pass
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGERIES)
def test_what_a_students_file_does_to_the_runner_earns_nothing(own_course, name):
    script = own_course / "submissions/ada/average.py"
    script.write_text(FORGERIES[name])
    assert checked(load_rubric("week5.toml"), "average", script, 2)[1] in (None, 0)


@pytest.mark.slow
def test_a_driver_can_be_tried_by_hand(own_course):
    words = ["week5.py", "average", "submissions/bob/average.py", "--ranks", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "lab.grade.judge", *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1, done.stderr
    assert "literal-divisor: step 1:" in done.stdout
    assert "several-messages: 4 in a step" in done.stdout


# --- the courses that are shipped ---


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in MISTAKES if part != "training"])
def test_a_right_solution_has_full_marks_and_each_mistake_its_finding_and_price(part, tmp_path):
    solutions = solutions_of(part)
    seen = {name: checked_solution(part, text, tmp_path / name) for name, text in solutions.items()}
    assert seen == expected_of(part)


def graded(part, names, folder, *, ranks):
    """Grade these solutions in the sandbox; return the findings and marks of each."""
    solutions = solutions_of(part)
    for name in names:
        place = folder / "class" / name / MISTAKES[part][0]
        place.parent.mkdir(parents=True)
        place.write_text(solutions[name])
    (folder / "rubric.toml").write_text(one_part(part, ranks))
    folders = [str(folder / "class" / name) for name in names]
    assert main(["grade", *folders, "--rubric", "rubric.toml"]) == 0
    with (folder / "grades/class.csv").open() as table:
        rows = {row["submission"]: row for row in csv.DictReader(table)}
    print(rows)
    return {
        name: (row["faults"].replace(f"{part}:", ""), float(row[part]) if row[part] else None)
        for name, row in rows.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", IN_THE_SANDBOX)
def test_the_sandbox_gives_the_same_marks(part, tmp_path, monkeypatch):
    """What differs from a forked rank is the same for every driver: one mistake shows it."""
    monkeypatch.chdir(tmp_path)
    names = ["right", IN_THE_SANDBOX[part]]
    assert graded(part, names, tmp_path, ranks=2) == {
        name: expected_of(part)[name] for name in names
    }


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", MISTAKES)
def test_the_sandbox_gives_every_solution_the_same_marks(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    marks = graded(part, [*solutions_of(part)], tmp_path, ranks=ranks_of(part))
    assert marks == expected_of(part)
