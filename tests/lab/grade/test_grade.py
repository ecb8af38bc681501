"""What ``lab grade`` takes and writes, with an audit that is replaced by its answers."""

import functools
import os
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from common.utils.atomic_files import write_atomically
from common.utils.typed_json import convert, encode
from lab.audit.findings.finding import FAULT, catalogue
from lab.audit.recording import RankRecords
from lab.audit.records import CollectiveCall, Parameter, Parameters
from lab.audit.report import AuditContent
from lab.cli import main
from lab.grade import grade as grading
from lab.grade import ordinary_user
from lab.grade.facts import Facts
from lab.grade.findings import lesson_of
from lab.grade.part import _used
from lab.grade.rubric import FOLDER
from lab.grade.sandbox import Task
from tests.helpers.browser import chromium, needs_browser, refuse_strangers
from tests.helpers.paths import ROOT
from tests.helpers.waiting import wait_until
from tests.lab.grade.conftest import RUBRIC

AUDIT = {
    **{"command": "python main.py", "status": 0, "headline": "why", "failure": None},
    "diagnosis": None,
    **{"verdict": {"question": "", "answer": "yes", "why": ""}, "performance": None},
    **{"versions": {"python": "", "executable": "", "torch": ""}, "findings": []},
    **{key: [] for key in ("possible", "properties", "remarks")},
    "runs": [{"ranks": ranks, "asked_ranks": ranks, "steps": 6, "hung": False} for ranks in (2, 3)],
}
ENTRY = {
    **{"severity": "fault", "at": None, "title": "T", "cure": "C.", "cause": "", "evidence": []},
    **{"ranks": [], "condition": None},
}
BOTH = {"part2": "right", "part3": "right"}
# Gradescope, "Autograder Specifications": what results.json and each of its tests may hold
RESULT = (
    "score execution_time output output_format test_output_format test_name_format visibility "
    "stdout_visibility extra_data tests leaderboard"
)
TEST = (
    "score max_score status name name_format number output output_format tags visibility extra_data"
)
ANSWERS = {  # by script: findings, other facts, and the marks for 6 points
    "fault": ({"sum-not-mean": "certain"}, {"status": 1}, "0"),
    "half": ({"literal-divisor": "certain"}, {"status": 1}, "3"),
    "likely": ({"same-samples": "likely"}, {"status": 1}, ""),
    "accepted": ({"clipped-before-averaging": "certain"}, {"status": 1}, "6"),
    "hidden": (
        {"clipped-before-averaging": "certain"},
        {
            "status": 1,
            "properties": [{"name": "gradients", "state": "not seen", "said": ["1.2 times"]}],
        },
        "",
    ),
    "unclear": (
        {"different-start": "certain"},
        {"status": 2, "verdict": {"question": "", "answer": "cannot tell", "why": ""}},
        "",
    ),
    "not-asked": (
        {},
        {"status": 2, "properties": [{"name": "coverage", "state": "not seen", "said": ["x"]}]},
        "6",
    ),
    "not-seen": (
        {},
        {"status": 2, "properties": [{"name": "weights", "state": "not seen", "said": ["x"]}]},
        "",
    ),
    "no-runs": ({}, {"runs": []}, ""),
    # Nothing that a person may see of it gives it points.
    "lost": (
        {"sum-not-mean": "certain", "same-samples": "likely"},
        {"status": 1, "runs": [], "evidence": ["rank 0 has the sum"]},
        "0",
    ),
    "doubted": ({"sum-not-mean": "certain"}, {"status": 1, "doubts": ["forged"]}, ""),
    "right": ({}, {}, "6"),
}


@pytest.fixture
def tasks():
    return []


_as_user = ordinary_user._run
_once = functools.cache(_as_user)


def _as_user_once(*words):
    """Run a command as the ordinary user; import torch only once for all tests."""
    run = _once if words[-1] == "import torch" else _as_user
    return run(*words)


