"""A class by its roster: who handed in what and when, and the files that gradebooks import.

Nothing runs: each submission's marks are given in overrides.csv, or nothing was handed in.
"""

import csv
import json

import pytest

from tests.lab.grade.conftest import RUBRIC

DATED = f"""
missing = 0
due = 2026-12-01T23:59:00-06:00
column = "Assignment 2"
late = {{ per_day = 0.1, grace_minutes = 10 }}
{RUBRIC}
"""
# As Canvas exports it: other assignments, a row of points, and a name that needs quotes.
CANVAS = """\
Student,ID,SIS User ID,SIS Login ID,Section,Assignment 1 (11),Assignment 2 (87568490),Final Score
    Points Possible,,,,,5,10,(read only)
"Lovelace, Ada",101,9001,ada,001,5,,50
"Hopper, Grace",102,9002,ghopper,001,4,,40
"Turing, Alan",103,9003,aturing,002,3,,30
"Noether, Emmy",104,9004,enoether,002,,,0
"""


def table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def decide(tmp_path, lines):
    (tmp_path / "out").mkdir(exist_ok=True)
    text = "submission,part,marks,reason\n" + "".join(f"{line},seen\n" for line in lines)
    (tmp_path / "out/overrides.csv").write_text(text)


def test_canvas_gets_its_own_columns_back_with_the_marks_of_this_assignment(grade, tmp_path):
    (tmp_path / "canvas-export.csv").write_text(CANVAS)
    submissions = ["lovelace_ada_101_5550_hw2", "hoppergrace_LATE_102_5551_hw2", "aturing", "guest"]
    decide(tmp_path, ["lovelace_ada_101_5550_hw2,*,4", "guest,*,1", "aturing,part3,3"])
    undecided = RUBRIC.replace('title = "A course"', 'title = "A course"\ncolumn = "Assignment 2"')
    graded = grade(
        {name: {"notes": {"notes.txt": ""}} for name in submissions},
        *("--roster", "canvas-export.csv"),
        rubric=undecided,
    )
    assert graded.status == 0
    assert "4 students, 1 with a total, 1 without a submission" in graded.said
    assert "no student fits guest" in graded.said
    assert table(tmp_path / "out/canvas.csv") == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Assignment 2 (87568490)"],
        ["    Points Possible", "", "", "", "", "10"],
        ["Lovelace, Ada", "101", "9001", "ada", "001", "8"],
        ["Hopper, Grace", "102", "9002", "ghopper", "001", ""],
        ["Turing, Alan", "103", "9003", "aturing", "002", ""],
        ["Noether, Emmy", "104", "9004", "enoether", "002", ""],
    ]
    lines = {row[0]: row[5:] for row in table(tmp_path / "out/gradebook.csv")[1:]}
    assert lines["Turing, Alan"] == ["aturing", "3", "", "1 part by hand"]
    assert lines["Noether, Emmy"] == ["", "0", "", "not handed in"]


def test_late_days_cost_their_share_and_a_group_shares_its_submission(grade, tmp_path):
    (tmp_path / "roster.csv").write_text(
        "Login,E-mail,Group,Submitted,Free days\n"
        "ada,ada@uni.edu,,2026-12-02T00:08-06:00,\n"  # within the grace of ten minutes
        "bob,bob@uni.edu,red,2026-12-02T00:10-06:00,\n"  # a minute after it
        "cyd,cyd@uni.edu,red,2026-12-02T06:10Z,1\n"  # as bob, with a free day
        "dan,dan@uni.edu,,2026-12-14T00:00-06:00,\n"
        "eve,eve@uni.edu,,,\n"
        ",fay@uni.edu,,,\n"
    )
    decide(tmp_path, [f"{name},{part},4" for name in ("ada", "bob", "dan", "eve") for part in "*"])
    graded = grade(
        {name: {"notes": {"notes.txt": ""}} for name in ("ada", "bob", "dan", "eve")},
        *("--roster", "roster.csv"),
        rubric=DATED,
    )
    assert "gradebook.csv: 6 students, 6 with a total, 1 without a submission" in graded.said
    lines = {row[1] or row[2]: row[5:] for row in table(tmp_path / "out/gradebook.csv")[1:]}
    assert lines == {
        "ada": ["ada", "8", "8", ""],
        "bob": ["bob", "8", "7.2", "1 day late: -10 %"],
        "cyd": ["bob", "8", "8", "1 day late, which costs nothing"],
        "dan": ["dan", "8", "0", "12 days late: -100 %"],
        "eve": ["eve", "8", "8", "time not known"],
        "fay@uni.edu": ["", "0", "0", "not handed in"],
    }
    assert not (tmp_path / "out/canvas.csv").exists()


EXPORT = """\
submission_1:
  :submitters:
  - :name: Ada Lovelace
    :sid: '9001'
    :email: elsewhere@x.edu
  - :name: Grace Hopper
    :sid:
    :email: ghopper
  :created_at: 2026-12-02 06:20:00.123456789 Z
  :score: 0.0
submission_2:
  :submitters:
  - :name: Alan Turing
    :sid: 9003
    :email: alan@x.edu
  :created_at: 2026-12-01 06:00:00.000000000 Z
submission_3:
  :submitters:
  - :name: Nobody
    :email: nobody@x.edu
"""


