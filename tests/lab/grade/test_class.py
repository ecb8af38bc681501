"""Whole classes through the sandbox and the audit: right ones, faulty ones, and cheats."""

import pytest

from lab.cli import main
from lab.grade import sandbox
from tests.helpers.audited import read_cases
from tests.lab.grade.classes import ONE_PART, RUBRIC, make_class, read_class

REFUSED = sandbox.refused()
pytestmark = [
    pytest.mark.skipif(bool(REFUSED), reason=str(REFUSED)),
]
CHEAT = """\
import json, os
folder = json.loads(os.environ["LAB_AUDIT"])["folder"]
"""
RIGHT = next(case.script for case in read_cases() if case.name == "right_all_reduce")
SUM = next(case.script for case in read_cases() if case.name == "sum_all_reduce")
FORGED = f"""{SUM}
    import glob, json, os, shutil
    folder = json.loads(os.environ["LAB_AUDIT"])["folder"]
    for path in glob.glob(folder + "/*.jsonl"):
        shutil.copy(path, path.replace(".jsonl", "7.jsonl"))
"""
REPLACED = SUM.replace(
    "def train(", "real = dist.all_reduce\ndist.all_reduce = lambda t: real(t)\n\n\ndef train("
)
NONSENSE = SUM.replace(
    "def train(args):",
    """\
def train(args):
    import json, os
    folder = json.loads(os.environ["LAB_AUDIT"])["folder"]
    open(f"{folder}/{os.getpid()}.jsonl", "a").write("nonsense\\n")
""",
)
KILLS = "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\n"
FORKS = "import os\nwhile True:\n    os.fork()\n"
FILLS = "open('/tmp/big', 'wb').write(b'x' * 10**9)\n"
PRINTS = "while True:\n    print('x' * 10**6)\n"
EATS = "import time\nkept = []\nwhile True:\n    kept.append(b'x' * 10**8)\n    time.sleep(0.1)\n"
CHEATS = {
    "forged": (FORGED, "two processes wrote the records of one rank"),
    "replaced": (REPLACED, "replaced what the audit watches: all_reduce"),
    "nonsense": (NONSENSE, "the records make no sense"),
    "kills": (KILLS, "SIGKILL"),
    "fills": (FILLS, "No space left on device"),
    "forks": (FORKS, "BlockingIOError"),
    "prints": (PRINTS, "printed more than"),
    "eats": (EATS, "MemoryError"),
}


@pytest.fixture
def grade(tmp_path, monkeypatch, capsys):
    """Grade a class, given as ``make_class`` takes it; return the rows of class.csv."""
    monkeypatch.chdir(tmp_path)

    def run(rubric, submissions, *flags):
        (tmp_path / "rubric.toml").write_text(rubric)
        folders = make_class(tmp_path / "class", submissions)
        words = ["grade", *folders, "--rubric", "rubric.toml", "--out", "out", *flags]
        assert main([str(word) for word in words]) == 0
        print(capsys.readouterr().out)
        return read_class(tmp_path / "out")

    return run


@pytest.mark.slow
def test_right_ones_get_full_marks_faulty_ones_lose_theirs_and_cheats_are_for_a_person(grade):
    cases = {
        "right": "right_all_reduce",
        "gather": "right_gather_scatter",
        "sum": "sum_all_reduce",
        "early-clip": "clip_norm_torch",
        "forged": FORGED,
        "replaced": REPLACED,
    }
    rows = grade(ONE_PART, {name: {"part2": case} for name, case in cases.items()}, "--jobs", "2")
    assert {name: row["part2"] for name, row in rows.items()} == {
        "right": "6",
        "gather": "6",
        "sum": "0",
        "early-clip": "6",
        "forged": "",
        "replaced": "",
    }
    assert rows["sum"]["faults"] == "part2:sum-not-mean"
    for name in ("forged", "replaced"):
        assert CHEATS[name][1] in rows[name]["by hand"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_class_of_thirty_is_graded_as_its_cases_say(grade):
    usable = [
        case
        for case in read_cases()
        if case.base in ("right_all_reduce", "right_ddp")
        and case.forked
        and not case.flags
        and case.sizes == (2, 3)
        and "|" not in case.finds
        and not case.finds & {"clipped-before-averaging"}
    ]
    faulty = [case for case in usable if case.finds]
    right = [case for case in usable if not case.finds and case.verdict == "yes"]
    chosen = [*{min(case.finds): case for case in faulty}.values()][:16]
    chosen += right[:: len(right) // 6][:6]
    submissions = {case.name: {"part2": case.name, "part3": "right_ddp"} for case in chosen}
    submissions |= {
        name: {"part2": script, "part3": "right_ddp"} for name, (script, _) in CHEATS.items()
    }
    assert len(submissions) == 30
    rows = grade(RUBRIC, submissions)
    wrong = {}
    for case in chosen:
        row = rows[case.name]
        lost = {"literal-divisor": "3"}.get(min(case.finds, default=""), "0")
        expected = (lost if case.finds else "6", "4")
        if (row["part2"], row["part3"]) != expected:
            wrong[case.name] = row
    for name, (_, why) in CHEATS.items():
        row = rows[name]
        if (row["part2"], row["part3"]) != ("", "4") or why not in row["by hand"]:
            wrong[name] = row
    assert wrong == {}
