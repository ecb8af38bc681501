"""Hostile texts: each regular expression takes a megabyte of its worst letters in linear time.

The patterns are found in the sources: what ``re.search`` and its kin are called with, how the
compiled ones are used, and the patterns of known_errors.toml. For each repeat in a pattern without
an upper bound, texts are made that lead up to it again and again, or that repeat what it takes.
"""

import ast
import builtins
import functools
import importlib
import operator
import re
import signal
import sys
from collections.abc import Iterator
from re import _constants as sre
from re import _parser as parser
from types import ModuleType
from typing import NamedTuple

import pytest

from common.config import parser as config_parser
from common.utils import environment
from lab.explain.diagnosis import known_errors
from lab.explain.streams import LONGEST_LINE
from lab.grade import convert, rubric
from lab.ssh import hosts
from tests.helpers import ROOT

SIZE = 1_000_000
# A linear pattern takes some hundredths of a second, one that is not takes minutes.
SECONDS = 5
METHODS = "search match fullmatch findall finditer sub split".split()
CALLS = {f"re.{name}" for name in [*METHODS, "compile"]}
SOURCES = sorted(
    path
    for package in ("common", "courses", "lab")
    for path in (ROOT / package).rglob("*.py")
    if "skeletons" not in path.parts and "scripts" not in path.parts
)
# Patterns that a loop or a parameter holds, by the file and the text of the expression.
ELSEWHERE = {
    ("common/config/parser.py", "argparses"): lambda: list(config_parser._REWORDED),
    ("common/utils/environment.py", "allowed"): lambda: texts_of(
        environment._USER_RULES, environment._TORCHRUN_RULES
    ),
    ("lab/grade/convert.py", "pattern"): lambda: [pattern for pattern, _ in convert._OF_PYTHON_2],
    ("lab/grade/rubric.py", "pattern"): lambda: [pattern for pattern, _ in rubric._RESERVED],
    ("lab/learn/lessons/nodes.py", "pattern"): lambda: patterns_given_to("print_seconds"),
    ("lab/ssh/hosts.py", "pattern"): lambda: [pattern for pattern, *_ in hosts.REFUSALS],
}


def texts_of(*tables) -> list[str]:
    rules = [allowed for table in tables for allowed, _ in table.values()]
    return [allowed for allowed in rules if isinstance(allowed, str)]