def test_an_export_of_gradescope_says_who_handed_in_and_when(grade, tmp_path):
    """Two students hand in one folder; 06:20 UTC is 21 minutes after the due date there."""
    (tmp_path / "roster.csv").write_text(CANVAS)
    (tmp_path / "class").mkdir()
    (tmp_path / "class/submission_metadata.yml").write_text(EXPORT)
    names = [f"submission_{number}" for number in (1, 2, 3)]
    decide(tmp_path, [f"{name},*,3" for name in names])
    graded = grade(
        {name: {"notes": {"notes.txt": ""}} for name in names},
        *("--roster", "roster.csv"),
        rubric=DATED,
    )
    assert "4 students, 4 with a total, 1 without a submission" in graded.said
    assert "no student fits submission_3" in graded.said
    lines = {row[0]: row[5:] for row in table(tmp_path / "out/gradebook.csv")[1:]}
    assert lines == {
        "Lovelace, Ada": ["submission_1", "6", "5.4", "1 day late: -10 %"],
        "Hopper, Grace": ["submission_1", "6", "5.4", "1 day late: -10 %"],
        "Turing, Alan": ["submission_2", "6", "6", ""],
        "Noether, Emmy": ["", "0", "0", "not handed in"],
    }


def test_an_export_that_makes_no_sense_is_refused_before_anything_runs(grade, tmp_path):
    (tmp_path / "roster.csv").write_text("Login;Group\nx;red\n")  # as a German Excel writes it
    (tmp_path / "class").mkdir()
    (tmp_path / "class/submission_metadata.yml").write_text("x:\n  :created_at: yesterday\n")
    refused = grade({"x": {"notes": {"notes.txt": ""}}}, "--roster", "roster.csv", rubric=DATED)
    assert refused.status == 2
    assert "submission_metadata.yml" in refused.error
    (tmp_path / "class/submission_metadata.yml").write_text("x:\n  :submitters: []\n")
    graded = grade({"x": {"notes": {"notes.txt": ""}}}, "--roster", "roster.csv", rubric=DATED)
    assert "gradebook.csv: 1 student, 0 with a total" in graded.said


@pytest.mark.parametrize(
    ("roster", "words"),
    [
        ("", "no column names a student, here are: none"),
        ("seat\n1,2\n", "here are: seat; give login, e-mail or name"),
        ("name\nAda Bell\nBell Ada\n", "ada_bell fits Ada Bell and Bell Ada: rename it"),
        ("login,name\nx,Ada Bell\nxs,\nada,Cy\n", "ada_bell and x both fit Ada Bell"),
        ("login,submitted\nx,noon\n", "submitted is a time such as"),
        ("login,submitted\nx,2026-12-03 00:00\n", "give both an offset to UTC"),
        ("login,group\nx,red\nada_bell,red\nz,red\n", "ada_bell and x are of group red"),
    ],
)
def test_a_roster_that_does_not_tell_says_what_to_do(roster, words, grade, tmp_path):
    (tmp_path / "roster.csv").write_text(roster)
    names = {name: {"notes": {"notes.txt": ""}} for name in ("x", "ada_bell")}
    refused = grade(names, "--roster", "roster.csv", rubric=DATED)
    assert refused.status == 2
    assert words in refused.error
    assert not (tmp_path / "out/gradebook.csv").exists()


EXTENDED = {"due_date": "2026-12-03T23:59:00.000000-06:00", "late_due_date": None}


@pytest.mark.parametrize(
    ("due", "own", "score"),
    [
        ("", {}, 7.2),
        ("due = 2026-11-30T12:00:00-06:00", {}, 6.4),
        ("", {"assignment": EXTENDED}, 8),
        ("due = 2026-11-30T12:00:00-06:00", {"assignment": EXTENDED}, 8),
    ],
)
def test_gradescope_s_own_time_and_due_date_cost_their_share(due, own, score, grade, tmp_path):
    metadata = {
        "id": 123456,
        "created_at": "2026-12-02T06:30:00.365935-06:00",
        "assignment": {"due_date": "2026-12-01T23:59:00.000000-06:00", "late_due_date": None},
        "users": [{"email": "ada@uni.edu", "id": 1234, "name": "Ada"} | own],
    }
    (tmp_path / "submission_metadata.json").write_text(json.dumps(metadata))
    decide(tmp_path, ["submission,*,4"])
    graded = grade(
        {"submission": {"notes": {"notes.txt": ""}}},
        *("--metadata", "submission_metadata.json"),
        rubric=f"{due}\nlate = {{ per_day = 0.1 }}\n{RUBRIC}",
    )
    results = graded.results["submission"]
    assert results["score"] == pytest.approx(score)
    said = {8: "", 7.2: "1 day late: -10 % of 8.", 6.4: "2 days late: -20 % of 8."}[score]
    assert results["output"] == said
    page = (tmp_path / "out/submissions/submission/index.html").read_text()
    assert (f"<p>{said}</p>" in page) == bool(said)
    assert results["visibility"] == "visible"
