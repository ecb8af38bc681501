"""Run one part in one rank: ``python driver FILE PART MASTER PORT NODES RANK SCRIPT``.

FILE is a course's driver, PART a name in its ``PARTS``, SCRIPT the student's file. The rank's
secret numbers come through stdin, before anything of the student's is imported.
"""

import importlib
import os
import sys
import types

_HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    """Run the checks; return 0 if all could be run."""
    # Nothing of this folder on the path: the student's imports come first.
    sys.path.remove(sys.path[0])
    file, part, master, port, nodes, rank, script = sys.argv[1:]
    known = _forget_lab()
    for name, folders in (("lab", []), ("lab.grade", []), ("lab.grade.driver", [_HERE])):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = folders
    running = importlib.import_module("lab.grade.driver.running")
    driver = running.load_driver(file)
    # What the student may call lab is his own.
    _forget_lab()
    sys.modules.update(known)
    address = f"tcp://{master}:{port}"
    return running.run_part(
        driver, part, script, address=address, rank=running.read_rank(int(rank), int(nodes))
    )


def _forget_lab() -> "dict[str, types.ModuleType]":
    """Remove ``lab`` from the imported modules, and return what was there."""
    names = [name for name in sys.modules if name.partition(".")[0] == "lab"]
    return {name: sys.modules.pop(name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
