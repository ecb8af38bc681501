"""Find the packages that this project needs and this Python lacks, before anything runs.

Imports the standard library alone.
"""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

_IMPORTED_AS = {"scikit-learn": "sklearn", "pillow": "PIL"}


def missing_packages(project: Path, *more: str) -> str:
    """Return an error message that names the packages that are missing; "" if none is.

    Parameters
    ----------
    project : a pyproject.toml; its dependencies are needed, and ``more``.
    """
    settings = tomllib.loads(project.read_text())
    dependencies = [re.match(r"[\w-]+", text)[0] for text in settings["project"]["dependencies"]]
    missing = [
        name
        for name in (*dependencies, *more)
        if importlib.util.find_spec(_IMPORTED_AS.get(name, name)) is None
    ]
    if not missing:
        return ""
    return (
        f"error: {sys.executable} does not find {len(missing)} of the packages that the run needs: "
        f"{', '.join(missing)}. Nothing has run. Install them, or unpack their wheels into a "
        "folder and put that on PYTHONPATH"
    )
