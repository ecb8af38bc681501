"""Check one part in one rank: ``python drivers PART SCRIPT MASTER PORT NODES RANK``.

PART is a module and the list of checks in it, for example ``cs336.bucketed``.
"""

import importlib
import os
import sys
import types

_NAME = "_lab_grade_drivers"


def main() -> int:
    """Run the checks; return 0 if all could be made, whatever they found."""
    here = os.path.dirname(os.path.abspath(__file__))
    # A name of its own, and nothing of this folder on the path: the student's imports come first.
    sys.path.remove(sys.path[0])
    package = sys.modules[_NAME] = types.ModuleType(_NAME)
    package.__path__ = [here]
    part, script, master, port, nodes, rank = sys.argv[1:]
    module_name, name = part.split(".")
    checks = importlib.import_module(f"{_NAME}.{module_name}").PARTS[name]
    run_part = importlib.import_module(f"{_NAME}.checking").run_part
    address = f"tcp://{master}:{port}"
    return run_part(checks, script, address=address, size=int(nodes), rank=int(rank))


if __name__ == "__main__":
    sys.exit(main())
