"""``grade``: grade a class in an empty folder; a class is scripts, or names of cases, by part.

A part may also be several files by their names.
"""

import csv
import json
import shutil
from types import SimpleNamespace

import pytest

from lab.audit.cases import STARTER_CODE
from lab.cli import main
from tests.helpers.audited import BY_FLAGS, read_cases

RUBRIC = f"""
title = "A course"
memory_gb = 3
disk_gb = 0.5
processes = 400
limit_seconds = 120
deductions.literal-divisor = 0.5
[parts.part2]
title = "Part 2: by hand"
files = ["**/part2/main.py"]
command = "{BY_FLAGS}"
points = 6
accepts.clipped-before-averaging = "The handout asks for it."
[parts.part3]
title = "Part 3: DDP"
files = ["**/part3/main.py"]
command = "{BY_FLAGS}"
ranks = [2]
uses = ["ddp"]
points = 4
"""


@pytest.fixture
def grade(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cases = {case.name: case.script for case in read_cases()}

    def run(submissions, *flags, rubric=RUBRIC):
        (tmp_path / "rubric.toml").write_text(rubric)
        for name, scripts in submissions.items():
            for part, script in scripts.items():
                place = tmp_path / "class" / name / part
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(STARTER_CODE, place)
                files = script if isinstance(script, dict) else {"main.py": script}
                for file, text in files.items():
                    (place / file).write_text(cases.get(text, text))
        paths = sorted((tmp_path / "class").iterdir())
        words = ["grade", *paths, "--rubric", "rubric.toml", "--out", "out", *flags]
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        print(out, err)
        rows, out_folder = {}, tmp_path / "out"
        if status == 0:
            with (out_folder / "class.csv").open() as file:
                rows = {row["submission"]: row for row in csv.DictReader(file)}
        results = {
            path.parent.name: json.loads(path.read_text())
            for path in out_folder.glob("submissions/*/results.json")
        }
        return SimpleNamespace(status=status, said=out, error=err, rows=rows, results=results)

    return run