@pytest.fixture
def ran(monkeypatch, tasks):
    """Answer in place of the audit; return the scripts that it got."""
    monkeypatch.setattr(ordinary_user, "_run", _as_user_once)
    scripts = []

    def run(task):
        tasks.append(task)
        ranks = [2] if task.cwd.name == "part3" else [2, 3]
        assert task.ranks in (ranks, [4])  # 4 only by --map
        text = (task.cwd / "main.py").read_text()
        scripts.append(text)
        findings, other, _ = ANSWERS.get(text, ({}, {}, ""))
        audit = AUDIT | other
        evidence = {"evidence": audit.pop("evidence", [])}
        audit["findings"] = [
            ENTRY | evidence | {"name": one, "sure": sure} for one, sure in findings.items()
        ]
        used = ["all_reduce"] if text == "no-ddp" else ["ddp"]
        facts = Facts(
            key=task.key,
            audit=convert(audit, AuditContent, name="audit"),
            used=used,
            whole=False,
            seconds=1,
            doubts=other.get("doubts", []),
            command="the command",
            changes=task.changes,
        )
        write_atomically(Path(task.facts), encode(facts))
        return facts

    monkeypatch.setattr(grading, "_run", run)
    return scripts


def test_only_certain_faults_cost_points_and_what_nobody_can_tell_is_open(grade, ran, tmp_path):
    submissions = {name: {"part2": name, "part3": "right"} for name in ANSWERS}
    seen = grade(submissions | {"no-ddp": {"part2": "right", "part3": "no-ddp"}}, "--no-sandbox")
    for name, (findings, _, marks) in ANSWERS.items():
        row = seen.rows[name]
        assert (row["part2"], row["part3"], bool(row["by hand"])) == (marks, "4", not marks), name
        counted = name not in ("accepted", "hidden", "unclear")
        faults = [f"part2:{one}" for one in findings if counted]
        assert row["faults"] == " ".join(faults)
    assert "never calls DistributedDataParallel" in seen.rows["no-ddp"]["by hand"]
    assert (seen.results["half"]["score"], seen.results["half"]["tests"][0]["score"]) == (7, 3)
    assert "score" not in seen.results["likely"]["tests"][0]
    assert "rank 0 has the sum" in seen.results["lost"]["tests"][0]["output"]
    for result in seen.results.values():
        assert result.keys() <= set(RESULT.split())
        assert all(test.keys() <= set(TEST.split()) for test in result["tests"])
        assert {test.get("status", "passed") for test in result["tests"]} <= {"passed", "failed"}
        assert all(
            type(test[one]) is str for test in result["tests"] for one in ("number", "output")
        )
    page = (tmp_path / "out/class.html").read_text()
    assert re.findall(r"<h3>(\d+ times?): ", page) == ["3 times", "2 times", "1 time"]
    assert "without a sandbox" in page


def test_a_second_call_runs_what_changed_and_keeps_what_a_person_decided(grade, ran, tmp_path):
    ada, bob = {"part2": "half", "part3": "right"}, BOTH
    grade({"ada": ada, "bob": bob, "eva": {"part2": "unclear"}}, "--no-sandbox")
    assert len(ran) == 5
    overrides = tmp_path / "out/overrides.csv"
    overrides.write_text(f"{overrides.read_text()}bob,part3,1.5,=late\n")
    (tmp_path / "out/submissions/ada/part3.json").write_text("{cut off")
    row = grade({"ada": ada, "bob": bob | {"part2": "new"}}, "--no-sandbox").rows["bob"]
    # Both of bob's parts, since they share a folder; eva's stay as they are.
    assert sorted(ran[5:]) == ["new", "right", "right"]
    grade({}, "--no-sandbox", "--again")
    assert ran[8:] == ["unclear"]
    assert (row["part3"], row["total"], row["overridden"]) == ("1.5", "7.5", "part3: =late")
    for line, wrong in (
        ("max,part3,1,x", "'max'"),
        ("bob,part3,5,x", "'5'"),
        ("bob,part3,1,", "''"),
    ):
        overrides.write_text(f"submission,part,marks,reason\n{line}\n")
        assert wrong in grade({}, "--no-sandbox").error
    overrides.write_text("submission,part,marks,reason\neva,part3,2,mine\n*,*,1,nobody can tell\n")
    rows = grade({}, "--no-sandbox").rows
    marks = {name: (row["part2"], row["part3"]) for name, row in rows.items()}
    assert marks == {"ada": ("3", "4"), "bob": ("6", "4"), "eva": ("1", "2")}
    assert [name for name, row in rows.items() if row["overridden"]] == ["eva"]


