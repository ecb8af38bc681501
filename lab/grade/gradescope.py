"""The autograder for Gradescope: a zip with setup.sh and run_autograder in its top folder.

Gradescope ("Autograder Specifications") runs setup.sh once, while it builds the container, with the
zip unpacked in /autograder/source; for a submission it runs /autograder/run_autograder, which finds
it in /autograder/submission and writes /autograder/results/results.json.
"""

import io
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from common.utils.atomic_files import write_atomically
from common.utils.paths import REPOSITORY
from lab.grade.rubric import FOLDER, load_rubric, rubric_path

_FOLDERS = ("common", "courses", "lab", "recipes")
_ASSIGNMENT = "assignment"  # has the rubric, and its driver
_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
_SETUP = """\
#!/usr/bin/env bash
set -euo pipefail
apt-get update
# Ubuntu 22.04 has Python 3.11 besides its own 3.10; later images come with a newer one.
apt-get install -y python3.11 python3.11-venv || apt-get install -y python3 python3-venv
"$(command -v python3.11 || command -v python3)" -m venv /autograder/environment
/autograder/environment/bin/pip install \\
    --extra-index-url https://download.pytorch.org/whl/cpu /autograder/source
# The folders that the rubric mounts; add commands that fill them, a link (ln -s) for each that
# appears at an absolute path, and packages that the scripts need. CIFAR-10 belongs into data.
cd /autograder/source
mkdir -p data {folders}
/autograder/environment/bin/python -c \\
    "from torchvision.datasets import CIFAR10; CIFAR10('data', download=True)"
"""
_RUN = """\
#!/usr/bin/env bash
# The container is the sandbox, and scripts run in it as an ordinary user. For a trial elsewhere set
# AUTOGRADER, the folder of Gradescope, and LAB, the lab command.
set -euo pipefail
autograder=${AUTOGRADER:-/autograder}
lab=${LAB:-$autograder/environment/bin/lab}
rm -rf "$autograder/grades"
chmod go-w "$autograder" "$autograder/results" "$autograder/source"
cd "$autograder/source"
late=()
if [ -f "$autograder/submission_metadata.json" ]; then
    late=(--metadata "$autograder/submission_metadata.json")
fi
"$lab" grade "$autograder/submission" --rubric assignment/rubric.toml \\
    --no-sandbox --out "$autograder/grades" "${late[@]}"
cp "$autograder/grades/submissions/submission/results.json" "$autograder/results/"
"""


def write_autograder(path: Path, name: str) -> None:
    """Write the zip for a rubric, which may have been named as a shipped one or a file.

    Raises UserError without a checkout of the project, for anything wrong in the rubric, or if the
    file cannot be written.
    """
    rubric = load_rubric(name)
    if not (REPOSITORY / "pyproject.toml").is_file():
        raise UserError("--zip needs a checkout of the project: git clone it, and call lab there")
    setup = _SETUP.format(folders=shlex.join(dict.fromkeys(rubric.mounts.values())))
    programs = {"setup.sh": setup, "run_autograder": _RUN}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for program, text in programs.items():
            entry = zipfile.ZipInfo(program)
            entry.external_attr = 0o755 << 16  # what Gradescope runs
            archive.writestr(entry, text)
        source = rubric_path(name).absolute()
        archive.write(source, f"{_ASSIGNMENT}/rubric.toml")
        for name in filter(None, [rubric.driver, rubric.provides]):
            own = Path(name)
            if not own.is_relative_to(FOLDER):
                for file in [own, *sorted(own.rglob("*"))]:
                    archive.write(file, f"{_ASSIGNMENT}/{file.relative_to(source.parent)}")
        for file in _project_files():
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(REPOSITORY))
    write_atomically(path, content.getvalue())


def _project_files() -> Iterator[Path]:
    """Yield the files of the project that ``lab grade`` needs there."""
    for name in _FOLDERS:
        yield from sorted((REPOSITORY / name).rglob("*"))
    for name in _FILES:
        yield REPOSITORY / name
