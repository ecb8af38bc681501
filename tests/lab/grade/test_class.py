"""Whole classes through the sandbox and the audit: right ones, faulty ones, and cheats."""

import re

import pytest

from lab.audit.cases import STARTER_CODE
from tests.helpers.audited import BY_FLAGS, read_cases
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


ON_TWO_RANKS = RUBRIC.split("[parts.part3]")[0].replace("points", "ranks = [2]\npoints")
STARTER = STARTER_CODE.read_text()
RIGHT = CASES["right_all_reduce"].script
JOIN = "def join(args):\n"
AS_URL = ('f"tcp://{args.master_ip}:{args.port}"', "args.master_ip")
ETH1 = (JOIN, f'{JOIN}    os.environ["GLOO_SOCKET_IFNAME"] = "eth1"\n')
RENAMED = (
    ('"--master-ip"', '"--master_addr", dest="master_ip"'),
    ('"--num-nodes"', '"--world-size", dest="num_nodes"'),
    ('"--rank"', '"--id", dest="rank"'),
)
FLAGS = STARTER[STARTER.index("    parser") : STARTER.index(JOIN)]
FROM_ARGV = """\
    args = argparse.Namespace(port=29511, batch_size=24)
    args.rank = int(sys.argv[1])
    args.num_nodes = int(sys.argv[2])
    args.master_ip = sys.argv[3]
    return args


"""
FROM_TORCHRUN = """\
    size = int(os.environ["WORLD_SIZE"])
    return argparse.Namespace(rank=int(os.environ["RANK"]), num_nodes=size, batch_size=24)


"""
MEETING = STARTER[STARTER.index('        init_method=f"tcp') : STARTER.index("class Pictures")]


def starter(*edits):
    """Return the starter code with edits: each the old text and the new one."""
    code = f"import os\nimport sys\n{STARTER}"
    for old, new in edits:
        assert old in code
        code = code.replace(old, new)
    return code


def handed_in(script, *edits, **files):
    """Return a part's files: its script, the starter code with edits, and others."""
    named = {f"{name}.py": text for name, text in files.items()}
    return {"main.py": script, "student.py": starter(*edits), **named}


# From the folder that the rubric provides.
MODEL = """\
import torch.distributed as dist
from student import make_model

def add(tensor):
    dist.all_reduce(tensor)
"""
WITH_MODEL = SUM.replace("dist.all_reduce(p.grad)", "add(p.grad)").replace(
    "from student import Pictures, join, make_model, read_flags",
    "from model import add, make_model\nfrom student import Pictures, join, read_flags",
)
FOUR = ("world_size=args.num_nodes", "world_size=4")
# Fourteen submissions to a course that demands DEMANDED and accepts an early clip: two cheat,
# and others cannot be started as demanded. By name: the folder of the part, its files, the
# mark of 6 points ("" if it is left to a person), what was found, and how it runs otherwise than
# demanded ("" if it does not).
DEMANDED = "python {script} --master-ip {master} --num-nodes {nodes} --rank {rank}"
SAVES = '\n    open(f"output/{args.rank}.txt", "w")\n    train(args)\n'
CLASS = {
    "asked": ("part2", handed_in(RIGHT), "6", "", ""),
    "url-sum": ("part2", handed_in(SUM, AS_URL), "0", "sum-not-mean", "tcp://{master}:{port}"),
    "torchrun": (
        "part2",
        handed_in(RIGHT, (FLAGS, FROM_TORCHRUN), (MEETING, "    )\n\n\n")),
        "6",
        "",
        "torchrun main.py",
    ),
    "output": (
        "part2",
        handed_in(RIGHT.replace("\n    train(args)\n", SAVES)),
        "6",
        "",
        "new folder output",
    ),
    "flags": (
        "part2",
        handed_in("samples_order_without_set_epoch", *RENAMED, AS_URL, ETH1),
        "0",
        "same-order",
        "tcp://{master}:{port} --port {port} --world-size {nodes} --id {rank}",
    ),
    "argv": ("part2", handed_in(RIGHT, (FLAGS, FROM_ARGV)), "6", "", "{rank} {nodes} {master}"),
    "named": (
        "Task_2",
        {"Train_Gather.py": "right_gather_scatter", "main.py": "raise SystemExit(1)\n"},
        "6",
        "",
        "",
    ),
    "python2": (
        "part2",
        handed_in(RIGHT.replace("    train(args)\n", "    print 'start'\n    train(args)\n")),
        *("6", "", "converted from Python 2"),
    ),
    "provided": ("part2", {"main.py": WITH_MODEL, "student.py": STARTER}, "0", "sum-not-mean", ""),
    "four": (
        "part2",
        handed_in(RIGHT.replace("/= dist.get_world_size()", "/= 4"), FOUR),
        *("6", "", ""),
    ),
    "missing": ("part2", handed_in("import einx_not_there\n"), "", "", ""),
    "early-clip": ("part2", handed_in("clip_norm_torch"), "6", "", ""),
    "forged": ("part2", handed_in(CHEATS["forged"][0]), "", "", ""),
    "replaced": ("part2", handed_in(CHEATS["replaced"][0]), "", "", ""),
}


SIX = "asked url-sum torchrun flags forged provided".split()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SIX, id="six", marks=pytest.mark.slow),
        pytest.param([*CLASS], id="fourteen", marks=pytest.mark.long),
    ],
)
def test_a_class_of_right_faulty_cheating_and_started_in_its_own_ways(names, grade, tmp_path):
    (tmp_path / "starter").mkdir()
    (tmp_path / "starter/model.py").write_text(MODEL)
    rubric = f'provides = "starter"\n{ON_TWO_RANKS.replace(BY_FLAGS, DEMANDED)}'
    class_of = {name: CLASS[name] for name in names}
    submissions = {name: {part: files} for name, (part, files, *_) in class_of.items()}
    seen = grade(submissions, rubric=rubric)
    marks = {name: row["part2"] for name, row in seen.rows.items()}
    assert marks == {name: mark for name, (_, _, mark, _, _) in class_of.items()}
    for name, (_, _, mark, fault, otherwise) in class_of.items():
        row = seen.rows[name]
        if name not in CHEATS:  # what a cheat's records say does not count
            assert row["faults"] == (f"part2:{fault}" if fault else ""), name
        assert bool(row["other commands"]) == bool(otherwise), name
        assert otherwise in row["other commands"], name
        assert bool(row["by hand"]) == (not mark), name
    assert "eth1" in seen.rows["flags"]["other commands"]
    output = seen.results["provided"]["tests"][0]["output"]
    assert re.search(r"\(sum-not-mean, main\.py:\d+\)", output)  # not the course's own line
    for name in {*names} & {*CHEATS}:
        assert CHEATS[name][1] in seen.rows[name]["by hand"]


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