TRAINS = "loss.backward()\n"


def test_nothing_handed_in_is_zero_only_if_no_file_can_be_the_part(grade, ran, tmp_path):
    part2 = {"main.py": "right", "student.py": ""}  # in place of the starter code
    class_of = {
        "one-part": {"part2": part2},
        "with-helper": {"part2": part2 | {"other.py": "import helper", "helper.py": TRAINS}},
        "other-name": {"part2": part2, "last": {"train.py": TRAINS, "student.py": ""}},
        "beside": {"part2": part2 | {"second.py": TRAINS}},
        "several": dict.fromkeys(["a/part2", "b/part2"], part2 | {"main.py": TRAINS}),
    }
    for name, file in (("report", "report.txt"), ("inner", "all.zip")):
        (tmp_path / "class" / name).mkdir(parents=True)
        (tmp_path / "class" / name / file).write_text("")
    seen = grade(class_of, "--no-sandbox", rubric=f"missing = 0.25\n{RUBRIC}")
    marks = {name: row["part3"] for name, row in seen.rows.items()}
    missing = dict.fromkeys(("one-part", "with-helper", "report"), "1")
    assert marks == dict.fromkeys([*class_of, "inner"], "") | missing
    said = seen.results["report"]["tests"][0]["output"]
    assert said == "Not handed in: it has no Python file, and no notebook."
    assert "no notebook, but holds all.zip" in seen.rows["inner"]["by hand"]
    assert "Not handed in" in seen.results["one-part"]["tests"][1]["output"]
    assert seen.rows["other-name"]["so far"] == "6"
    assert grade({}, "--no-sandbox").rows["one-part"]["part3"] == ""  # the rubric says it


def pack(path, *names, link=None):
    """Write an archive of these names; the last is a link if ``link`` says where it leads."""
    with (
        zipfile.ZipFile(path, "w") if path.suffix == ".zip" else tarfile.open(path, "w") as archive
    ):
        for name in names:
            if path.suffix == ".tar":
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = (
                    tarfile.SYMTYPE if link else tarfile.REGTYPE,
                    link or "",
                )
                archive.addfile(entry)
            else:
                entry = zipfile.ZipInfo(name)
                entry.external_attr = (0o120777 if link else 0o100644) << 16
                archive.writestr(entry, link or "right")


