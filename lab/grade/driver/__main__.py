"""Check one part in one rank: ``python driver FILE PART MASTER PORT NODES RANK SCRIPT``.

FILE is a course's driver, PART a name in its ``PARTS``, SCRIPT the student's file.
"""

import importlib
import importlib.util
import os
import sys
import types

_HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    """Run the checks; return 0 if all could be made, whatever they found."""
    # Nothing of this folder on the path: the student's imports come first.
    sys.path.remove(sys.path[0])
    file, part, master, port, nodes, rank, script = sys.argv[1:]
    known = _forget_lab()
    for name, folders in (("lab", []), ("lab.grade", []), ("lab.grade.driver", [_HERE])):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = folders
    run_part = importlib.import_module("lab.grade.driver.running").run_part
    driver = _load(file)
    # What the student may call lab is his own.
    _forget_lab()
    sys.modules.update(known)
    address = f"tcp://{master}:{port}"
    return run_part(driver, part, script, address=address, size=int(nodes), rank=int(rank))


def _forget_lab() -> "dict[str, types.ModuleType]":
    """Remove ``lab`` from the imported modules, and return what was there."""
    names = [name for name in sys.modules if name.partition(".")[0] == "lab"]
    return {name: sys.modules.pop(name) for name in names}


def _load(file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("_lab_course_driver", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file: give the driver an ending .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
