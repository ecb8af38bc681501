"""Check, before anything else is imported, that this Python can run the project.

Uses the standard library alone, and no syntax newer than Python 3.6, so that any Python can say
what is missing.
"""

import os
import shlex
import sys
from importlib.util import find_spec

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
# The modules of the packages in pyproject.toml's dependencies, but for PyYAML (lab grade).
MODULES = (
    "torch",
    "torchvision",
    "numpy",
    "sklearn",
    "matplotlib",
    "PIL",
    "cloudpickle",
    "jinja2",
    "scipy",
    "filelock",
    "psutil",
    "rich",
    "msgspec",
)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def check_dependencies(
    command: "tuple[str, ...]" = tuple(sys.argv), optional: "tuple[str, ...]" = ()
) -> None:
    """Exit with status 2 and a message if this Python or its torch is too old, or lacks a package.

    command : what follows ``python``, for the message. optional : modules that may be missing,
    because the command itself reports them.
    """
    missing = [name for name in MODULES if name not in optional and find_spec(name) is None]
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        problem = f"is version {sys.version.split()[0]}; this project needs {oldest} or later"
    elif missing:
        problem = f"has no package {', '.join(missing)}"
    elif _old_torch():
        oldest = ".".join(map(str, OLDEST_TORCH))
        problem = f"has torch {_old_torch()}; this project needs {oldest} or later"
    else:
        return
    print(f"error: this Python ({sys.executable}) {problem}.", file=sys.stderr)
    print(_advice(" ".join(map(shlex.quote, command))), file=sys.stderr)
    sys.exit(2)


def _old_torch() -> "str | None":
    """Return the version of the installed torch if it is too old; it is not imported."""
    from importlib.metadata import distributions  # not in Python 3.6

    for torch in distributions(name="torch"):
        release = tuple(map(int, torch.version.split(".")[:2]))
        return torch.version if release < OLDEST_TORCH else None
    return None


def _advice(command: str) -> str:
    """Return how to set the environment up, and how to start the command with its Python."""
    if not os.path.isfile(os.path.join(_ROOT, "Makefile")):
        return "Install the project with its packages: python -m pip install data-parallel-lab"
    python = os.path.join(".venv", "bin", "python")
    make = "make setup"
    if os.path.realpath(os.getcwd()) != os.path.realpath(_ROOT):
        python = os.path.join(_ROOT, python)
        make = f"make -C {shlex.quote(_ROOT)} setup"
    return (
        "Set up the project's environment once, then start the command with its Python:\n\n"
        f"    {make}\n    {shlex.quote(python)} {command}"
    )
