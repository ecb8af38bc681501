"""Loads the probe when Python starts with this folder on PYTHONPATH, then whatever it hides.

The probe gets a name of its own, so that the script's imports stay as they are.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_NAME = "_lab_audit_probe"


def _load_probe() -> None:
    folder = os.path.dirname(_HERE)
    path = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(_NAME, path, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    module.install()


def _run_hidden() -> None:
    """Run the sitecustomize that would have been found without this one."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _NAME not in sys.modules:
    _load_probe()
_run_hidden()
