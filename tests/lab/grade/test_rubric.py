"""What a rubric may hold; what it costs is tested in test_grade.py."""

import zipfile
from pathlib import Path

import pytest

from common.errors import UserError
from lab.cli import main
from lab.grade.rubric import check_pattern, load_rubric

DRIVEN = """\
title = "A course"
driver = "own.py"
[parts.one]
title = "One"
files = ["one.py"]
command = "python {driver} {script}"
points = 1
[findings.too-slow]
title = "It is slow"
cause = "It waits."
cure = "Do not wait."
"""


@pytest.mark.parametrize("pattern", ["**main.py", "deep/**.py", "a**/main.py", "../x.py", "/x.py"])
def test_a_pattern_is_refused_whatever_this_pythons_glob_takes(monkeypatch, pattern):
    """Python 3.11 refuses ``**main.py`` and 3.13 takes it as ``*main.py``."""
    monkeypatch.setattr(Path, "glob", lambda *_, **__: iter(()))
    with pytest.raises(UserError, match="files of part1"):
        check_pattern(pattern, where="files of part1")


@pytest.mark.parametrize("pattern", ["main.py", "**/main.py", "a/**/b*.py", "**", "part[12]/*.py"])
def test_a_pattern_below_the_submission_is_taken(pattern):
    check_pattern(pattern, where="files of part1")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a rubric with a driver into a folder, and go elsewhere."""
    folder = tmp_path / "course"
    folder.mkdir()
    (folder / "own.py").write_text("PARTS = {}\n")
    (folder / "own.toml").write_text(DRIVEN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def test_what_a_rubric_provides_is_a_folder_beside_it(own):
    rubric = DRIVEN.replace("[parts.one]", 'provides = "starter"\n[parts.one]')
    (own / "own.toml").write_text(rubric)
    (own / "starter").touch()
    with pytest.raises(UserError, match=r"provides: there is no \S*starter"):
        load_rubric("../course/own.toml")
    (own / "starter").unlink()
    (own / "starter").mkdir()
    assert Path(load_rubric("../course/own.toml").provides).samefile(own / "starter")
    (own / "starter/model.py").touch()
    assert main(["grade", "--zip", "a.zip", "--rubric", "../course/own.toml"]) == 0
    names = zipfile.ZipFile("a.zip").namelist()
    assert {"assignment/own.py", "assignment/starter/model.py"} <= set(names)


def test_a_driver_is_found_beside_its_rubric_and_its_findings_have_prices(own):
    priced = DRIVEN.replace("[parts.one]", "deductions.too-slow = 0.5\n[parts.one]")
    (own / "own.toml").write_text(priced)
    rubric = load_rubric("../course/own.toml")
    assert Path(rubric.driver).samefile(own / "own.py")
    part = rubric.parts["one"]
    assert (rubric.deduction(part, "too-slow"), rubric.deduction(part, "raises")) == (0.5, 1)


@pytest.mark.parametrize(
    ("text", "changed", "said"),
    [
        ('driver = "own.py"', "", "name its file as driver"),
        ('"own.py"', '"other.py"', "driver: there is no"),
        ('"own.py"', '"../course/own.py"', "beside the rubric"),
        ("[parts.one]", "deductions.too-fast = 1\n[parts.one]", "nor has [findings]"),
        ("[findings.too-slow]", "[findings.sum-not-mean]", "this name is taken"),
        ("[findings.too-slow]", "[findings.raises]", "this name is taken"),
        ("[parts.one]", "[parts.results]", "no part can be called results"),
        ('cure = "Do not wait."', 'cure = "x"\nexplains = ["nothing"]', "no such finding"),
        ('cure = "Do not wait."', 'cure = "x"\nexplains = ["too-slow"]', "explain each other"),
        ('cause = "It waits."', "", "cause"),
    ],
)
def test_what_is_wrong_with_a_driver_or_its_findings_is_said(own, text, changed, said):
    assert text in DRIVEN
    (own / "own.toml").write_text(DRIVEN.replace(text, changed))
    with pytest.raises(UserError) as error:
        load_rubric(str(own / "own.toml"))
    assert said in str(error.value)


def test_an_autograder_holds_the_rubric_and_a_driver_of_its_own(own, tmp_path):
    assert main(["grade", "--rubric", str(own / "own.toml"), "--zip", "own.zip"]) == 0
    with zipfile.ZipFile("own.zip") as archive:
        archive.extractall(tmp_path / "unpacked")
    rubric = load_rubric(str(tmp_path / "unpacked/assignment/rubric.toml"))
    assert Path(rubric.driver).read_text() == "PARTS = {}\n"
    run = (tmp_path / "unpacked/run_autograder").read_text()
    assert "--rubric assignment/rubric.toml" in run
    assert (tmp_path / "unpacked/courses/cs336.py").is_file()
