"""Generated mutants: do the tests notice small changes of the code? Run by hand; it resumes.

    python -m tests.helpers.mutants TREE FOLDER

TREE is a checkout of its own, whose files are changed and restored. FOLDER keeps ``mutants.json``
(150, seeded; another TREE then gets the same ones) and, by the name of TREE, which tests execute
which line and the results. A mutant runs against the tests that execute its line in their own
process; 30 mutants that only other processes execute run against all tests of their package. The
first failing test kills it. Two trees take an hour each on an idle core.
"""

import ast
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from coverage import CoverageData

# name: what is mutated, its tests, and how many mutants only other processes execute
PACKAGES = {
    "sync": (["common/sync"], ["tests/common/sync", "tests/lab/proofs"], 10),
    "training_engine": (["common/training_engine"], ["tests/common/training_engine"], 10),
    "distributed": (["common/distributed"], ["tests/common/distributed"], 10),
    "claims": (["lab/report/claims.py", "lab/report/verdict.py"], ["tests/lab/report"], 0),
    "findings": (["lab/audit/findings"], ["tests/lab/audit"], 0),
}
EACH = 30
_UNMARKED = "not slow and not mutation and not engines and not long and not gpu"
_COMPARED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    **{ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}
_SPOKEN = ("warn", "notice", "print_to_stderr", "say")


def changed(node):
    """Return a copy of a node with one change, or None if none is known."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        return ast.Compare(node.left, [_COMPARED[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(_COMPARED[type(node.op)](), node.values)
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPARED:
        texts = [one for one in (node.left, node.right) if isinstance(one, ast.JoinedStr)]
        return None if texts else ast.BinOp(node.left, _COMPARED[type(node.op)](), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return ast.Constant(not node.value if node.value is True else node.value + 1)
    if isinstance(node, ast.AugAssign | ast.Continue):
        return ast.Pass()
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.Pass()
    return None


def places(tree):
    """Return the nodes that can be changed: in functions, but not in messages or annotations."""
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    inside = {id(one) for function in functions for part in function.body for one in ast.walk(part)}
    for node in ast.walk(tree):
        spoken = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_SPOKEN)
        if spoken or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            inside -= {id(one) for one in ast.walk(node)}
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            inside -= {id(one) for one in ast.walk(part)} if part is not None else set()
    return [one for one in ast.walk(tree) if id(one) in inside and changed(one) is not None]


class _Change(ast.NodeTransformer):
    def __init__(self, wanted):
        self.wanted = wanted

    def visit(self, node):
        if node is self.wanted:
            return ast.copy_location(changed(node), node)
        return self.generic_visit(node)


def mutant_of(source, index):
    """Return the source with the change at place ``index``."""
    tree = ast.parse(source)
    return ast.unparse(ast.fix_missing_locations(_Change(places(tree)[index]).visit(tree)))


def pytest_in(tree, *words, timeout=3600):
    """Run tests of a tree; return the status, or None if they ran into the limit."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", _UNMARKED]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        ended = subprocess.run(
            [*command, *words], cwd=tree, env=environment, timeout=timeout, **quiet
        )
    except subprocess.TimeoutExpired:
        return None
    return ended.returncode


def covering(tree, folder):
    """Return by file and line the tests that execute it in their own process."""
    kept = folder / f"covering-{tree.name}.json"
    if not kept.exists():
        found = {}
        for name, (mutated, tests, _) in PACKAGES.items():
            data, rules = folder / f"{name}-{tree.name}.coverage", folder / "coverage.ini"
            rules.write_text(f"[run]\ndata_file = {data}\n")
            folders = {one.rpartition("/")[0] if one.endswith(".py") else one for one in mutated}
            sources = [f"--cov={one}" for one in folders]
            pytest_in(tree, *sources, f"--cov-config={rules}", "--cov-context=test", *tests)
            recorded = CoverageData(str(data))
            recorded.read()
            for file in recorded.measured_files():
                lines = recorded.contexts_by_lineno(file).items()
                found[os.path.relpath(file, tree)] = {
                    line: sorted({one.partition("|")[0] for one in by if one.endswith("|run")})
                    for line, by in lines
                }
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def pick(tree, tests_of):
    """Return the mutants: package, file, place, its line's text, whether its line is executed."""
    draw, picked = random.Random(31), []
    for name, (mutated, _, elsewhere) in PACKAGES.items():
        found = {True: [], False: []}
        for path in sorted(file for one in mutated for file in _files(tree / one)):
            source, file = path.read_text(), str(path.relative_to(tree))
            for index, node in enumerate(places(ast.parse(source))):
                here = bool(tests_of.get(file, {}).get(str(node.lineno)))
                text = source.splitlines()[node.lineno - 1].strip()
                found[here].append([name, file, index, node.lineno, text, here])
        for here, count in ((True, EACH - elsewhere), (False, elsewhere)):
            picked += draw.sample(found[here], min(count, len(found[here])))
    return picked


def _files(path):
    return [path] if path.is_file() else path.rglob("*.py")


def main(tree, folder):
    """Run every mutant that has no result yet, and print how many of each package were killed."""
    tree, folder = Path(tree).resolve(), Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tests_of, mutants = covering(tree, folder), folder / "mutants.json"
    if not mutants.exists():
        mutants.write_text(json.dumps(pick(tree, tests_of)))
    kept = folder / f"results-{tree.name}.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    wanted = json.loads(mutants.read_text())
    for number, (name, file, index, line, text, here) in enumerate(wanted):
        if str(number) in results:
            continue
        source = (tree / file).read_text()
        assert source.splitlines()[line - 1].strip() == text, f"{file} differs from the first tree"
        tests = tests_of[file].get(str(line), []) if here else PACKAGES[name][1]
        (tree / file).write_text(mutant_of(source, index))
        try:
            status = pytest_in(tree, "-x", *tests, timeout=600) if tests else 0
        finally:
            (tree / file).write_text(source)
        results[str(number)] = "survived" if status == 0 else "killed"
        kept.write_text(json.dumps(results))
        print(number, results[str(number)], file, line, text, flush=True)
    counted = Counter((one[0], results[str(number)]) for number, one in enumerate(wanted))
    print(*(f"{name} {how}: {count}" for (name, how), count in sorted(counted.items())), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
