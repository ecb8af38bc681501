"""Classes of submissions, generated from the cases of the audit's tests, and a rubric for them."""

import csv
import shutil

from tests.helpers.audited import FOLDER, read_cases

COMMAND = "python {script} --master-ip {master} --port {port} --num-nodes {nodes} --rank {rank}"
RUBRIC = f"""
title = "A course"
memory_gb = 3
disk_gb = 0.5
processes = 400
limit_seconds = 120
expected_seconds = 10
[deductions]
literal-divisor = 0.5
[parts.part2]
title = "Part 2: by hand"
files = ["**/part2/main.py"]
command = "{COMMAND}"
ranks = [2]
points = 6
accepts.clipped-before-averaging = "The handout asks for it."
[parts.part3]
title = "Part 3: DDP"
files = ["**/part3/main.py"]
command = "{COMMAND}"
ranks = [2]
uses = ["ddp"]
points = 4
"""
ONE_PART = RUBRIC.split("[parts.part3]")[0]


def make_class(folder, submissions):
    """Write a folder for each name; ``submissions`` has scripts, or names of cases, by part."""
    cases = {case.name: case.script for case in read_cases()}
    for name, scripts in submissions.items():
        for part, script in scripts.items():
            place = folder / name / part
            place.mkdir(parents=True)
            (place / "main.py").write_text(cases.get(script, script))
            shutil.copy(FOLDER / "student.py", place)
    return [folder / name for name in submissions]


def read_class(out):
    """Return the rows of class.csv by submission."""
    with (out / "class.csv").open() as file:
        return {row["submission"]: row for row in csv.DictReader(file)}
