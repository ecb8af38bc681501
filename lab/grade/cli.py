"""The flags of ``lab grade``."""

import argparse
from pathlib import Path

from lab.flags import add_command


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``grade`` to the commands of ``lab``."""
    add_command(
        commands,
        "grade",
        run="lab.grade.grade:main_grade",
        help="mark submissions of an assignment by a rubric; each part is audited in a sandbox, "
        "and what the audit cannot tell is left to you. A second call goes on where the first one "
        "stopped",
        flags={
            "submissions": {
                "nargs": "*",
                "type": Path,
                "metavar": "SUBMISSION",
                "help": "a folder, zip or tar for each student",
            },
            "--rubric": {
                "default": "cs744",
                "metavar": "NAME",
                "help": "a shipped rubric (cs744, cos568, cs336, efficient-dl), or a TOML file",
            },
            "--print-rubric": {"action": "store_true", "help": "print the rubric and end"},
            "--out": {
                "type": Path,
                "default": Path("grades"),
                "metavar": "FOLDER",
                "help": "the folder for the tables and pages; your overrides.csv is read from it",
            },
            "--map": {
                "type": Path,
                "metavar": "FILE",
                "help": "a CSV file (submission,part,path,command) for scripts with other names "
                "or commands; path or command may be empty",
            },
            "--roster": {
                "type": Path,
                "metavar": "FILE",
                "help": "a CSV file of the students (login, e-mail, name, section, group), e.g. "
                "the gradebook that Canvas exports; gradebook.csv then has a line for each",
            },
            "--metadata": {
                "type": Path,
                "metavar": "FILE",
                "help": "Gradescope's submission_metadata.json: when this was handed in",
            },
            "--again": {
                "action": "store_true",
                "help": "run once more what could not be run, as after installing what it lacked",
            },
            "--jobs": {
                "type": int,
                "metavar": "N",
                "help": "parts to run at a time (default: as cores and memory allow)",
            },
            "--no-sandbox": {
                "action": "store_true",
                "help": "run the submissions with your own rights, or for root with those of an "
                "ordinary user, as in a container that holds nothing else",
            },
            "--self": {
                "action": "store_true",
                "help": "a student's check before handing in: marks this folder, or those given, "
                "without a sandbox and without the parts that the rubric hides",
            },
            "--zip": {
                "type": Path,
                "metavar": "FILE",
                "help": "write an autograder for Gradescope with this rubric, and end",
            },
        },
    )
