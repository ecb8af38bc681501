"""What ``lab grade`` takes and writes, with an audit that is replaced by its answers."""

import io
import json
import re
import tarfile
import zipfile

import pytest

from lab.audit.findings.finding import FAULT, catalogue
from lab.cli import main
from lab.grade import grade
from lab.grade.marks import lesson_of
from lab.grade.part import Facts
from lab.grade.rubric import FOLDER
from tests.lab.grade.classes import RUBRIC, read_class

ENTRY = {"severity": "fault", "sure": "certain", "at": None, "title": "T", "cure": "C."}


def seen(task, status=0, used=("ddp",), sizes=(2,), doubts=(), **findings):
    """Return facts: findings by name, each with how sure it is."""
    faults = [ENTRY | {"name": name, "sure": sure} for name, sure in findings.items()]
    audit = {"status": status, "headline": "why", "failure": None, "findings": faults}
    audit["runs"] = [{"ranks": size} for size in sizes]
    return Facts(
        key=task.key, audit=audit, used=list(used), whole=True, doubts=list(doubts), seconds=1.0
    )


@pytest.fixture
def grader(tmp_path, monkeypatch, capsys):
    """Grade ``paths`` in a folder with rubric.toml; ``answers`` are facts by script text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubric.toml").write_text(RUBRIC)
    answers, ran = {}, []

    def run(task, slots):
        text = (task.cwd / "main.py").read_text()
        ran.append(text)
        facts = seen(task, **answers.get(text, {}))
        path = tmp_path / task.facts
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(grade.encode(facts))
        return facts

    monkeypatch.setattr(grade, "_run", run)

    def call(*paths, flags=()):
        ran.clear()
        words = ["grade", *paths, "--rubric", "rubric.toml", "--no-sandbox", "--out", "out", *flags]
        status = main([str(word) for word in words])
        return status, *capsys.readouterr(), list(ran)

    call.answers = answers
    return call


def hand_in(folder, name, **scripts):
    for part, text in scripts.items():
        (folder / name / part).mkdir(parents=True)
        (folder / name / part / "main.py").write_text(text)
    return folder / name


MARKS = {
    "right": ({}, "6", ""),
    "fault": ({"status": 1, "sum-not-mean": "certain"}, "0", "part2:sum-not-mean"),
    "half": ({"status": 1, "literal-divisor": "certain"}, "3", "part2:literal-divisor"),
    "likely": ({"status": 1, "same-samples": "likely"}, "", "part2:same-samples"),
    "accepted": ({"status": 1, "clipped-before-averaging": "certain"}, "6", ""),
    "cannot tell": ({"status": 2}, "", ""),
    "fault before a run": ({"status": 2, "different-start": "certain"}, "", ""),
    "other sizes": ({"sizes": ()}, "", ""),
    "doubts": ({"status": 1, "doubts": ["x"], "sum-not-mean": "certain"}, "", "part2:sum-not-mean"),
}


def test_only_certain_faults_cost_points_and_what_nobody_can_tell_is_open(grader, tmp_path):
    folders = []
    for name, (answer, _, _) in MARKS.items():
        grader.answers[name] = answer
        folders.append(hand_in(tmp_path, name.replace(" ", "-"), part2=name, part3="right"))
    folders.append(hand_in(tmp_path, "no-ddp", part2="right", part3="by hand"))
    grader.answers["by hand"] = {"used": ["all_reduce"]}
    assert grader(*folders)[0] == 0
    rows = read_class(tmp_path / "out")
    for name, (_, marks, faults) in MARKS.items():
        row = rows[name.replace(" ", "-")]
        assert (row["part2"], row["faults"], row["part3"]) == (marks, faults, "4"), name
        assert bool(row["by hand"]) == (marks == ""), name
    assert rows["no-ddp"]["part3"] == ""
    assert "never calls DistributedDataParallel" in rows["no-ddp"]["by hand"]
    page = (tmp_path / "out/class.html").read_text()
    assert re.findall(r"<h3>(\d+ times?): ", page) == ["2 times", "1 time", "1 time"]
    assert "without a sandbox" in page
    tests = json.loads((tmp_path / "out/submissions/half/results.json").read_text())
    assert (tests["score"], tests["tests"][0]["score"], tests["tests"][0]["max_score"]) == (7, 3, 6)
    open_one = json.loads((tmp_path / "out/submissions/likely/results.json").read_text())
    assert (open_one["score"], "score" in open_one["tests"][0]) == (4, False)


def test_a_second_call_runs_what_changed_and_keeps_what_a_person_decided(grader, tmp_path):
    ada, bob = (hand_in(tmp_path, name, part2=name, part3="right") for name in ("ada", "bob"))
    assert sorted(grader(ada, bob)[3]) == ["ada", "bob", "right", "right"]
    overrides = tmp_path / "out/overrides.csv"
    overrides.write_text(overrides.read_text() + "bob,part3,1.5,=late\n")
    (bob / "part2/main.py").write_text("new")
    (tmp_path / "out/submissions/ada/part3.json").write_text("{cut off")
    assert sorted(grader(ada, bob)[3]) == ["new", "right", "right"]  # bob's parts share a folder
    row = read_class(tmp_path / "out")["bob"]
    assert (row["part3"], row["total"], row["overridden"]) == ("1.5", "7.5", "part3: =late")
    assert "=late" in (tmp_path / "out/submissions/bob/index.html").read_text()
    for line, wrong in (
        ("eve,part3,1,x", "'eve'"),
        ("bob,part3,5,x", "'5'"),
        ("bob,part3,1,", "''"),
    ):
        overrides.write_text(f"submission,part,marks,reason\n{line}\n")
        status, _, err, ran = grader(ada, bob)
        assert (status, ran, err.count("\n")) == (2, [], 1)
        assert wrong in err


def _zip(path, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in entries.items():
            archive.writestr(name, text)


def _tar(path, name, kind=tarfile.REGTYPE, link=""):
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, link
        archive.addfile(entry, io.BytesIO())


def test_archives_are_unpacked_and_what_is_wrong_with_one_is_a_line_while_others_go_on(
    grader, tmp_path
):
    good = {f"me/{part}/main.py": "right" for part in ("part2", "part3")}
    _zip(tmp_path / "good.zip", **good)
    _zip(tmp_path / "above.zip", **good, **{"../../evil.py": "x"})
    _zip(tmp_path / "empty.zip")
    _zip(tmp_path / "text.zip", **{"README.txt": "x"})
    link = zipfile.ZipInfo("part2/main.py")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    _tar(tmp_path / "up.tar.gz", "../evil.py")
    _tar(tmp_path / "leads.tgz", "part2/main.py", tarfile.SYMTYPE, "/etc/passwd")
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04" + b"x" * 100)
    outside = hand_in(tmp_path, "outside", part3="right")
    (outside / "part2").symlink_to("/etc")
    (tmp_path / "more").mkdir()
    _zip(tmp_path / "more/twice.zip", **good)
    names = hand_in(tmp_path, "other", deep="right")
    (tmp_path / "map.csv").write_text("submission,part,path\nother,part2,deep/main.py\n")
    paths = [*sorted(tmp_path.glob("*.zip")), *sorted(tmp_path.glob("*.t*gz")), outside, names]
    paths += [tmp_path / "more/twice.zip", hand_in(tmp_path, "twice", part2="right")]
    status, out, _, ran = grader(*paths, flags=["--map", "map.csv"])
    assert (status, ran) == (0, ["right"] * 3)
    rows = read_class(tmp_path / "out")
    assert rows.pop("good")["total"] == "10"
    other = rows.pop("other")
    assert other["part2"] == "6"
    assert "no file fits **/part3/main.py; here are deep/main.py" in other["by hand"]
    whys = {name: row["by hand"] for name, row in rows.items() if row["total"] == "0"}
    for name, why in {
        "above": "lies outside",
        "empty": "is empty",
        "text": "no Python file",
        "link": "links in a zip",
        "up": "outside",
        "leads": "absolute path",
        "broken": "cannot be unpacked",
        "outside": "leads elsewhere",
        "twice": "2 submissions have this name",
    }.items():
        assert why in whys[name]
        assert len(re.findall(f"^{name}: ", out, re.MULTILINE)) == 1
    assert len(whys) == 9
    assert not (tmp_path.parent / "evil.py").exists()


WRONG = {
    "points = 6": ("points = -1", "points"),
    "[parts.part2]": ("[parts.part2]\nsurprise = 1", "surprise"),
    "literal-divisor = 0.5": ("padding-sampler = 0.5", "a notice never costs points"),
    "accepts.clipped-before-averaging": ("accepts.sum", "no such fault"),
    "python {script}": ("python main.py", "lacks {script}"),
    " --rank {rank}": ("", "lacks {rank}"),
    "ranks = [2]": ("ranks = [2, 63]", "at most"),
    "title = ": ("title ", "not TOML"),
    "[deductions]": ('[mounts]\ndata = "missing"\n[deductions]', "no folder"),
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text.split()[0].strip("[]"))
def test_a_wrong_rubric_is_one_line_before_anything_runs(grader, tmp_path, text):
    (tmp_path / "rubric.toml").write_text(RUBRIC.replace(text, WRONG[text][0]))
    status, _, err, ran = grader(hand_in(tmp_path, "ada", part2="right", part3="right"))
    assert (status, ran, err.count("\n")) == (2, [], 1)
    assert WRONG[text][1] in err


def test_the_shipped_rubrics_can_be_used_and_every_fault_has_its_lesson(grader, capsys, tmp_path):
    for path in sorted(FOLDER.glob("*.toml")):
        assert main(["grade", "--print-rubric", "--rubric", path.stem]) == 0
        text = re.sub(r"\[mounts\][^[]*", "", capsys.readouterr().out)
        (tmp_path / "rubric.toml").write_text(text)
        status, out, _, _ = grader(hand_in(tmp_path, path.stem, part2="right"))
        assert (status, out.count("0 parts to look")) == (0, 0)
    faults = [name for name, entry in catalogue().items() if entry.severity == FAULT]
    assert all(re.search(r"docs/learn/\d\d_\w+\.md", lesson_of(name)) for name in faults)
    assert len({lesson_of(name) for name in faults}) == 6