def patterns_given_to(function: str) -> list[str]:
    """Return the texts in the calls of a function."""
    calls = [
        node
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]
    found = [
        argument.value
        for call in calls
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
    assert found
    return found


# It searches lines of a limited length, for the patterns of known_errors.toml, which are tried too.
TABLE = "lab/explain"


# --- the patterns of the sources ---


class Use(NamedTuple):
    """A pattern and one way in which it is used."""

    place: str
    pattern: str | bytes
    flags: int
    method: str
    size: int = SIZE


def uses() -> Iterator[Use]:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if re.search("^import re$", text, re.MULTILINE):
            yield from uses_in(path.relative_to(ROOT).as_posix(), ast.parse(text))
    for error in known_errors():
        for pattern in filter(None, [*error.patterns, error.near, error.after]):
            yield Use(f"{TABLE} {error.name}", pattern, 0, "search", LONGEST_LINE)


def uses_in(name: str, tree: ast.Module) -> Iterator[Use]:
    module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        for call in calls_of_re(function):
            place = f"{name}:{call.lineno}"
            method = call.func.attr
            found = evaluated(call.args[0], module, function)
            for pattern in [found] if found else elsewhere(name, ast.unparse(call.args[0])):
                assert pattern is not None, f"{place}: name in ELSEWHERE where its patterns are"
                size = LONGEST_LINE if name.startswith(TABLE) else SIZE
                for used in used_methods(tree, call) if method == "compile" else [method]:
                    yield Use(place, pattern, flags_of(call), used, size)


def calls_of_re(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of re.search and its kin; not those in functions inside."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            yield node


def flags_of(call: ast.Call) -> int:
    given = [one for one in ast.walk(call) if isinstance(one, ast.Attribute) and one.attr.isupper()]
    flags = [getattr(re, one.attr) for one in given if ast.unparse(one.value) == "re"]
    return functools.reduce(operator.or_, flags, 0)


def elsewhere(name: str, expression: str) -> list[str | None]:
    if name.startswith(TABLE):
        return []
    return ELSEWHERE.get((name, expression), lambda: [None])()


class Word(str):
    """Stands for an object that is not known; so do its attributes and what its methods return."""

    def __getattr__(self, name: str) -> "Word":
        return self

    def __call__(self, *arguments: object) -> "Word":
        return self


class LocalNames(dict):
    """The names of a function: what it assigns to them, or a word where that is not known."""

    def __init__(self, function: ast.AST, module: ModuleType) -> None:
        super().__init__()
        self.module = module
        self.assigned = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(function, ast.FunctionDef)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def __missing__(self, name: str) -> object:
        if name in self.assigned:
            value = self.assigned.pop(name)
            return eval(compile(ast.Expression(value), name, "eval"), vars(self.module), self)
        if hasattr(self.module, name) or hasattr(builtins, name):
            raise KeyError(name)
        return Word("word")


def evaluated(expression: ast.expr, module: ModuleType, function: ast.AST) -> str | bytes | None:
    """Return the pattern that an expression gives; None if a loop or a parameter holds it."""
    if isinstance(expression, ast.Name):
        names = LocalNames(function, module)
        if expression.id not in names.assigned and not hasattr(module, expression.id):
            return None
    code = compile(ast.Expression(expression), "pattern", "eval")
    try:
        return eval(code, vars(module), LocalNames(function, module))
    except (AttributeError, TypeError):
        return None


def used_methods(tree, call):
    """Return the methods that are called on a compiled pattern, or all if it goes elsewhere."""
    names = [
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and node.value is call
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
    }
    return sorted(used & set(METHODS)) or ["search"]


# --- their worst texts ---


def sample(tree) -> str:
    """Return a short text that a parsed pattern matches, or nearly."""
    return "".join(map(sample_of, tree))


def sample_of(item) -> str:
    kind, argument = item
    if kind is sre.LITERAL:
        return chr(argument)
    if kind is sre.NOT_LITERAL:
        return "a" if argument != ord("a") else "b"
    if kind is sre.ANY:
        return "a"
    if kind is sre.IN:
        return sample_of_class(argument)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, _, body = argument
        return sample(body) * max(least, 1)
    if kind is sre.SUBPATTERN:
        return sample(argument[-1])
    if kind is sre.ATOMIC_GROUP:
        return sample(argument)
    if kind is sre.BRANCH:
        return sample(argument[1][0])
    return ""  # a place, or a look ahead


CATEGORIES = {
    sre.CATEGORY_DIGIT: "1",
    sre.CATEGORY_SPACE: " ",
    sre.CATEGORY_WORD: "a",
    sre.CATEGORY_NOT_SPACE: "a",
    sre.CATEGORY_NOT_WORD: "-",
    sre.CATEGORY_NOT_DIGIT: "a",
}


def sample_of_class(argument) -> str:
    return letters_of(argument)[0]


def letters_of(argument) -> list[str]:
    """Return letters of a class, one of each kind in it."""
    pattern = re.compile(class_text(argument))
    return [letter for letter in "a1 \nA-._:/'\"[(,é" if pattern.fullmatch(letter)] or ["a"]


def class_text(argument) -> str:
    parts = []
    for kind, value in argument:
        if kind is sre.NEGATE:
            parts.append("^")
        elif kind is sre.LITERAL:
            parts.append(re.escape(chr(value)))
        elif kind is sre.RANGE:
            parts.append(f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}")
        elif kind is sre.CATEGORY:
            parts.append({"1": r"\d", " ": r"\s"}.get(CATEGORIES[value]) or category(value))
    return f"[{''.join(parts)}]"


def category(value) -> str:
    negated = {
        sre.CATEGORY_NOT_SPACE: r"\S",
        sre.CATEGORY_NOT_WORD: r"\W",
        sre.CATEGORY_NOT_DIGIT: r"\D",
    }
    return negated.get(value, r"\w")


def worst_texts(pattern: str, flags: int, size: int) -> Iterator[str]:
    """Yield texts for each unbounded repeat in a pattern."""
    for head, body in repeats(list(parser.parse(pattern, flags)), ""):
        for unit in {body, f"{head}{body}", f"{head}", f"{head}\n", f"\n{body}"}:
            if unit:
                repeated = unit * (size // len(unit))
                yield repeated
                yield f"{head}{repeated}\n!"


def repeats(tree, head: str) -> Iterator[tuple[str, str]]:
    """Yield for each unbounded repeat what comes before it, and a text that it takes once."""
    for item in tree:
        kind, argument = item
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            _, most, body = argument
            if most is sre.MAXREPEAT:
                letters = [sample(body)]
                if len(body) == 1 and body[0][0] is sre.IN:
                    letters = letters_of(body[0][1])
                elif len(body) == 1 and body[0][0] is sre.ANY:
                    letters = ["a", " "]
                for letter in letters:
                    yield head, letter
            yield from repeats(body, head)
        elif kind is sre.SUBPATTERN:
            yield from repeats(argument[-1], head)
        elif kind is sre.BRANCH:
            for branch in argument[1]:
                yield from repeats(branch, head)
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            yield from repeats(argument[1], head)
        head += sample_of(item)


# --- the test ---


class TooSlowError(Exception):
    """A pattern has taken longer than it may."""


def too_slow(signum, frame):
    raise TooSlowError


def apply(use: Use, text: str) -> None:
    compiled = re.compile(use.pattern, use.flags)
    whole = text.encode() if isinstance(use.pattern, bytes) else text
    if use.method in ("search", "match", "fullmatch"):
        getattr(compiled, use.method)(whole)
        return
    for _ in compiled.finditer(whole):  # as findall, sub and split do
        pass


@pytest.fixture
def limited(monkeypatch):
    """Raise TooSlowError once the processor has worked for ``SECONDS`` since ``start``."""
    before = signal.signal(signal.SIGPROF, too_slow)
    yield lambda: signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def slow_text(use: Use, start) -> str | None:
    pattern = use.pattern.decode("latin-1") if isinstance(use.pattern, bytes) else use.pattern
    for text in worst_texts(pattern, use.flags, use.size):
        start()
        try:
            apply(use, text)
        except TooSlowError:
            return text[:40]
    return None


@functools.cache
def all_uses() -> list[Use]:
    return list(dict.fromkeys(uses()))


def test_the_patterns_are_found():
    files = {use.place.partition(":")[0] for use in all_uses()}
    assert len(all_uses()) > 200
    assert {"common/errors.py", "lab/grade/demands.py", "lab/audit/probe/state.py"} <= files


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?m)^\s*import",
        r"(\d+)([a-z]?)$",
        r"\[at [^\]]*\]",
        r"(a+)+b",
        r"(?ms)^usage: (.*?)^\S+: error",
    ],
)
def test_a_slow_pattern_is_caught(limited, pattern, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.5)
    assert slow_text(Use("here", pattern, 0, "search", 100_000), limited) is not None


@pytest.mark.slow
def test_every_pattern_takes_a_megabyte_of_its_worst_letters(limited):
    slow = {f"{use.place} {use.pattern!r}": slow_text(use, limited) for use in all_uses()}
    assert {place: text for place, text in slow.items() if text is not None} == {}