def test_what_is_wrong_with_an_archive_is_one_line_and_the_others_go_on(grade, ran, tmp_path):
    good = ["me/part2/main.py", "me/part3/main.py"]
    folder = tmp_path / "class"
    folder.mkdir()
    pack(folder / "good.zip", *good)
    pack(folder / "above.zip", *good, "../../evil.py")
    pack(folder / "empty.zip")
    pack(folder / "text.zip", "README.txt")
    pack(folder / "link.zip", "part2/main.py", link="/etc/passwd")
    pack(folder / "up.tar", "../evil.py")
    pack(folder / "leads.tar", "part2/main.py", link="/etc/passwd")
    (folder / "broken.zip").write_bytes(b"PK\x03\x04" + b"x" * 100)
    pack(folder / "twice.zip", *good)
    pack(folder / "...zip", "evil.py")
    with zipfile.ZipFile(folder / "damaged.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("part2/main.py", "right" * 1000)
    content = (folder / "damaged.zip").read_bytes()
    (folder / "damaged.zip").write_bytes(content[:45] + b"\xff" * 10 + content[55:])
    (folder / "loops").mkdir()
    (folder / "loops/loop.py").symlink_to("loop.py")
    Path(os.fsdecode(os.fsencode(folder) + b"/latin/\xe9")).mkdir(parents=True)
    (folder / "outside").mkdir()
    (folder / "outside/part2").symlink_to("/etc")
    (tmp_path / "map.csv").write_text("submission,part,path\nother,part2,deep/main.py\n")
    flags = ["--no-sandbox", "--map", "map.csv"]
    seen = grade({"other": {"deep": "right"}, "twice": BOTH}, *flags)
    assert (seen.status, len(ran)) == (0, 3)
    assert (seen.rows["good"]["total"], seen.rows["other"]["part2"]) == ("10", "6")
    assert "no file fits **/part3/main.py; here are deep/main.py" in seen.rows["other"]["by hand"]
    for name, why in {
        "above": "outside of its folder",
        "empty": "is empty",
        "text": "no Python file",
        "link": "links in an archive",
        "up": "outside of its folder",
        "leads": "links in an archive",
        "damaged": "cannot be unpacked",
        "latin": "no UTF-8",
        "broken": "cannot be unpacked",
        "outside": "leads elsewhere",
        "twice": "2 submissions have this name",
    }.items():
        assert why in seen.rows[name]["by hand"]
        assert len(re.findall(f"^{name}: ", seen.said, re.MULTILINE)) == 1
    assert not (tmp_path / "evil.py").exists()
    for name in ("loops", "submission"):  # these can be unpacked
        assert "no file fits" in seen.rows[name]["by hand"]


def test_a_command_of_the_map_is_run_shown_and_costs_what_the_rubric_says(
    grade, ran, tasks, tmp_path
):
    mapped = tmp_path / "map.csv"
    mapped.write_text(
        "submission,part,path,command,ranks\n"
        "bob,part3,,,4\n"  # its own row counts, wherever it stands
        "*,part3,,torchrun {script} --own\n"
        "bob,part2,,FLAG=1 R={rank} python -u {script}\n"
    )
    priced = f"other_command = 0.25\nenvironment.SIZE = 3\n{RUBRIC}"
    flags = ["--no-sandbox", "--map", "map.csv"]
    seen = grade({"ada": BOTH, "bob": BOTH}, *flags, rubric=priced)
    words = {Path(task.facts).parts[-2:]: task.words for task in tasks}
    assert words["ada", "part3.json"][1:] == ["main.py", "--own"]
    assert words["bob", "part3.json"][2:4] == ["--master-ip", "{master}"]
    ranks = {Path(task.facts).parts[-2:]: task.ranks for task in tasks}
    assert (ranks["bob", "part3.json"], ranks["ada", "part3.json"]) == ([4], [2])
    in_env, set_for_rank, python, *rest = words["bob", "part2.json"]
    assert (in_env, set_for_rank, rest) == ("env", "R={rank}", ["-u", "main.py"])
    assert Path(python).is_absolute()
    assert [task.program for task in tasks if task.words[0] == "env"] == [python]
    variables = [task.environment for task in tasks]
    assert variables.count({"SIZE": "3"}) == 3
    assert {"SIZE": "3", "FLAG": "1"} in variables
    assert (seen.rows["ada"]["part3"], seen.rows["bob"]["part2"]) == ("3", "4.5")
    for name, part in (("ada", "part3"), ("bob", "part2")):
        assert seen.rows[name]["other commands"].startswith(f"{part}: the command")
        tests = {test["number"]: test["output"] for test in seen.results[name]["tests"]}
        assert [number for number, text in tests.items() if "the command" in text] == [part]
    assert "the command" in (tmp_path / "out/class.html").read_text()
    for command, wrong in (
        ("{script} {rank},0", "ranks"),
        ("python main.py", "{script}"),
        ("python {script}", "{rank}"),
        ("env LAB_AUDIT=x python {script} {rank}", "LAB_AUDIT"),
    ):
        mapped.write_text(f"submission,part,path,command,ranks\nada,part2,,{command}\n")
        assert wrong in grade({}, *flags).error


def test_what_the_rubric_provides_comes_last_on_the_path_and_is_part_of_the_key(
    grade, ran, tasks, tmp_path
):
    (tmp_path / "starter").mkdir()
    rubric = f'provides = "starter"\nenvironment.PYTHONPATH = "/own"\n{RUBRIC}'
    grade({"ada": {"part2": "right"}}, "--no-sandbox", rubric=rubric)
    (tmp_path / "starter/model.py").write_text("x = 1")
    for _ in range(2):
        grade({}, "--no-sandbox", rubric=rubric)
    paths = [task.environment["PYTHONPATH"] for task in tasks]
    assert paths == 2 * [f"/own:{tmp_path}/starter"]


def test_a_student_marks_his_own_folder_without_the_hidden_parts(
    ran, tmp_path, monkeypatch, capsys
):
    for part in ("part2", "part3"):
        (tmp_path / "ada" / part).mkdir(parents=True)
        (tmp_path / "ada" / part / "main.py").write_text("half")
    rubric = RUBRIC.replace("points = 4", "points = 4\nhidden = true")
    rubric = rubric.replace("memory_gb", 'mounts."../data" = "data"\nmemory_gb')
    (tmp_path / "rubric.toml").write_text(rubric)
    monkeypatch.chdir(tmp_path / "ada")
    for folder in ("data", ".venv", ".git", "part2/data"):
        (tmp_path / "ada" / folder).mkdir()
        (tmp_path / "ada" / folder / "big.bin").write_bytes(b"x")
    copies = []
    unpack = grading.unpack

    def unpack_and_list(source, target, *args, **options):
        unpack(source, target, *args, **options)
        copies.append(sorted(str(path.relative_to(target)) for path in target.rglob("*.bin")))

    monkeypatch.setattr(grading, "unpack", unpack_and_list)
    assert main(["grade", "--self", "--rubric", "../rubric.toml"]) == 0
    said = capsys.readouterr().out
    assert "Part 2: by hand: 3 of 6\n  -3: T (literal-divisor). C." in said
    assert ("Part 3" in said, ran) == (False, ["half"])
    assert main(["grade", "--self", "--rubric", "../rubric.toml"]) == 0
    assert ran == ["half"], "grades/ of the first call is no part of the submission"
    assert copies == [["part2/data/big.bin"]] * 2, "what the rubric mounts is linked, not copied"


def test_tables_are_written_after_each_part_and_each_reader_has_his_own_sentence(
    grade, ran, tmp_path, monkeypatch
):
    answer = grading._run
    table = tmp_path / "out/class.csv"

    def run(task):
        open_parts = 4 - len(ran)
        is_written = lambda: table.read_text().count("not been run") == open_parts  # noqa: E731
        wait_until(is_written, "a table with all parts so far", timeout_seconds=20)
        if open_parts == 1:
            raise KeyboardInterrupt
        return answer(task)

    monkeypatch.setattr(grading, "_run", run)
    monkeypatch.setattr(grading, "_jobs", lambda book: 1)
    long = f"expected_seconds = 585\n{RUBRIC}"
    seen = grade({"ada": BOTH, "bob": BOTH, "eva": {"deep": "x"}}, "--no-sandbox", rubric=long)
    assert (seen.status, len(ran)) == (130, 3)
    assert "about 39 min" in seen.said
    pages = {path.parent.name: path.read_text() for path in tmp_path.glob("out/sub*/*/index.html")}
    of_class = (tmp_path / "out/class.html").read_text()
    assert ("--map" in of_class, "1 submission have" in of_class) == (True, False)
    assert [name for name, page in pages.items() if "not been run" in page] == ["bob"]
    assert not any("--map" in page or "same command" in page for page in pages.values())


def test_the_audits_page_has_the_colour_of_the_mark_and_no_advice_on_the_audits_flags(
    grade, ran, tmp_path, monkeypatch
):
    (tmp_path / "out").mkdir()
    given = "submission,part,marks,reason\nset,part2,6,shown to me\n"
    (tmp_path / "out/overrides.csv").write_text(given)
    scripts = {"set": "unclear", "open": "unclear", "half": "half", "accepted": "accepted"}
    told = {"how": "not run", "reason": "R.", "cause": "", "cure": "C.", "advice": "--isolate x"}
    told |= {"at": None, "known_error": None}
    lost = {"diagnosis": told, "failure": "R. --isolate x", "headline": "R. --isolate x"}
    monkeypatch.setitem(ANSWERS, "unclear", ({}, {"status": 2, **lost}, ""))
    grade({name: {"part2": script} for name, script in scripts.items()}, "--no-sandbox")
    for path in (tmp_path / "out/submissions/open").glob("*.html"):
        assert ("C." in path.read_text(), "--isolate" in path.read_text()) == (True, False)
    notes = {}
    for name in scripts:
        page = (tmp_path / f"out/submissions/{name}/part2.html").read_text()
        notes[name] = re.findall(r'class="(verdict|note bad|note)"', page)[0]
    full = "verdict"
    assert notes == {"set": full, "open": "note", "half": "note bad", "accepted": full}


@needs_browser
def test_the_pages_run_their_own_scripts_alone(grade, ran, tmp_path):
    """The class's, a student's and an audit's, with a title and names that are HTML."""
    title = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"
    rubric = RUBRIC.replace("A course", title).replace("Part 2: by hand", title)
    grade(
        {name: {"part2": "right"} for name in ("ada", "<img onerror=1>")},
        "--no-sandbox",
        rubric=rubric,
    )
    of_class = tmp_path / "out/class.html"
    with chromium() as browser:
        with browser.page(of_class) as page:  # which fails for anything that a policy refuses
            rows = page.locator("#rows tr:visible")
            assert rows.count() == 2
            page.locator("input[type=search]").fill("ada")
            assert rows.count() == 1
            assert page.evaluate("window.ran") is None
        refuse_strangers(browser, of_class)
        for path in (tmp_path / "out/submissions/ada").glob("*.html"):
            with browser.page(path) as page:
                assert page.evaluate("window.ran") is None
            refuse_strangers(browser, path)


def test_an_audit_that_cannot_be_asked_to_end_is_killed(tmp_path, monkeypatch):
    deaf = tmp_path / "python"
    deaf.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 1000\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(grading.sys, "executable", str(deaf))
    monkeypatch.setattr(grading, "_MORE_SECONDS", 0.3)
    monkeypatch.setattr(grading, "_END_SECONDS", 0.3)
    words = {"words": ["python"], "ranks": [], "submission": "", "script": "", "facts": ""}
    limits = {"memory_bytes": 1, "disk_bytes": 1, "processes": 1, "limit_seconds": 0.1}
    task = Task(**words, **limits, key="", mounts={}, sandboxed=True)
    assert "did not end" in grading._run(task).what


def test_a_call_that_sends_next_to_nothing_is_not_how_a_part_exchanges_its_gradients():
    rows = [Parameter("0.0.0", "weight", [100, 10], "float32", 1000, 0)]
    calls = {"gather": (4, "float32"), "all_reduce": (4000, "float32"), "barrier": (0, None)}
    records = [Parameters(t=0.0, optimizer_number=0, optimizer="SGD", built=0, rows=rows)]
    for number, (name, (nbytes, dtype)) in enumerate(calls.items()):
        facts = {"number": number, "name": name, "nbytes": nbytes, "dtype": dtype}
        records += [CollectiveCall(t=1.0, at=None, step=0, **facts)] * 6
    assert _used([RankRecords(1, records)]) == ["all_reduce", "barrier"]


WRONG = {
    "points = 6": ("points = -1", "points"),
    "[parts.part2]": ("[parts.part2]\nsurprise = 1", "surprise"),
    "literal-divisor = 0.5": ("no-shuffling = 0.5", "a notice never costs points"),
    "accepts.clipped-before-averaging": ("accepts.sum", "no such fault"),
    "python {script}": ("python main.py", "lacks {script}"),
    "--rank {rank}": ("", "lacks {rank}"),
    '"**/part2/main.py"': ('"/part2/main.py"', "below the submission"),
    '"**/part3/main.py"': ('"../ada/main.py"', "below the submission"),
    "ranks = [2]": ("ranks = [2, 63]", "at most"),
    "title = ": ("title ", "not TOML"),
    "memory_gb = 3": ('mounts.data = "a"\nmounts."./data" = "b"', "data and ./data are one place"),
    "disk_gb = 0.5": ('mounts.data = "missing"', "no such folder"),
    "processes = 400": ('environment.PATH = "/x"', "PATH cannot be set"),
    "limit_seconds = 120": ("environment.RANK = 0", "RANK differs from run to run"),
    "points = 4": ('points = 4\nenvironment."A B" = "x"', "the name of a variable"),
    'uses = ["ddp"]': ("environment.LD_PRELOAD = 'x'", "LD_PRELOAD cannot be set"),
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text.split()[0].strip("[]"))
def test_a_wrong_rubric_is_one_line_before_anything_runs(grade, ran, text):
    seen = grade({"ada": BOTH}, "--no-sandbox", rubric=RUBRIC.replace(text, WRONG[text][0]))
    assert (seen.status, ran, seen.error.count("\n")) == (2, [], 1)
    assert WRONG[text][1] in seen.error


@pytest.mark.parametrize("place", ["/abs/main.py", "../bob/main.py", ".", "**main.py"])
def test_a_place_outside_of_the_submission_is_refused_before_anything_runs(
    grade, ran, tmp_path, place
):
    (tmp_path / "map.csv").write_text(f"submission,part,path\nada,part2,{place}\n")
    seen = grade({"ada": BOTH}, "--no-sandbox", "--map", "map.csv")
    assert (seen.status, ran, seen.error.count("\n")) == (2, [], 1)
    assert f"got {place!r}; give a path or a pattern below the submission" in seen.error


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_rubrics_can_be_used(grade, path):
    """Also printed into another folder: a shipped driver is found from there."""
    rubric = re.sub(r"\[mounts\][^[]*", "", path.read_text())
    assert grade({"ada": {"fits no part": "x"}}, "--no-sandbox", rubric=rubric).status == 0


def test_a_rubric_is_printed_by_its_flag_alone(grade):
    """The name of a rubric in the place of a submission is not passed over."""
    seen = grade({"ada": BOTH}, "--print-rubric")
    assert (seen.status, seen.error.count("\n")) == (2, 1)
    assert re.search(r"--rubric \S*ada", seen.error)


def test_every_fault_has_its_lesson():
    lessons = {lesson_of(name, {}) for name, one in catalogue().items() if one.severity == FAULT}
    assert len(lessons) == 6
    for lesson in lessons:
        title, page = lesson.removesuffix(")").split(" (")
        assert (ROOT / page).read_text().startswith(f"# {title}\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_where_an_ordinary_user_cannot_run_parts_the_page_says_that_root_did(
    grade, ran, tasks, tmp_path
):
    (tmp_path / "data").mkdir(mode=0o700)
    rubric = RUBRIC.replace("memory_gb = 3", 'memory_gb = 3\nmounts.data = "data"')
    seen = grade({"ada": BOTH}, "--no-sandbox", rubric=rubric)
    assert "the submissions run as root" in seen.said
    assert f"{tmp_path}/data" in seen.said
    assert seen.rows["ada"]["total"] == "10"
    assert "They ran as root" in (tmp_path / "out/class.html").read_text()
    assert [task.as_user for task in tasks] == [False, False]
