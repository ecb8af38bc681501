"""Whole classes through the sandbox and the audit: right ones, faulty ones, and cheats."""

import pytest

from tests.helpers.audited import read_cases
from tests.lab.grade.conftest import RUBRIC

CASES = {case.name: case for case in read_cases()}
SUM = CASES["sum_all_reduce"].script
RECORDS = 'import glob, json, os, shutil\nfolder = json.loads(os.environ["LAB_AUDIT"])["folder"]\n'
ORIGINAL = "def train(args):\n"
CHEATS = {  # the script, and what a person is told
    "forged": (
        f"{RECORDS}{SUM}\n    for path in glob.glob(folder + '/*.jsonl'):\n"
        "        shutil.copy(path, path.replace('.jsonl', '7.jsonl'))\n",
        "two processes wrote the records of one rank",
    ),
    "replaced": (
        SUM.replace(
            ORIGINAL, f"real = dist.all_reduce\ndist.all_reduce = lambda t: real(t)\n{ORIGINAL}"
        ),
        "replaced what the audit watches: all_reduce",
    ),
    "nonsense": (
        f"{RECORDS}open(f'{{folder}}/{{os.getpid()}}.jsonl', 'a').write('nonsense\\n')\n{SUM}",
        "the records make no sense",
    ),
    "kills": ("import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\n", "SIGKILL"),
    "fills": ("open('/tmp/big', 'wb').write(b'x' * 10**9)\n", "No space left on device"),
    "forks": ("import os\nwhile True:\n    os.fork()\n", "BlockingIOError"),
    "prints": ("while True:\n    print('x' * 10**6)\n", "printed more than"),
    "eats": ("kept = []\nwhile True:\n    kept.append(b'x' * 10**8)\n", "emory"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_right_ones_get_full_marks_faulty_ones_lose_theirs_and_cheats_are_for_a_person(grade):
    scripts = {name: CHEATS[name][0] for name in ("forged", "replaced")} | {
        "right": "right_all_reduce",
        "gather": "right_gather_scatter",
        "sum": "sum_all_reduce",
        "early-clip": "clip_norm_torch",
    }
    on_two_ranks = RUBRIC.split("[parts.part3]")[0].replace("points", "ranks = [2]\npoints")
    classes = {name: {"part2": one} for name, one in scripts.items()}
    rows = grade(classes, rubric=on_two_ranks).rows
    marks = {name: row["part2"] for name, row in rows.items() if row["part2"]}
    assert marks == {"right": "6", "gather": "6", "sum": "0", "early-clip": "6"}
    assert rows["sum"]["faults"] == "part2:sum-not-mean"
    assert all(CHEATS[name][1] in rows[name]["by hand"] for name in ("forged", "replaced"))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_class_of_thirty_is_graded_as_its_cases_say(grade):
    usable = [
        case
        for case in CASES.values()
        if case.base in ("right_all_reduce", "right_ddp")
        and not case.flags
        and case.sizes == (2, 3)
    ]
    right = [case for case in usable if not case.finds and case.verdict == "yes"]
    faults = {min(case.finds): case for case in usable if len(case.finds) == 1}
    faults.pop("clipped-before-averaging")  # accepted
    chosen = [*[*faults.values()][:15], *right[:: len(right) // 7][:7]]
    class_of_30 = {case.name: {"part2": case.name} for case in chosen}
    class_of_30 |= {name: {"part2": script} for name, (script, _) in CHEATS.items()}
    rows = grade({name: one | {"part3": "right_ddp"} for name, one in class_of_30.items()}).rows
    assert len(rows) == 30
    assert {row["part3"] for row in rows.values()} == {"4"}
    expected = {case.name: "0" if case.finds else "6" for case in chosen}
    unsure = [faults[one].name for one in ("group-unused", "different-batch-counts")]
    expected |= dict.fromkeys([*CHEATS, *unsure], "") | {faults["literal-divisor"].name: "3"}
    assert {name: row["part2"] for name, row in rows.items()} == expected
    assert [name for name, (_, why) in CHEATS.items() if why not in rows[name]["by hand"]] == []
