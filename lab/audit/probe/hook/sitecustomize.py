"""Loads the probe when Python starts with this folder on PYTHONPATH, then whatever it hides.

The probe gets a name of its own, so that the script's imports stay as they are.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types

_HERE = os.path.dirname(os.path.abspath(__file__))
_NAME = "_lab_audit_probe"


try:
    if _NAME not in sys.modules and sys.version_info >= (3, 8):
        package = sys.modules[_NAME] = types.ModuleType(_NAME)
        package.__path__ = [os.path.dirname(_HERE)]
        importlib.import_module(f"{_NAME}.state").install()
finally:  # run the sitecustomize that would have been found without this one
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
